"""The forks that stand in for Ray's workers in tests are called as those are."""

import json
import os
import subprocess

import pytest

TIMEOUT_S = 300.0
SAYS = """
import json, os, sys
print(json.dumps([sys.argv, os.environ["MINE"], os.environ.get("GONE"), os.getcwd(), "torch" in sys.modules, __name__]))
"""


def run(*command, **settings):
    return subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True, **settings
    ).stdout


@pytest.mark.spawns
@pytest.mark.slow
def test_a_fork_has_words_folder_and_environment_of_its_own_and_the_libraries_of_all(python, tmp_path):
    script = tmp_path / "default_worker.py"
    script.write_text(SAYS)
    context = '--serialized-runtime-env-context={"env_vars": {"MINE": "1"}}'
    command = [python, "/any/setup_worker.py", str(script), "--node=a", "--language=PYTHON", context]
    environment = {**os.environ, "MINE": "0"}
    environment.pop("GONE", None)
    told = run(*command, cwd=tmp_path, env=environment)
    assert json.loads(told) == [[str(script), "--node=a"], "1", None, str(tmp_path), True, "__main__"]


@pytest.mark.spawns
@pytest.mark.slow
def test_for_anything_else_it_is_the_interpreter(python):
    assert run(python, "-c", "import sys; print('torch' in sys.modules)") == "False\n"
