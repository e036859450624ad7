"""Rewrite a `uv.lock` so that it names no package index.

A registry becomes the word `registry`; the address of an artifact becomes its file name. uv reads the
result as a flat local index: it still knows every name, version and hash, and no longer where it once
found them (docs/decisions/001-lock-without-addresses.md). Sizes, which some indices tell and others do not, go too:
a lock that was made behind another index differs in what was resolved and in nothing else.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

REGISTRY = re.compile(r'registry = "https?://[^"]+"')
SIZE = re.compile(r", size = \d+")
ARTIFACT = re.compile(r'url = "https?://[^"]*/([^"/]+)"')


def strip_addresses(text: str) -> str:
    """Return the lock `text` with registry and file addresses replaced by plain names, and without sizes of files."""
    return SIZE.sub("", ARTIFACT.sub(r'path = "\1"', REGISTRY.sub('registry = "registry"', text)))


def main() -> None:
    """Rewrite the lock file named on the command line in place."""
    path = Path(sys.argv[1])
    path.write_text(strip_addresses(path.read_text()))


if __name__ == "__main__":
    main()
