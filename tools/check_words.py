"""Keep words that are ours alone out of names: the field has a word for each idea, and `docs/glossary.md` says which.

Looked at are the names of modules, classes, functions, parameters, variables and attributes in the packages' sources, word
by word: `num_holes` and `Holes` both hold "holes". Prose is read by people. The list is short on purpose: it holds what was
renamed once, so that it does not come back.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# The words of a name, in order, as a regular expression over words joined by "_": what to say instead.
INSTEAD = {
    "speakers?": "leader",
    "sharers?": "ranks of one data-parallel index, or what they share",
    "beginnings?": "prefix",
    "unfilled": "on meta",
    "seats?": "RankId (of a member), PlacementBundle (of devices), Slot (of a pool)",
    "rooms": "quota, capacity, PlacementGroups",
    "holes?": "gap",
    "owed": "due, pending",
    "paid": "counted, acknowledged",
    "scenes?": "EnvironmentSetup",
    "troupes?": "what it is",
    "shelf": "what it is",
    "desks?": "what it is",
    "lanes?": "what it is",
    "in_words": "describe_error",
}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def names_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of everything that `tree` names itself; what it only uses was named elsewhere."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr
            case _:
                pass


def offending(name: str) -> str | None:
    """Return what to say instead of a word in `name`, or None."""
    words = "_".join(word.lower() for word in _WORD.findall(name))
    for word, instead in INSTEAD.items():
        if re.search(rf"(?:^|_)(?:{word})(?:_|$)", words):
            return instead
    return None


def complaints(root: Path) -> Iterator[str]:
    """Yield one line for each name of a source file below `root` that holds a word of the list."""
    files = sorted(root.glob("packages/*/src/**/*.py"))
    if not files:
        yield f"no source file below {root}: expected packages/*/src"
    for file in files:
        where = file.relative_to(root)
        named = [(1, file.stem), *names_in(ast.parse(file.read_text(), filename=str(where)))]
        for line, name in named:
            instead = offending(name)
            if instead is not None:
                yield f"{where}:{line}: {name}: say {instead} (docs/glossary.md)"


def main() -> int:
    """Check every source file and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    found = list(complaints(parser.parse_args().root))
    print("\n".join(found) if found else "no name holds a word of the list")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
