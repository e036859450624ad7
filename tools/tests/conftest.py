# pyright: basic
"""A throw-away copy of the checkout to plant violations in, and a way to run a gate on it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Checkout:
    """A copy of what the gates read: the pyproject files, the lock and the sources."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        """Create or replace the file at `path`, relative to the root of the copy."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def replace(self, path: str, old: str, new: str) -> None:
        """Replace the first `old` in a file by `new`; `old` must be there."""
        text = (self.root / path).read_text()
        assert old in text
        (self.root / path).write_text(text.replace(old, new, 1))

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run `command` in the copy; output and errors come back in one text."""
        sources = os.pathsep.join(str(src) for src in sorted(self.root.glob("packages/*/src")))
        # A pytest started by a gate is no worker of the one that runs this test.
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_XDIST")}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            command,
            cwd=self.root,
            env={**kept, "PYTHONPATH": sources, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1000,
            check=False,
        )

    def gate(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run tools/check_NAME.py on the copy."""
        script = ROOT / "tools" / f"check_{name}.py"
        return self.run(sys.executable, str(script), "--root", str(self.root), *arguments)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """The checkout as it is now, copied."""
    for name in ("pyproject.toml", "uv.lock"):
        shutil.copy(ROOT / name, tmp_path / name)
    for package in sorted((ROOT / "packages").iterdir()):
        target = tmp_path / "packages" / package.name
        shutil.copytree(package / "src", target / "src", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(package / name, target / name)
    return Checkout(tmp_path)


@pytest.fixture
def small_checkout(tmp_path: Path) -> Checkout:
    """The settings of this checkout around one tiny package: for gates whose time grows with the sources."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    small = Checkout(tmp_path)
    small.write("packages/small/src/offbeat_small/__init__.py", '"""A package."""\n')
    return small
