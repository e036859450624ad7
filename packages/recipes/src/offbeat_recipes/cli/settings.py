"""`offbeat settings`: every setting, found by words, or all that is known of one. `offbeat import`: the settings of a verl run."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

from offbeat_recipes.cli._environment import USAGE
from offbeat_recipes.errors import SettingError
from offbeat_recipes.report.metrics import CHARTS
from offbeat_recipes.run.folder import MAY_CHANGE
from offbeat_recipes.settings.described import Described, described, matching, nearest
from offbeat_recipes.settings.from_verl import read_verl, translated

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Print the settings that the words find, or explain one; return the exit code."""
    made = argparse.ArgumentParser(prog="offbeat settings", description="List, find and explain settings.")
    made.add_argument("words", nargs="*", metavar="WORD", help="settings with all these in name or help")
    made.add_argument("--explain", metavar="KEY", help="say all that is known of one setting")
    options = made.parse_args(argv)
    if options.explain is not None:
        return _explain(options.explain)
    found = matching(options.words)
    if not found:
        sys.stderr.write(f"offbeat settings: nothing has {' and '.join(map(repr, options.words))}\n")
        return USAGE
    for item in found:
        sys.stdout.write(f"{item.path}={item.default}  ({item.values})\n    {item.help}\n")
    return 0


def explanation(item: Described) -> str:
    """Return all that is known of a setting, a line each; `advice` is what the report says of it, by the chart that says it."""
    named = re.compile(rf"\b{re.escape(item.path)}\b")
    advised = [f"  advice   {one.title}: {one.advice}" for one in CHARTS if named.search(one.advice)]
    return "\n".join(
        [
            item.path,
            f"  {item.help}",
            f"  default  {item.default}",
            f"  values   {item.values}",
            f"  for      {item.runs or 'every run'}",
            f"  resume   {on_resume(item)}",
            *advised,
        ]
    )


def on_resume(item: Described) -> str:
    """Return whether the setting may be another one when a run goes on."""
    if item.is_speed or item.path.startswith(MAY_CHANGE):
        return "may change when a run goes on"
    return "must stay as it was when a run goes on"


def _explain(path: str) -> int:
    for item in described():
        if item.path == path:
            sys.stdout.write(explanation(item) + "\n")
            return 0
    near = nearest(path)
    listing = (
        f"`offbeat settings {path}` lists what has that word"
        if matching([path])
        else "offbeat settings lists all"
    )
    hint = f"did you mean `{near}`?" if near else listing
    sys.stderr.write(f"offbeat settings: unknown setting `{path}`; {hint}\n")
    return USAGE


def import_verl(argv: Sequence[str] | None = None) -> int:
    """Print what a verl run's settings are here, as a command, and what has no counterpart; return the exit code."""
    made = argparse.ArgumentParser(
        prog="offbeat import",
        description="Say what the settings of a verl run are here, and what has no counterpart.",
    )
    made.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="YAML of a run (.hydra/overrides.yaml), or the script that starts it",
    )
    options = made.parse_args(argv)
    try:
        found = translated(read_verl(options.file))
    except (SettingError, OSError, UnicodeDecodeError) as error:
        sys.stderr.write(f"offbeat import: {error}\n")
        return USAGE
    words = [shlex.quote(f"{key}={_written(value)}") for key, value in found.settings.items()]
    sys.stdout.write(" \\\n  ".join(["offbeat train", *words]) + "\n")
    known = {key: why for key, why in found.absent.items() if why}
    for key, why in known.items():
        sys.stdout.write(f"# {key}: {why}\n")
    unknown = [key for key in found.absent if key not in known]
    if unknown:
        sys.stdout.write(f"# nothing is known of {len(unknown)} more: {', '.join(unknown)}\n")
    return 0


def _written(value: object) -> str:
    """Return a value as the command line takes it."""
    if isinstance(value, list):
        return f"[{','.join(map(str, cast('list[object]', value)))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    sys.exit(main())
