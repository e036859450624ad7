"""What a run is continued from: saved whole, pruned, and refused when it is not what was written."""

import json
import os
import subprocess
import sys

import pytest

from offbeat_trainer.errors import ResumeError
from offbeat_trainer.loops.run_store import RunState, RunStore

FULL = RunState(
    step=3, accuracy_before=0.25, reward_first=-1.5, reward_last=0.5, loss_after=1.25, warmup_s=2.0
)


def steps(folder):
    return [int(path.stem.removeprefix("step_")) for path in sorted(folder.glob("step_*.json"))]


def test_a_state_comes_back_as_it_was(tmp_path):
    store = RunStore(tmp_path / "new" / "state", keep=2)
    store.save(FULL)
    store.save(RunState(step=4))
    assert store.load(3) == FULL
    assert RunStore(tmp_path / "new" / "state", keep=2).load(4) == RunState(step=4)


def test_two_more_are_kept_than_asked_because_two_checkpoints_may_not_be_whole_yet(tmp_path):
    store = RunStore(tmp_path, keep=2)
    for step in (0, 5, 10, 15, 20):
        store.save(RunState(step=step))
    assert steps(tmp_path) == [5, 10, 15, 20]


def test_a_run_may_be_asked_to_start_again_until_states_were_forgotten(tmp_path):
    store = RunStore(tmp_path, keep=1)
    oldest = []
    for step in (5, 10, 15, 20):
        store.save(RunState(step=step))
        oldest.append(store.oldest())
    assert oldest == [0, 0, 5, 10]


def test_saving_a_step_again_replaces_it(tmp_path):
    store = RunStore(tmp_path, keep=1)
    store.save(RunState(step=3))
    store.save(FULL)
    assert (steps(tmp_path), store.load(3)) == ([3], FULL)


def test_the_leftover_of_a_crash_does_not_push_out_the_states_in_use(tmp_path):
    # A run died between the state of step 30 and its checkpoint, went on from step 20, and saves more often now.
    store = RunStore(tmp_path, keep=1)
    for step in (20, 30, 21, 22, 23):
        store.save(RunState(step=step))
    assert steps(tmp_path) == [21, 22, 23]


def test_a_process_killed_while_it_saves_leaves_the_old_state(tmp_path):
    RunStore(tmp_path, keep=1).save(FULL)
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from offbeat_trainer.loops.run_store import RunState, RunStore\n"
        "os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        "RunStore(Path(sys.argv[1]), keep=1).save(RunState(step=3, warmup_s=9.0))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=600, check=False)
    assert done.returncode == -9
    assert len(os.listdir(tmp_path)) == 2  # the half-written file is there, beside
    store = RunStore(tmp_path, keep=1)
    assert store.load(3) == FULL
    store.save(RunState(step=3, warmup_s=9.0))
    assert store.load(3).warmup_s == 9.0


def test_no_state_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(ResumeError, match=r"step 7 has no step_00000007\.json in .*start a new one"):
        RunStore(tmp_path, keep=1).load(7)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        json.dumps({"step": 3, "accuracy_before": 0.25})[:-3].encode(),
        b"\xff\xfe\x00garbage",
        b"[1, 2]",
        b"null",
        b"{}",
        b'{"step": 3, "unknown": 1}',
    ],
    ids=["empty", "torn", "not text", "a list", "null", "no step", "another key"],
)
def test_a_file_that_is_not_ours_is_refused_by_name(tmp_path, content):
    store = RunStore(tmp_path, keep=1)
    store.save(FULL)
    (tmp_path / "step_00000003.json").write_bytes(content)
    with pytest.raises(ResumeError, match=r"step_00000003\.json cannot be read as a run state"):
        store.load(3)
