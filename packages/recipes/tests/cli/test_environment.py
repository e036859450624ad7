"""What the libraries find in the environment: seen in fresh processes, because it is read when they are imported."""

import json
import os
import subprocess
import sys

import pytest

from offbeat_recipes.cli._environment import _WANTED

OURS = {*_WANTED, "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}


def seen_by(program, **environment):
    """Run `program` without any of the variables but `environment` and return what it prints, read as JSON."""
    clean = {name: value for name, value in os.environ.items() if name not in OURS}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


ALL = "import json, os; print(json.dumps(dict(os.environ)))"
PREPARE = "from offbeat_recipes.cli._environment import prepare_environment; prepare_environment()\n"


def test_what_is_not_set_is_set_and_nothing_else_changes(tmp_path):
    after = seen_by(PREPARE + ALL, HOME=str(tmp_path))
    before = seen_by(ALL, HOME=str(tmp_path))
    assert {name: value for name, value in after.items() if before.get(name) != value} == _WANTED


def test_what_a_person_set_stays():
    after = seen_by(PREPARE + ALL, HF_HUB_OFFLINE="0", RAY_worker_niceness="15")
    assert (after["HF_HUB_OFFLINE"], after["RAY_worker_niceness"]) == ("0", "15")
    assert after["RAY_USAGE_STATS_ENABLED"] == _WANTED["RAY_USAGE_STATS_ENABLED"]


def test_a_driver_that_has_a_token_says_so():
    assert seen_by(PREPARE + ALL, RAY_AUTH_TOKEN="a token")["RAY_AUTH_MODE"] == "token"


LIMITS = "import json, resource; print(json.dumps(resource.getrlimit(resource.RLIMIT_NOFILE)))"


def test_few_open_files_become_as_many_as_are_allowed():
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))\n"
    assert seen_by(few + PREPARE + LIMITS) == [4096, 4096]
    unchanged = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
    assert seen_by(unchanged + PREPARE + LIMITS) == [256, 256]


def test_a_temporary_folder_with_a_long_name_is_not_rays(tmp_path):
    ours = "import json, os; print(json.dumps(os.environ.get('RAY_TMPDIR')))"
    long = tmp_path / ("x" * 40)
    long.mkdir()
    assert seen_by(PREPARE + ours, TMPDIR=str(long)) == "/tmp"
    assert seen_by(PREPARE + ours, TMPDIR=str(long), RAY_TMPDIR="/scratch") == "/scratch"
    assert seen_by(PREPARE + ours, TMPDIR="/tmp") is None
    # Python passes over a folder that is not there; Ray makes it.
    assert seen_by(PREPARE + ours, TMPDIR=str(tmp_path / ("y" * 40))) == "/tmp"


def test_where_ray_could_write_no_token_it_is_given_one():
    told = (
        "import json, os; print(json.dumps([os.environ.get(n) for n in ('RAY_AUTH_TOKEN', 'RAY_AUTH_MODE')]))"
    )
    token, mode = seen_by(PREPARE + told, HOME="/proc")  # takes no files, not even root's
    assert (len(token), mode) == (64, "token")
    assert seen_by(PREPARE + told, HOME="/proc", RAY_AUTH_TOKEN="mine") == ["mine", "token"]


def test_there_may_be_no_home():
    program = "import os; os.environ.pop('HOME', None); os.getuid = lambda: 12345678\n" + PREPARE + "print(1)"
    assert seen_by(program) == 1


@pytest.mark.spawns
@pytest.mark.parametrize("name", ["Läufe", "日本"])
def test_a_locale_that_is_ascii_loses_no_letter_of_a_setting(tmp_path, name):
    # Where the path of the checkout is not ASCII, Python itself does not start in this locale: it cannot read the .pth files
    # that name the packages. Without `site` it reads none, and finds the packages by PYTHONPATH.
    paths = os.pathsep.join(filter(None, sys.path))
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONPATH": paths}
    command = [
        sys.executable,
        "-S",
        "-m",
        "offbeat_recipes.cli.train",
        f"run_dir={tmp_path / name}",
        "--cfg",
        "job",
    ]
    done = subprocess.run(command, env={**os.environ, **plain}, capture_output=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert f"run_dir: {tmp_path / name}" in done.stdout.decode()


@pytest.mark.ray
def test_a_ray_that_is_imported_already_starts_as_it_would_have():
    # It has taken its mode: were another set now, its own processes would have that one and refuse it.
    private = (
        "import ray\n" + PREPARE + "ray.init(address='local', num_cpus=1, include_dashboard=False)\n" + ALL
    )
    assert seen_by(private, RAY_AUTH_TOKEN="a" * 64)["RAY_AUTH_MODE"] == "token"


SLOW_START = """
import os, pathlib, signal, threading, time

def comes_from_us(process):
    try:
        name, _, rest = (process / "stat").read_text().partition("(")[2].rpartition(") ")
        return name == "raylet" and int(rest.split()[1]) == os.getpid()
    except OSError:  # it is over
        return False

def hold():
    while not (found := [one for one in pathlib.Path("/proc").glob("[0-9]*") if comes_from_us(one)]):
        time.sleep(0.01)
    os.kill(int(found[0].name), signal.SIGSTOP)
    time.sleep(40)
    os.kill(int(found[0].name), signal.SIGCONT)

threading.Thread(target=hold).start()
import json, ray
ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
print(json.dumps(ray.get(ray.remote(lambda: "answers").remote())))
"""


@pytest.mark.ray
@pytest.mark.deep
def test_a_ray_that_takes_40_s_to_start_is_waited_for():
    assert seen_by(PREPARE + SLOW_START, RAY_AUTH_TOKEN="a" * 64) == "answers"


@pytest.mark.parametrize("command", ["train", "sft", "evaluate", "plan"])
def test_every_command_prepares_before_a_heavy_library_is_imported(command):
    modules = seen_by(
        f"import json, sys; import offbeat_recipes.cli.{command}\n"
        "print(json.dumps([name for name in ('torch', 'ray', 'transformers', 'vllm') if name in sys.modules]))"
    )
    assert modules == []


@pytest.mark.spawns
def test_the_libraries_that_planning_imports_find_it_set():
    # huggingface_hub reads its variables once, when it is imported, and looking at a model's config does that.
    assert seen_by(
        "import json, sys\n"
        "from offbeat_recipes.cli._checked import checked\n"
        "from offbeat_recipes.settings.reading import parse\n"
        "refused = parse({'trainer': {'group_size': 1}})\n"
        "code = checked('test', refused, 'train')\n"
        "from huggingface_hub import constants\n"
        "print(json.dumps([code, constants.HF_HUB_OFFLINE, 'ray' in sys.modules]))"
    ) == [2, True, False]
