"""Run pyright and make sure that it looked at every source file, every bench and every helper of tests.

pyright exits 0 when its `include` patterns match nothing, so a wrong pattern looks like perfect code
(`packages/*/src` once matched no file at all). Here the number of files it analysed is compared with the
number that is there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import TypedDict, cast

DEADLINE_S = 900
TOPS = ("packages/*/src", "packages/*/tests", "tools")


class Position(TypedDict):
    """Where a diagnostic starts, counted from zero."""

    line: int


class Range(TypedDict):
    """The extent of a diagnostic."""

    start: Position


class Diagnostic(TypedDict, total=False):
    """The fields of one pyright diagnostic that are shown."""

    file: str
    severity: str
    message: str
    rule: str
    range: Range


def describe(diagnostic: Diagnostic, root: Path) -> str:
    """Return `diagnostic` as one line: file, line, first line of the message, rule."""
    message = diagnostic.get("message", "").partition("\n")[0]
    file = Path(diagnostic.get("file", "?"))
    place = file.relative_to(root) if file.is_relative_to(root) else file
    line = diagnostic["range"]["start"]["line"] + 1 if "range" in diagnostic else 0
    return f"{place}:{line}: {message} ({diagnostic.get('rule', 'pyright')})"


def run_pyright(root: Path, python: str) -> tuple[list[Diagnostic], int]:
    """Return pyright's errors and warnings for the project under `root`, and the number of files it analysed."""
    command = [
        sys.executable,
        "-m",
        "pyright",
        "--outputjson",
        "--pythonpath",
        python,
        "--project",
        str(root),
    ]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    try:
        report = json.loads(ran.stdout)
    except json.JSONDecodeError:
        sys.exit(f"pyright exited {ran.returncode} without a report:\n{ran.stdout}{ran.stderr}")
    diagnostics = cast("list[Diagnostic]", report["generalDiagnostics"])
    shown = [found for found in diagnostics if found.get("severity") in ("error", "warning")]
    return shown, int(report["summary"]["filesAnalyzed"])


def checked_files(root: Path) -> list[Path]:
    """Return what pyright must look at: sources, tools, and what tests share; test files are run instead."""
    files = [path for top in TOPS for path in root.glob(f"{top}/**/*.py")]
    return [path for path in files if not path.name.startswith("test_")]


def main() -> None:
    """Type-check the checkout under `--root`; exit 1 on any error, or where files were left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--python", default=sys.executable, help="the interpreter whose packages are used")
    options = parser.parse_args()
    root: Path = options.root.resolve()
    num_sources = len(checked_files(root))
    diagnostics, num_analysed = run_pyright(root, options.python)
    complaints = [describe(found, root) for found in diagnostics]
    if num_analysed < max(num_sources, 1):
        complaints.append(
            f"pyright analysed {num_analysed} files where packages/*/src, packages/*/tests and tools hold {num_sources}: "
            "correct `include` in [tool.pyright]"
        )
    if complaints:
        sys.exit("\n".join(complaints))
    print(f"{num_analysed} files, no error")


if __name__ == "__main__":
    main()
