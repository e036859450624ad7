"""What the libraries find in the environment: seen in fresh processes, because it is read when they are imported."""

import gc
import json
import os
import subprocess
import sys
from contextlib import suppress

import pytest

from offbeat_recipes.cli._environment import _WANTED, without_collector

RAYS = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_TMPDIR"}
OURS = {*_WANTED, *RAYS, "TORCHINDUCTOR_CACHE_DIR"}
NOBODY = 65534


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
    changed = {name: value for name, value in after.items() if before.get(name) != value}
    assert changed.pop("TORCHINDUCTOR_CACHE_DIR").startswith(str(tmp_path)), (
        "not a name in /tmp that others can guess"
    )
    assert len(changed.pop("RAY_AUTH_TOKEN")) == 64
    assert changed.pop("RAY_AUTH_MODE") == "token"
    assert changed == _WANTED


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


WITHIN = (
    "import json, os, pathlib\n"
    "from offbeat_recipes.cli._environment import private_ray\n"
    "with private_ray():\n"
    "    folder = pathlib.Path(os.environ['RAY_TMPDIR'])\n"
    "    mode = oct(folder.stat().st_mode & 0o777)\n"
    "print(json.dumps([str(folder.parent), mode, folder.exists(), os.environ.get('RAY_TMPDIR')]))"
)


def test_a_ray_of_ones_own_has_a_private_folder_with_a_short_name_that_goes_with_it(tmp_path):
    long = tmp_path / ("x" * 40)
    long.mkdir()
    assert seen_by(WITHIN, TMPDIR=str(long)) == ["/tmp", "0o700", False, None]
    assert seen_by(WITHIN, TMPDIR="/tmp") == ["/tmp", "0o700", False, None]
    assert seen_by(WITHIN, TMPDIR=str(long), RAY_TMPDIR="/dev/shm") == [
        "/dev/shm",
        "0o700",
        False,
        "/dev/shm",
    ]
    # Python passes over a folder that is not there.
    assert seen_by(WITHIN, TMPDIR=str(tmp_path / ("y" * 40))) == ["/tmp", "0o700", False, None]


TOKEN = "import json, os; print(json.dumps([os.environ.get(n) for n in ('RAY_AUTH_TOKEN', 'RAY_AUTH_MODE')]))"


def test_a_ray_of_ones_own_has_a_token_that_lies_in_no_file(tmp_path):
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("read by everybody")
    tokens = [seen_by(PREPARE + TOKEN, HOME=str(tmp_path)) for _ in range(2)]
    assert [(len(token), mode) for token, mode in tokens] == [(64, "token")] * 2
    assert tokens[0] != tokens[1]
    assert seen_by(PREPARE + TOKEN, HOME="/proc", RAY_AUTH_TOKEN="mine") == ["mine", "token"]


def test_a_token_file_of_a_cluster_that_others_may_read_is_named(tmp_path):
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text("secret")
    elsewhere = PREPARE.replace("prepare_environment()", "prepare_environment('head:6379')")
    told = "import json; from offbeat_recipes.cli._environment import open_token; print(json.dumps(str(open_token())))"
    home = {"HOME": str(tmp_path)}
    file.chmod(0o644)
    assert seen_by(elsewhere + told, **home) == str(file)
    assert seen_by(elsewhere + told, **home, RAY_AUTH_TOKEN="another") == "None"
    assert seen_by(elsewhere + TOKEN, **home) == [None, "token"], "it is the cluster's"
    file.chmod(0o600)
    assert seen_by(elsewhere + told, **home) == "None"


SERVING = """
import json, os, pathlib, sys
from offbeat_recipes.cli._environment import private_ray
from offbeat_trainer.cluster.ray_runtime import start_ray, stop_ray
from offbeat_trainer.config import ClusterConfig
with private_ray():
    start_ray(ClusterConfig(), num_gpus=0)
    import ray
    session = ray._private.worker._global_node.get_session_dir_path()
    print(json.dumps([session, ray.get_runtime_context().gcs_address]), flush=True)
    sys.stdin.readline()
    stop_ray()
"""
STRANGER = f"""
import json, os, sys
import ray
session, address = sys.argv[1:]
def tried(what, *arguments):
    try:
        what(*arguments)
    except Exception as error:
        return type(error).__name__
    return "done"
joins = tried(lambda: ray.init(address=address, logging_level="ERROR"))  # with another token; the user does not matter
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
print(json.dumps([
    joins, tried(os.listdir, session), tried(os.rename, session + "/sockets", session + "/moved"),
    tried(os.unlink, session + "/logs/debug_state.txt"),
]))
"""


@pytest.mark.ray
@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_of_the_machine_reaches_nothing_of_a_runs_ray(tmp_path):
    """Sockets and logs of a Ray in its usual place can be moved and replaced by links; the token of a usual one lies in the home."""
    environment = {name: value for name, value in os.environ.items() if name not in OURS}
    run = subprocess.Popen(
        [sys.executable, "-c", PREPARE + SERVING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**environment, "HOME": str(tmp_path)},
    )  # fmt: skip
    with run:
        session, address = json.loads(run.stdout.readline())
        stranger = subprocess.run(
            [sys.executable, "-c", STRANGER, session, address], capture_output=True, text=True, timeout=600, check=False,
            env={**environment, "HOME": "/nowhere", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64},
        )  # fmt: skip
        run.communicate("over\n", timeout=600)
    assert run.returncode == 0
    assert stranger.stdout, stranger.stderr
    joins, *files = json.loads(stranger.stdout)
    assert joins not in ("done", "ImportError"), stranger.stderr
    assert files == ["PermissionError"] * 3
    assert not (tmp_path / ".ray").exists(), "no token in a file"
    assert not os.path.exists(session)


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


@pytest.mark.parametrize("command", ["main", "train", "export", "chat", "show", "report", "settings"])
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


def test_what_is_loaded_before_a_run_is_left_to_no_collection():
    gc.unfreeze()
    with suppress(KeyError), without_collector():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
