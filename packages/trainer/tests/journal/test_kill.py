"""Runs that are killed again and again, at random instants, and go on: nothing lost, nothing trained twice."""

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from offbeat_trainer.loops import online
from offbeat_trainer.loops.events import MemoryJournal, Taken, recover
from offbeat_trainer.loops.journal import SqliteJournal

pytestmark = pytest.mark.spawns

LOOP = {
    "steps": 8, "prompts_per_step": 3, "group_size": 2, "validate_every": 0, "validation_prompts": 1, "save_every": 2,
    "sample_every": 0,
}  # fmt: skip
DETERMINISTIC = {"order": "first_in", "partial": "wait"}


class Killer:
    """Runs jobs in forks of one warm process: importing torch once is enough."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "killed_run.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, folder, life, kill_at=0, **job):
        """One life; return its result, or None if it was killed."""
        folder.mkdir(parents=True, exist_ok=True)
        result = folder / "result.json"
        job = {"mode": "fully_async", "loop": LOOP, **job}
        job |= {"folder": str(folder), "life": life, "kill_at": kill_at, "result": str(result)}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert answer["killed"] == (not result.exists())
        if answer["killed"]:
            assert answer["code"] == -9
            return None
        assert answer["code"] == 0, "the run failed; its traceback is above"
        return json.loads(result.read_text())

    def close(self):
        self.process.stdin.close()
        self.process.wait(600)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def killer():
    one = Killer()
    yield one
    one.close()


@pytest.fixture(scope="session")
def num_kills(deep):
    return 15 if deep else 6


def kill_often(killer, folder, seed, *, num_kills, **job):
    """Kill a run up to `num_kills` times at random instants; return the undisturbed one's result and its own."""
    draws = random.Random(seed)
    whole = killer.run(folder / "whole", life=0, **job)
    lives = 0
    for life in range(1, num_kills + 1):
        lives += 1
        # A life may die while it still reads the journal, or get some steps and a checkpoint further.
        kill_at = int(0.4 * whole["num_events"] * draws.random()) + 1
        result = killer.run(folder / "killed", life=life, kill_at=kill_at, **job)
        if result is not None:
            break
    else:
        result = killer.run(folder / "killed", life=1000, **job)
    assert lives > 3, "it was killed several times"
    return whole, result


@pytest.mark.parametrize(
    ("mode", "asynchrony", "job"),
    [
        ("one_step_off", {}, {}),
        ("fully_async", DETERMINISTIC | {"max_staleness": 2}, {}),
        ("fully_async", DETERMINISTIC | {"max_staleness": 3, "sync_every": 3}, {}),
        ("sync", {"over_sampling": 0.6}, {"flat": 2}),
        ("one_step_off", {"over_sampling": 0.6}, {"flat": 3}),
    ],
)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.deep)])
def test_a_deterministic_run_trains_the_same_stream_however_often_it_is_killed(
    killer, num_kills, tmp_path, mode, asynchrony, job, seed
):
    settings = {"mode": mode, "asynchrony": asynchrony, **job}
    whole, killed = kill_often(killer, tmp_path, seed, num_kills=num_kills, **settings)
    assert killed["prompts"] == whole["prompts"]
    assert killed["history"] == whole["history"], "token, log-prob, version and advantage, in order"
    assert killed["logits"] == whole["logits"]


@pytest.mark.parametrize(
    "asynchrony",
    [
        {"max_staleness": 0},
        {"max_staleness": 2, "partial": "keep", "order": "longest_waiting"},
        {"max_staleness": 3, "partial": "abort", "order": "oldest_version", "sync_every": 2},
        {"max_staleness": 2, "partial": "abort", "order": "first_in"},
        {"max_staleness": 2, "over_sampling": 0.5, "order": "longest_waiting"},
    ],
    ids=str,
)
def test_any_run_goes_on_without_losing_a_prompt_or_training_one_twice(
    killer, num_kills, tmp_path, asynchrony
):
    _, killed = kill_often(killer, tmp_path, 5, num_kills=num_kills, asynchrony=asynchrony)
    steps, per_step, group_size = LOOP["steps"], LOOP["prompts_per_step"], LOOP["group_size"]
    trained = Counter(number for numbers in killed["prompts"] for number in numbers)
    assert set(trained.values()) == {group_size}, "each once, whole"
    assert len(trained) == steps * per_step
    journal = SqliteJournal(tmp_path / "killed" / "journal.sqlite")
    left = recover(journal.events(), steps, per_step)
    journal.close()
    accounted = {*trained, *left.finished, *left.gaps, *left.dropped}
    assert accounted == set(range(left.next_index)), (
        "nothing is lost: trained, pending or dropped for a reason"
    )
    assert not set(trained) & {*left.finished, *left.gaps, *left.dropped}
    if not asynchrony.get("over_sampling"):
        assert not left.dropped


def test_without_the_script_of_lost_steps_the_account_breaks(tmp_path, monkeypatch):
    """The planted defect: a journal whose reader forgets what the lost steps had taken."""
    from offbeat_trainer.config import AsyncConfig, LoopConfig
    from scripted import ScriptedRun

    def go(folder, journal, loop):
        return ScriptedRun(
            folder=folder, loop=loop, asynchrony=AsyncConfig(max_staleness=2), journal=journal
        ).go()

    loop = LoopConfig(**LOOP)
    journal = MemoryJournal()
    first = go(tmp_path, journal, loop)
    (tmp_path / "policy" / "policy_000008.pt").unlink()  # the weights of the last two steps are lost
    again = go(tmp_path, MemoryJournal(journal.events()), loop)
    assert again.policy.prompts == first.policy.prompts
    assert again.policy.history == first.policy.history

    def forgetful(events, start, groups_per_step):
        found = recover(events, start, groups_per_step)
        gone = {i for event in events if isinstance(event, Taken) for i in event.indices}
        found.finished = {i: group for i, group in found.finished.items() if i not in gone}
        found.script = {}
        return found

    (tmp_path / "policy" / "policy_000008.pt").unlink()
    monkeypatch.setattr(online, "recover", forgetful)
    broken = go(tmp_path, MemoryJournal(journal.events()), loop)
    assert broken.policy.prompts != first.policy.prompts
