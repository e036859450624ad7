"""Write docs/benchmarks.md from docs/figures/*.json, the answers of `tools/bench/all.py`.

Of each kind of machine (CPU and cores) the newest file counts. A figure that no file has is not on the page. Run without
arguments to write the page; with --check to fail where the committed one is not what would be written.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools" / "bench"))

from figures import PARTS, Figure, Part  # noqa: E402 -- the bench is a folder of scripts, not a package

HEAD = """# Benchmarks

Written by `tools/make_benchmarks.py` from [figures/](figures/), the answers of `tools/bench/all.py`; do not edit this page.

    uv run tools/bench/all.py --json > docs/figures/NAME.json    # about 40 minutes on a quiet machine
    python tools/make_benchmarks.py

A value is the median of its repeats; the noise is their range. An aim in bold was missed. Compare figures of one table only: machines
differ, and virtual ones change their speed by the hour. Ratios of two sides that take turns are the steadiest.
Nothing has been measured on a GPU yet: `tools/bench/gpu.py` does that where there is one. [The benches' own page](../tools/bench/README.md)
says how each measures, and names two more that take longer and whose result is a count: `chaos.py` and `soak.py`.
"""


def newest(folder: Path) -> list[dict[str, Any]]:
    """Return the newest answer of each kind of machine; of one day the last by name."""
    kinds: dict[tuple[str, int], dict[str, Any]] = {}
    found = [(json.loads(path.read_text()), path.name) for path in folder.glob("*.json")]
    for answer, _ in sorted(found, key=lambda each: (each[0]["date"], each[1])):
        kinds[answer["machine"]["cpu"], answer["machine"]["cores"]] = answer
    return list(kinds.values())


def page(answers: list[dict[str, Any]]) -> str:
    """Return the text of docs/benchmarks.md."""
    lines = [HEAD.rstrip()]
    for part in PARTS:
        tables = [table for answer in answers if (table := _table(part, answer))]
        if tables:
            lines += ["", f"## {part.title}", "", part.about, "", _command(part)]
            lines += [line for table in tables for line in ("", *table)]
    if len(lines) == 1:
        lines += ["", "No figures have been committed yet."]
    return "\n".join(lines) + "\n"


def _command(part: Part) -> str:
    name, *arguments = part.command
    times = f", {part.repeats} times" if part.repeats > 1 else ""
    return f"`uv run tools/bench/{name}.py {' '.join(arguments)}`{times}"


def _table(part: Part, answer: dict[str, Any]) -> list[str]:
    rows = {row["name"]: row for row in answer["figures"] if row["part"] == part.name}
    shown = [(figure, rows[figure.name]) for figure in part.figures if figure.name in rows]
    if not shown:
        return []
    machine = answer["machine"]
    changed = ", with uncommitted changes" if answer["dirty"] else ""
    return [
        f"{answer['date']}, commit {answer['commit']}{changed}, {machine['cores']} cores of {machine['cpu']}, "
        f"load before {machine['load_before']:g}, torch {answer['versions']['torch']}:",
        "",
        "| figure | what it is | value | noise | repeats | aim |",
        "|---|---|---|---|---|---|",
        *(_row(figure, row) for figure, row in shown),
    ]


def _row(figure: Figure, row: dict[str, Any]) -> str:
    unit = f" {figure.unit}" if figure.unit else ""
    noise = "" if row["noise"] is None else f"{row['noise']:g}"
    aim = "" if figure.aim is None else f"{'at least' if figure.higher else 'at most'} {figure.aim:g}{unit}"
    aim = f"**{aim}**" if figure.misses(row["value"]) else aim
    count = len(row["repeats"])
    return f"| `{figure.name}` | {figure.about} | {row['value']:g}{unit} | {noise} | {count} | {aim} |"


def main() -> None:
    """Write the page, or with --check exit 1 where it is not current."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where the page is not current"
    )
    parser.add_argument("--figures", type=Path, default=ROOT / "docs" / "figures", help="the folder to read")
    parser.add_argument(
        "--page", type=Path, default=ROOT / "docs" / "benchmarks.md", help="the file to write or check"
    )
    options = parser.parse_args()
    text = page(newest(options.figures))
    if not options.check:
        options.page.write_text(text)
        print(f"wrote {options.page}")
    elif not options.page.is_file() or options.page.read_text() != text:
        sys.exit(
            f"{options.page} is not what {options.figures} holds; run tools/make_benchmarks.py and commit it"
        )


if __name__ == "__main__":
    main()
