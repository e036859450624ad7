# pyright: basic
"""Packages that cannot be installed beside ours, in environments of their own."""

import shutil
import subprocess
import sys

import pytest

FETCH_TIMEOUT_S = 600.0


@pytest.fixture(scope="session")
def own_python(tmp_path_factory):
    """Return what makes an environment with `packages` alone and returns its Python, or skips with what uv said."""

    def make(*packages):
        uv = shutil.which("uv")
        if uv is None:
            pytest.skip("uv is not installed: no environment of its own can be made")
        folder = tmp_path_factory.mktemp("packages") / "venv"
        for words in (
            [uv, "venv", "-q", "-p", sys.executable, folder],
            [uv, "pip", "install", "-q", "-p", folder, *packages],
        ):
            done = subprocess.run(words, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False)
            if done.returncode:
                pytest.skip(f"{', '.join(packages)} cannot be fetched: {done.stderr.strip()[-300:]}")
        return folder / "bin" / "python"

    return make
