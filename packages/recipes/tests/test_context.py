"""What a run says at its end can be typed as it stands."""

import json
import resource
import runpy
import shlex
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from offbeat_recipes.run.context import RunContext, _command, _unforeseen, drive
from offbeat_recipes.run.reporting import describe_error
from offbeat_recipes.settings.reading import parse
from offbeat_trainer import ResumeError


def test_commands_name_the_program_of_this_environment_and_run_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my run").mkdir()
    Path("my run/said.py").write_text("import os, sys; print(os.getcwd(), *sys.argv[1:])")
    command = _command("python", "my run/said.py", "run_dir=my run")
    assert f" {shlex.quote(str(Path(sys.executable).parent / 'python'))} " in command
    said = subprocess.run(["sh", "-c", command], cwd="/", capture_output=True, text=True, check=True).stdout
    assert said == f"{tmp_path} run_dir=my run\n"
    assert _command("offbeat-nothing", "x").endswith(" && offbeat-nothing x")


def test_a_mistake_in_a_file_of_ones_own_is_named_by_its_line_and_is_no_defect(tmp_path: Path):
    own = tmp_path / "mine.py"
    own.write_text("def learn():\n    return {}['none']\n")
    with pytest.raises(KeyError) as caught:
        runpy.run_path(str(own))["learn"]()
    assert _unforeseen(caught.value) == f"KeyError: 'none' (at {own}:2); the log has the traceback"
    assert _unforeseen(KeyError("none")).endswith("(a defect; the log has the traceback)")


def host_memory() -> Exception:
    """What torch raises where a machine has no more memory: nobody has an exbibyte."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.int8)
    return raised.value


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), MemoryError(), host_memory()],
)
def test_memory_that_ran_out_is_told_with_the_settings_that_take_less(error: Exception):
    error.add_note("in training rank 1")
    said = describe_error(parse({"engine": {"num_ranks": 2, "micro_batch_tokens": 4096}}), error)
    assert said.startswith("memory ran out: ")
    assert "in training rank 1" in said
    for what in (
        "engine.micro_batch_tokens (now 4096)",
        "engine.num_ranks, now 2",
        "engine.offload_optimizer",
    ):
        assert what in said


def test_another_error_is_none_of_these():
    assert not describe_error(parse({}), RuntimeError("a matrix with no inverse"))
    assert not describe_error(parse({}), FileNotFoundError(2, "No such file or directory"))


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device", "runs/x/metrics.jsonl"), "no room is left: "),
        (OSError(122, "Disk quota exceeded"), "no room is left: "),
        (sqlite3.OperationalError("database or disk is full"), "no room is left: "),
        (Exception("No space left on device (os error 28)"), "no room is left: "),  # tokenizers
        (caused(RuntimeError("a replica died"), OSError(28, "No space left on device")), "no room is left: a replica died"),
        (OSError(24, "Too many open files"), "too many files are open: "),
    ],
)  # fmt: skip
def test_what_else_can_run_out_is_told_wherever_the_error_comes_from(error: Exception, said: str):
    assert describe_error(parse({}), error).startswith(said)


# In mounts of its own, which end with it.
ON_A_SMALL_DISK = """
import json, os, subprocess, sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from offbeat_recipes.errors import RunFolderError
from offbeat_recipes.run.context import drive
from offbeat_recipes.settings.reading import parse
from offbeat_trainer import ResumeError

async def nothing(context):
    pass

def start(config):
    with redirect_stderr(StringIO()) as said:
        try:
            code = drive(config, nothing, 0.0)
        except RunFolderError as error:
            return str(error)
    return said.getvalue() or f"{code}" if code else said.getvalue()

disk, kind, *rooms = Path(sys.argv[1]), *sys.argv[2:]
for room in rooms:
    options = f"size=8m,nr_inodes={room}" if kind == "files" else f"size={room}k"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk], check=True)
    config = parse({"run_dir": str(disk / "run"), "report": {"console": False}})
    told = start(config)
    half = [name for name in os.listdir(disk / "run") if name.endswith(".writing")]
    subprocess.run(["mount", "-o", "remount,size=8m,nr_inodes=1000", disk], check=True)
    print(json.dumps([told, half, start(config)]), flush=True)
    subprocess.run(["umount", "-l", disk], check=True)
"""


@pytest.mark.spawns
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rooms"),
    [
        pytest.param("files", [2, 4, 7, 10, 13, 16, 20], marks=pytest.mark.deep),
        ("bytes", [4, 12, 24, 72, 300, 2000]),
    ],
)
def test_a_disk_that_is_full_at_any_moment_of_the_start_is_told_and_the_next_start_finds_it_usable(
    tmp_path: Path, kind: str, rooms: Sequence[int]
):
    apart = ["unshare", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], check=False).returncode:
        pytest.skip("small disks need root and `unshare`")
    done = subprocess.run(
        [*apart, sys.executable, "-c", ON_A_SMALL_DISK, tmp_path, kind, *map(str, rooms)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "Traceback" not in done.stdout
    came = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(half, again) for _, half, again in came] == [([], "")] * len(rooms)
    told = [first for first, _, _ in came]
    assert told[0]
    assert not told[-1]
    assert all("no room is left" in first for first in told if first)


def test_steps_that_a_full_disk_kept_out_of_the_metrics_are_told_once_and_counted_in_the_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "run"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def work(context: RunContext) -> None:
        context.reporter.metrics(1, [])
        resource.setrlimit(resource.RLIMIT_FSIZE, ((folder / "metrics.jsonl").stat().st_size, hard))
        try:
            context.reporter.metrics(2, [])
            context.reporter.metrics(3, [])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        context.reporter.metrics(4, [])

    config = parse({"run_dir": str(folder), "report": {"console": False, "trackers": []}})
    assert drive(config, work, 0.0) == 0
    assert json.loads((folder / "summary.json").read_text())["reports_lost"] == {"JsonlReporter": 2}
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 4]
    assert capsys.readouterr().err.count("JsonlReporter could not write and tries again") == 1


def test_a_run_that_cannot_go_on_leaves_the_summary_of_what_it_came_to(tmp_path: Path):
    async def finishes(context: RunContext) -> None:
        context.stop.listening = True
        context.outcome.steps = 30

    async def cannot(context: RunContext) -> None:
        raise ResumeError("30 steps are done already")

    def steps() -> int:
        return json.loads((tmp_path / "run" / "summary.json").read_text())["steps"]

    told = {"run_dir": str(tmp_path / "run"), "report": {"console": False, "trackers": []}}
    assert drive(parse(told), cannot, 0.0) == 1
    assert steps() == 0, "a first start has no other summary"
    assert drive(parse(told), finishes, 0.0) == 0
    assert drive(parse(told | {"resume": "auto"}), cannot, 0.0) == 1
    assert steps() == 30
