"""Each gate is green on sound code and red on a planted violation: a check that cannot fail is a defect."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.spawns

TOOLS = Path(__file__).resolve().parents[1]
INIT = "packages/small/src/offbeat_small/__init__.py"
PLANTED = "packages/engine/src/offbeat_engine/planted.py"


def test_every_check_is_part_of_tools_test():
    script = (TOOLS / "test").read_text()
    checks = [file.name for file in TOOLS.glob("check_*.py")]
    assert checks
    assert [name for name in checks if name not in script] == []


# Sizes


def lines(count: int) -> str:
    return "X = 1\n" * count


def function(count: int) -> str:
    return "async def long() -> None:\n" + "    x = 1\n" * (count - 1)


@pytest.mark.parametrize(
    ("path", "allowed", "too_long"),
    [
        ("packages/small/src/offbeat_small/planted.py", lines(499), lines(500)),
        ("packages/small/src/offbeat_small/planted.py", function(49), function(50)),
        ("packages/small/tests/test_planted.py", lines(749), lines(750)),
        ("packages/small/tests/test_planted.py", function(74), function(75)),
        ("tools/bench/planted.py", function(49), function(50)),
        ("tools/planted", lines(499), lines(500)),
    ],
)
def test_sizes(small_checkout, path, allowed, too_long):
    small_checkout.write(path, allowed)
    assert small_checkout.gate("sizes").returncode == 0
    small_checkout.write(path, too_long)
    after = small_checkout.gate("sizes")
    assert after.returncode == 1
    assert path in after.stdout


@pytest.mark.parametrize(("folder", "most"), [("", 9), ("inner/", 12)], ids=["root", "folder"])
def test_what_holds_too_many_files_is_red(small_checkout, folder, most):
    home = Path(INIT).parent
    held = [path.name for path in (small_checkout.root / home).iterdir() if not path.name.startswith("__")]
    for number in range(most - (0 if folder else len(held))):
        small_checkout.write(f"{home}/{folder}file_{number}.py", "X = 1\n")
    assert small_checkout.gate("sizes").returncode == 0
    small_checkout.write(f"{home}/{folder}one_more.py", "X = 1\n")
    after = small_checkout.gate("sizes")
    assert after.returncode == 1
    assert f"{home / folder}: {most + 1} " in after.stdout


def test_sizes_are_reported_by_package():
    command = [sys.executable, TOOLS / "check_sizes.py", "--report"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    *rows, total = [line.split("|")[1:-1] for line in done.stdout.splitlines()[2:]]
    assert [row[0].strip() for row in rows] == ["ckptsync", "engine", "recipes", "rollout", "trainer"]
    for column in (1, 2, 5, 6):
        assert sum(int(row[column]) for row in rows) == int(total[column]) > 0


def test_sizes_of_nothing_is_red(small_checkout):
    (small_checkout.root / INIT).unlink()
    assert small_checkout.gate("sizes").returncode == 1


# Words


@pytest.mark.parametrize(
    "planted",
    [
        "num_holes = 1\n",
        "class Seat: ...\n",
        "def in_words() -> None: ...\n",
        "def f(owed: int) -> None: ...\n",
        "def f(self: object) -> None:\n    self._rooms = 1\n",
        "def f() -> None:\n    for seatOfRank in (): ...\n",
    ],
)
def test_words_that_were_renamed_do_not_come_back(small_checkout, planted):
    small_checkout.write("packages/small/src/offbeat_small/planted.py", "whole, bedrooms, seated = 1, 2, 3\n")
    assert small_checkout.gate("words").returncode == 0
    small_checkout.write("packages/small/src/offbeat_small/planted.py", planted)
    after = small_checkout.gate("words")
    assert after.returncode == 1
    assert "packages/small/src/offbeat_small/planted.py" in after.stdout


def test_words_in_the_name_of_a_file_are_seen(small_checkout):
    small_checkout.write("packages/small/src/offbeat_small/seats.py", "X = 1\n")
    assert small_checkout.gate("words").returncode == 1


def test_words_of_nothing_is_red(small_checkout):
    (small_checkout.root / INIT).unlink()
    assert small_checkout.gate("words").returncode == 1


# Cheap imports


def test_cheap_imports_finds_torch_in_a_config(small_checkout):
    config = "packages/small/src/offbeat_small/config.py"
    small_checkout.write(config, "def later() -> None:\n    import torch\n")
    assert small_checkout.gate("cheap_imports").returncode == 0
    small_checkout.write(config, "import torch\n")
    after = small_checkout.gate("cheap_imports")
    assert after.returncode == 1
    assert "offbeat_small.config: imports torch" in after.stdout


def test_cheap_imports_follows_what_a_package_imports(small_checkout):
    small_checkout.write(INIT, "import offbeat_small.inner\n")
    small_checkout.write("packages/small/src/offbeat_small/inner.py", "import hydra\n")
    after = small_checkout.gate("cheap_imports")
    assert after.returncode == 1
    assert "offbeat_small: imports hydra, omegaconf" in after.stdout


def test_cheap_imports_needs_the_import_to_work(small_checkout):
    small_checkout.write(INIT, "import offbeat_small.gone\n")
    after = small_checkout.gate("cheap_imports")
    assert after.returncode == 1
    assert "offbeat_small: cannot be imported" in after.stdout


def test_cheap_imports_tells_sources_from_an_installation(small_checkout):
    # Without --root the gate looks at this checkout, whose packages are installed editable: not from a wheel.
    after = small_checkout.run(sys.executable, str(TOOLS / "check_cheap_imports.py"), "--installed")
    assert after.returncode == 1
    assert "offbeat_engine: expected it outside" in after.stdout


# Types


def test_types_are_strict(small_checkout):
    small_checkout.write(
        "packages/small/src/offbeat_small/planted.py", "def untyped(value):\n    return value\n"
    )
    after = small_checkout.gate("types")
    assert after.returncode == 1
    assert "planted.py:1" in after.stdout
    assert "reportMissingParameterType" in after.stdout  # a rule of strict mode only


HELPED = """class Thing:
    def __init__(self, size: int) -> None:
        self.size = size


def made():
    return {}
"""


@pytest.mark.parametrize("place", ["tools/bench/planted.py", "packages/small/tests/shared/planted.py"])
@pytest.mark.parametrize(
    ("call", "rule"),
    [
        ("Thing()", "reportCallIssue"),
        ("Thing(1).gone", "reportAttributeAccessIssue"),
        ('Thing("one")', "reportArgumentType"),
    ],
)
def test_types_of_benches_and_of_what_tests_share_are_checked(small_checkout, place, call, rule):
    untyped = "tests" in place  # what tests share need not be annotated
    text = HELPED if untyped else HELPED.replace("made():", "made() -> object:")
    small_checkout.write(place, f"{'# pyright: basic' * untyped}\n{text.format(call)}")
    after = small_checkout.gate("types")
    assert after.returncode == 1
    rules = {line.rpartition(" ")[2] for line in after.stdout.splitlines() if line.startswith(f"{place}:8: ")}
    assert f"({rule})" in rules


@pytest.mark.parametrize("pattern", ['"packages/**/tests", ', ', "tools"]\nexclude'])
def test_types_of_benches_and_helpers_that_are_left_out_are_red(small_checkout, pattern):
    for place in ("tools/bench/thing.py", "packages/small/tests/shared/helper.py"):
        small_checkout.write(place, '"""Nothing."""\n')
    small_checkout.replace("pyproject.toml", pattern, "]\nexclude" if "exclude" in pattern else "")
    after = small_checkout.gate("types")
    assert after.returncode == 1
    assert "analysed 2 files where packages/*/src, packages/*/tests and tools hold 3" in after.stdout


def test_types_of_no_file_is_red(small_checkout):
    small_checkout.replace("pyproject.toml", '"packages/**/src"', '"nowhere/**/src"')
    after = small_checkout.gate("types")
    assert after.returncode == 1
    assert "analysed 0 files" in after.stdout


# Declared dependencies


@pytest.mark.parametrize(("module", "code"), [("yaml", "DEP003"), ("no_such_module", "DEP001")])
def test_dependencies_finds_an_undeclared_import(checkout, module, code):
    checkout.write(PLANTED, f"def later() -> None:\n    import {module}\n")
    after = checkout.gate("dependencies")
    assert after.returncode == 1
    planted = [line for line in after.stdout.splitlines() if "planted.py" in line]
    assert len(planted) == 1
    assert planted[0].startswith("packages/engine: ")
    assert f"{code} '{module}'" in planted[0]


def test_dependencies_finds_one_that_is_not_used(checkout):
    checkout.replace(
        "packages/engine/pyproject.toml", '"safetensors>=0.5",', '"safetensors>=0.5",\n  "cryptography",'
    )
    after = checkout.gate("dependencies")
    assert after.returncode == 1
    assert "DEP002 'cryptography'" in after.stdout


# The lock


def test_lock_is_sound(checkout):
    after = checkout.gate("lock")
    assert after.returncode == 0, after.stdout


@pytest.mark.parametrize(
    "address",
    ["https://example.org/index", "http://127.0.0.1:8080/x", "file:///srv/wheels", "git+ssh://h/x"],
)
def test_lock_names_no_address(checkout, address):
    checkout.replace("uv.lock", 'registry = "registry"', f'registry = "{address}"')
    after = checkout.gate("lock")
    assert after.returncode == 1
    assert address in after.stdout


def test_lock_pins_by_hash(checkout):
    text = (checkout.root / "uv.lock").read_text()
    start = text.index("[[package]]\n")
    end = text.index("[[package]]\n", start + 1)
    bare = re.sub(r', hash = "[^"]+"', "", text[start:end])
    assert bare != text[start:end]
    checkout.write("uv.lock", text[:start] + bare + text[end:])
    after = checkout.gate("lock")
    assert after.returncode == 1
    assert "hash" in after.stdout


def test_lock_keeps_step_with_the_packages(checkout):
    checkout.replace("packages/engine/pyproject.toml", '"safetensors>=0.5"', '"safetensors>=0.6"')
    after = checkout.gate("lock")
    assert after.returncode == 1
    assert "uv lock --check refuses" in after.stdout


def test_stripping_removes_every_address(checkout):
    checkout.write(
        "raw.lock",
        'source = { registry = "https://index.example/root" }\n'
        'sdist = { url = "https://files.example/a/b/thing-1.0.tar.gz", hash = "sha256:00" }\n',
    )
    ran = checkout.run("python", str(TOOLS / "strip_lock_addresses.py"), "raw.lock")
    assert ran.returncode == 0
    assert (checkout.root / "raw.lock").read_text() == (
        'source = { registry = "registry" }\nsdist = { path = "thing-1.0.tar.gz", hash = "sha256:00" }\n'
    )


# Lint and format


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("import json\n", "F401"),
        ("from . import other\n", "TID252"),
        ("import vllm\n\nENGINE = vllm.LLM\n", "TID253"),
        ('import os\n\nHOME = os.environ["HOME"]\n', "TID251"),
        ("from unittest.mock import MagicMock\n\nFAKE = MagicMock()\n", "TID251"),
        ("def f(a: int, b: int, c: int, d: int, e: int, g: int, h: int) -> None: ...\n", "PLR0913"),
        ("def public() -> None:\n    pass\n", "D103"),
        ("try:\n    X = 1\nexcept Exception:\n    X = 2\n", "BLE001"),
        ("print(1)\n", "T201"),
    ],
)
def test_lint(small_checkout, text, rule):
    small_checkout.write("packages/small/src/offbeat_small/planted.py", f'"""A module."""\n\n{text}')
    after = small_checkout.run("ruff", "check", "--no-cache", "--output-format", "concise", ".")
    assert after.returncode == 1
    assert rule in after.stdout


def test_format(small_checkout):
    command = ("ruff", "format", "--no-cache", "--check", ".")
    assert small_checkout.run(*command).returncode == 0
    small_checkout.write(INIT, "X   =   {'a':1}\n")
    assert small_checkout.run(*command).returncode == 1


# Releases


@pytest.mark.parametrize(
    ("package", "changelog", "says"),
    [
        ("small", "## [Unreleased]\n", "has no section [0.2.0]"),
        ("small", "## [0.2.0]\n", "changes that are not committed"),
        ("absent", "", "no package absent; there are: small"),
    ],
)
def test_a_release_that_is_not_ready_is_refused_before_anything_is_built(
    small_checkout, package, changelog, says
):
    small_checkout.write(
        "packages/small/pyproject.toml", '[project]\nname = "offbeat-small"\nversion = "0.2.0"\n'
    )
    small_checkout.write("packages/small/CHANGELOG.md", changelog)
    small_checkout.write("tools/release", (TOOLS / "release").read_text())
    small_checkout.run("git", "init", "--quiet")
    small_checkout.run("git", "add", ".")
    done = small_checkout.run("bash", "tools/release", package)
    assert done.returncode == 2
    assert says in done.stdout
    assert not (small_checkout.root / "dist").exists()
