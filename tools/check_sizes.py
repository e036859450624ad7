"""Hold files and functions to a size that can be read at one sitting.

Ruff has no rule for lines per file or per function. Sources and tools: files under 500 lines, functions
under 50. Tests get half as much again, because a table of cases is long without being hard: files under
750, functions under 75. Lines count from `def` to the last one, docstring included. Scripts without a
suffix under tools/ are held to the length of a file.
"""

from __future__ import annotations

import argparse
import ast
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The first number of lines that is too many."""

    file_lines: int
    function_lines: int


SOURCES = Limit(file_lines=500, function_lines=50)
TESTS = Limit(file_lines=750, function_lines=75)


def limit_for(path: Path) -> Limit:
    """Return the limit for `path`, relative to the root of the checkout."""
    return TESTS if "tests" in path.parts else SOURCES


def too_long(path: Path, text: str) -> Iterator[str]:
    """Yield one line of complaint for the file and for each function of it that is too long."""
    limit = limit_for(path)
    num_lines = len(text.splitlines())
    if num_lines >= limit.file_lines:
        yield f"{path}: {num_lines} lines, must stay under {limit.file_lines}: split it by idea"
    if path.suffix != ".py":
        return
    for node in ast.walk(ast.parse(text, filename=str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None  # ast.parse always sets it
            length = node.end_lineno - node.lineno + 1
            if length >= limit.function_lines:
                yield (
                    f"{path}:{node.lineno}: {node.name} has {length} lines, "
                    f"must stay under {limit.function_lines}: give a part of it a name"
                )


def checked_files(root: Path) -> list[Path]:
    """Return the Python files of packages and tools, and the scripts of tools, sorted."""
    python = {file for top in ("packages", "tools") for file in (root / top).rglob("*.py")}
    scripts = {file for file in (root / "tools").rglob("*") if file.is_file() and not file.suffix}
    return sorted(python | scripts)


def main() -> None:
    """Check the checkout under `--root`; exit 1 where anything is too long or nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    root: Path = parser.parse_args().root
    files = checked_files(root)
    if not files:
        sys.exit(f"{root}: no file found under packages/ or tools/; expected a checkout of Offbeat")
    complaints = [line for file in files for line in too_long(file.relative_to(root), file.read_text())]
    if complaints:
        sys.exit("\n".join(complaints))
    print(f"{len(files)} files within their limits")


if __name__ == "__main__":
    main()
