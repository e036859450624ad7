"""Write docs/settings.md: every setting of a run, as `offbeat settings` prints it.

Run without arguments to write the page; with --check to fail where the committed one is not what would be written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from offbeat_recipes.cli.settings import on_resume
from offbeat_recipes.settings.described import Described, described

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"


def page() -> str:
    """Return the text of docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "Written by `tools/make_settings.py` from the fields of the settings and what their source says of them; change those, not",
        "this page. `offbeat settings WORD` searches it, `offbeat settings --explain KEY` prints one. A setting marked *fixed*",
        "must stay as it was when a run goes on; one with choices named after it exists in those runs alone.",
    ]
    section = None
    for item in sorted(described(), key=lambda one: ("." in one.path, one.path.partition(".")[0])):
        here = item.path.partition(".")[0] if "." in item.path else "run"
        if here != section:
            section = here
            lines += [
                "",
                f"## {section}",
                "",
                "| setting | default | values | what it does |",
                "|---|---|---|---|",
            ]
        lines.append(_row(item))
    return "\n".join(lines) + "\n"


def _row(item: Described) -> str:
    fixed = " *fixed*" if on_resume(item).startswith("must") else ""
    only = f" ({item.runs})" if item.runs else ""
    values, help_text = (text.replace("|", "\\|") for text in (item.values, item.help))
    return f"| `{item.path}`{fixed} | `{item.default}` | {values} | {help_text}{only} |"


def main() -> None:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page is stale")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the page is")
    options = parser.parse_args()
    if not options.check:
        options.page.write_text(page())
    elif not options.page.exists() or options.page.read_text() != page():
        sys.exit(f"{options.page} is not what the settings are; run tools/make_settings.py and commit it")


if __name__ == "__main__":
    main()
