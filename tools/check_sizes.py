"""Hold files and functions to a size that can be read at one sitting.

Ruff has no rule for lines per file or per function. Sources and tools: files under 500 lines, functions
under 50. Tests get half as much again, because a table of cases is long without being hard: files under
750, functions under 75. Lines count from `def` to the last one, docstring included. Scripts without a
suffix under tools/ are held to the length of a file. The root of a package has at most nine modules and folders,
a folder at most twelve files. `--report` counts lines and files of each package instead.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
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


MOST_ENTRIES, MOST_FILES = 9, 12
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


def too_full(root: Path) -> Iterator[str]:
    """Yield one line of complaint for each package whose root, and each folder of a package, that holds too many."""
    for source in sorted(root.glob("packages/*/src/offbeat_*")):
        if (count := len(_entries(source))) > MOST_ENTRIES:
            yield f"{source.relative_to(root)}: {count} modules and folders, at most {MOST_ENTRIES}: group them"
        for folder, count in sorted(Counter(file.parent for file in source.rglob("*.py")).items()):
            if count > MOST_FILES:
                yield f"{folder.relative_to(root)}: {count} files, at most {MOST_FILES}: cut it by subject"


def _entries(source: Path) -> list[Path]:
    entries = [path for path in source.iterdir() if path.suffix == ".py" or path.is_dir()]
    return [path for path in entries if not path.name.startswith("__")]


def checked_files(root: Path) -> list[Path]:
    """Return the Python files of packages and tools, and the scripts of tools, sorted."""
    python = {file for top in ("packages", "tools") for file in (root / top).rglob("*.py")}
    scripts = {file for file in (root / "tools").rglob("*") if file.is_file() and not file.suffix}
    return sorted(python | scripts)


def report(root: Path) -> str:
    """Return a Markdown table: lines and files of each package, entries of its root, its fullest folder."""
    head = "| package | source lines | files | entries in the root | most files in a folder | test lines | test files |"
    rows, totals = [head, "|---|---|---|---|---|---|---|"], [0, 0, 0, 0]
    for package in sorted(path for path in (root / "packages").iterdir() if path.is_dir()):
        source = package / "src" / f"offbeat_{package.name}"
        files, tests = ([*folder.rglob("*.py")] for folder in (source, package / "tests"))
        counts = [_num_lines(files), len(files), _num_lines(tests), len(tests)]
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        folder, most = Counter(file.parent for file in files).most_common(1)[0]
        fullest = f"{most} ({folder.relative_to(source.parent)})"
        rows.append(
            f"| {package.name} | {counts[0]} | {counts[1]} | {len(_entries(source))} | {fullest} | {counts[2]} | {counts[3]} |"
        )
    return "\n".join([*rows, f"| all | {totals[0]} | {totals[1]} | | | {totals[2]} | {totals[3]} |"])


def _num_lines(files: list[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


def main() -> None:
    """Check the checkout under `--root`; exit 1 where anything is too long or nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument(
        "--report", action="store_true", help="print lines and files of each package; check nothing"
    )
    options = parser.parse_args()
    root: Path = options.root
    if options.report:
        print(report(root))
        return
    files = checked_files(root)
    if not files:
        sys.exit(f"{root}: no file found under packages/ or tools/; expected a checkout of Offbeat")
    complaints = [line for file in files for line in too_long(file.relative_to(root), file.read_text())]
    complaints += too_full(root)
    if complaints:
        sys.exit("\n".join(complaints))
    print(f"{len(files)} files within their limits")


if __name__ == "__main__":
    main()
