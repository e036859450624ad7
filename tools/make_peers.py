"""Write the table of docs/algorithms.md that says which settings give another library's number, from `peers.toml`; `--check` compares."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

from offbeat_trainer.algorithms.registry import peer_recipes

PAGE = Path(__file__).resolve().parent.parent / "docs" / "algorithms.md"
BEGIN, END = "<!-- written by tools/make_peers.py -->\n", "<!-- end -->\n"


def table() -> str:
    """Return a row for each entry, in the order of algorithms, and what has none."""
    rows = ["| `algorithm=` | `recipe=` | what it is told | ours (`algorithm.*`) |\n|---|---|---|---|\n"]
    recipes = peer_recipes()
    for algorithm in sorted({name for entries in recipes.values() for name in entries}):
        for recipe, entries in recipes.items():
            entry = entries.get(algorithm)
            if isinstance(entry, dict):
                settings = cast("dict[str, object]", entry.get("settings", {}))
                told = " ".join(f"`{key}={value}`" for key, value in settings.items())
                differs = f". Not the same: {entry['differs']}" if "differs" in entry else ""
                rows.append(
                    f"| `{algorithm}` | `{recipe}` | `{entry['theirs']}` | {told or 'the defaults'}{differs} |\n"
                )
    reasons = [
        f"- `{recipe}` has nothing for "
        + "; ".join(f"`{name}`: {why}" for name, why in sorted(entries.items()) if isinstance(why, str))
        + ".\n"
        for recipe, entries in recipes.items()
        if any(isinstance(why, str) for why in entries.values())
    ]
    return "".join([*rows, "\n", *reasons])


def main() -> None:
    """Write the table, or end with a sentence where the page has another."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    page = before + BEGIN + table() + END + rest.partition(END)[2]
    if "--check" not in sys.argv:
        PAGE.write_text(page, encoding="utf-8")
    elif page != PAGE.read_text(encoding="utf-8"):
        raise SystemExit(f"{PAGE.name} is not what peers.toml says; run tools/make_peers.py")


if __name__ == "__main__":
    main()
