"""Print the packages of this workspace that one of them needs, its dependencies' dependencies included."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PACKAGES = Path(__file__).resolve().parent.parent / "packages"


def declared_by(package: str) -> set[str]:
    """Return the short names of the siblings that `package` declares itself."""
    project = tomllib.loads((PACKAGES / package / "pyproject.toml").read_text())["project"]
    names = (re.match(r"offbeat-([a-z]+)", requirement) for requirement in project["dependencies"])
    return {name.group(1) for name in names if name is not None}


def siblings_of(package: str) -> set[str]:
    """Return every sibling that an installation of `package` brings along."""
    found: set[str] = set()
    waiting = declared_by(package)
    while waiting:
        name = waiting.pop()
        found.add(name)
        waiting |= declared_by(name) - found
    return found


def main() -> None:
    """Print one short name a line for the package named on the command line."""
    for name in sorted(siblings_of(sys.argv[1])):
        print(name)


if __name__ == "__main__":
    main()
