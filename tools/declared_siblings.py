"""Print what one package of this workspace needs: its siblings, theirs included, or what all these ask of others."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

PACKAGES = Path(__file__).resolve().parent.parent / "packages"


def project(package: str) -> dict[str, Any]:
    """Return what the pyproject file of `package` declares."""
    return tomllib.loads((PACKAGES / package / "pyproject.toml").read_text())["project"]


def siblings_of(package: str) -> dict[str, set[str]]:
    """Return every sibling that an installation of `package` brings along, with the extras asked of it."""
    found: dict[str, set[str]] = {}
    waiting = [package]
    while waiting:
        for requirement in project(waiting.pop())["dependencies"]:
            name = re.match(r"offbeat-([a-z]+)(?:\[([\w,-]+)\])?", requirement)
            if name is None:
                continue
            if name[1] not in found:
                waiting.append(name[1])
            found.setdefault(name[1], set()).update((name[2] or "").split(",") if name[2] else ())
    return found


def requirements_of(package: str) -> list[str]:
    """Return what an installation of `package` asks of others: its own requirements and those of its siblings."""
    wanted: set[str] = set()
    for name, extras in {package: set[str](), **siblings_of(package)}.items():
        declared = project(name)
        wanted.update(declared["dependencies"])
        for extra in extras:
            wanted.update(declared["optional-dependencies"][extra])
    return sorted(item for item in wanted if not item.startswith("offbeat-"))


def main() -> None:
    """Print one a line: short names of siblings of the package named first, or with `--others` requirements."""
    package, *options = sys.argv[1:]
    for line in requirements_of(package) if options == ["--others"] else sorted(siblings_of(package)):
        print(line)


if __name__ == "__main__":
    main()
