"""Reward functions that fail in every way there is: the group is left out with the reason, and nothing else notices."""

import asyncio
import math
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest

from offbeat_rollout import Completion, Finish
from offbeat_trainer import Group, Prompt, RewardConfig, RewardFailed, Score, TrainerError, Trajectory
from offbeat_trainer.config import OnFailure
from offbeat_trainer.rollouts.frames import DIED, RAISED, TIMED_OUT, Call, Setup
from offbeat_trainer.rollouts.scorer import FunctionScorer, TaskScorer, find_reward
from offbeat_trainer.rollouts.server import Server

pytestmark = pytest.mark.spawns

REWARDS = """
import asyncio, os, signal, threading, time
import numpy as np

def one(completion): return len(completion)
def numpys(completions): return np.arange(len(completions), dtype=np.float32)
def none_for_b(completion): return None if completion == "b" else 1
async def later(completion):
    await asyncio.sleep(0.01)
    return 0.5
class Judge:
    async def __call__(self, completion):
        await asyncio.sleep(0.01)
        return np.array([len(completion)])
judge = Judge()
def wrapped(completions): return _all(completions)
async def _all(completions): return np.array([await later(one) for one in completions])
def short(completions): return [1.0]
def process(completion): return os.getpid()
def tokens(completion): return len(os.environ.get("RAY_AUTH_TOKEN", "")) + 10 * len(os.environ.get("JUDGE_API_KEY", ""))
def where(completion): return threading.current_thread() is threading.main_thread()
def alarmed(completion):
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError("my own alarm")))
    signal.alarm(1)
    time.sleep(600)

def fails_for_b(completion):
    if completion == "b": raise KeyError(completion)
    return 1.0
def forgets_to_return(completion): score = float(len(completion))

def fails(how):
    if how == "raised": raise KeyError("nothing")
    if how == "interrupted": raise KeyboardInterrupt
    if how == "left": raise SystemExit(0)
    if how == "timed out": time.sleep(600)
    if how == "died": os._exit(3)
    if how == "killed": os.kill(os.getpid(), 9)
    if how == "nan": return float("nan")
    if how == "text": return "good"
    print("all is well with", how)
    return 1.0

async def hangs(how):
    await asyncio.sleep(600 if how == "timed out" else 0)
    return 1.0

def once(completion):
    from pathlib import Path
    mark = Path(__file__).with_suffix(".tried")
    if mark.exists(): return 1.0
    mark.touch()
    raise ConnectionError("the judge is busy")
"""


def group(how="", texts=("a", "b", "ccc")):
    made = [
        Completion.of(
            request_id=text, token_ids=[ord(one) for one in text], logprobs=[-1.0] * len(text),
            policy_versions=[1] * len(text), finish=Finish.STOP,
        )
        for text in texts
    ]  # fmt: skip
    return Group(
        prompt=Prompt(uid="rows:1", text="q", token_ids=(1,), data={"how": how}),
        trajectories=tuple(map(Trajectory.of, made)),
    )


def decode(token_ids):
    return "".join(map(chr, token_ids))


@pytest.fixture
async def scorer(tmp_path):
    """Make scorers; they are closed afterwards."""
    file = tmp_path / f"rewards_{tmp_path.name}.py"
    file.write_text(REWARDS)
    made = []

    def make(*names, weights=None, **settings):
        config = RewardConfig(**({"concurrency": 2, "timeout_s": 600.0, "max_attempts": 1} | settings))
        rewards = [
            find_reward(name if ":" in name else f"{file}:{name}", weight, {"how": ""})
            for name, weight in zip(names, weights or [1.0] * len(names), strict=True)
        ]
        made.append(
            FunctionScorer(rewards, config, decode=decode, correct_at=1, log=tmp_path / "rewards.log")
        )
        return made[-1]

    yield make
    for one in made:
        await one.close()
        await one.close()


def rewards_of(scored):
    return [score.reward for score in scored.scores]


async def test_functions_of_every_kind_add_up_by_their_weights(scorer):
    mixed = scorer("one", "numpys", "later", "none_for_b", weights=[1.0, 10.0, 2.0, 100.0])
    scored = await mixed.score(group())
    assert rewards_of(scored) == [1 + 0 + 1 + 100, 1 + 10 + 1, 3 + 20 + 1 + 100]
    assert scored.scores[1].parts == {"one": 1.0, "numpys": 1.0, "later": 0.5}
    assert all(score.correct for score in scored.scores)


async def test_functions_of_one_name_are_told_apart(scorer, tmp_path):
    other = tmp_path / "others.py"
    other.write_text("def one(completion): return 0.25\n")
    mixed = scorer("one", str(other) + ":one", "later")
    scored = await mixed.score(group(texts=("ccc",)))
    (score,) = scored.scores
    assert (score.reward, sorted(score.parts.values()), score.parts["later"]) == (3.75, [0.25, 0.5, 3.0], 0.5)


async def test_what_gives_something_to_wait_for_is_waited_for_however_it_is_written(scorer):
    scored = await scorer("judge", "wrapped").score(group())
    assert [score.parts for score in scored.scores] == [
        {"judge": 1.0, "wrapped": 0.5}, {"judge": 1.0, "wrapped": 0.5}, {"judge": 3.0, "wrapped": 0.5}
    ]  # fmt: skip


async def test_a_function_runs_in_the_main_thread_where_alarms_work(scorer):
    assert rewards_of(await scorer("where").score(group())) == [1, 1, 1]
    with pytest.raises(RewardFailed, match="raised: TimeoutError: my own alarm"):
        await scorer("alarmed").score(group(texts=("a",)))


@pytest.mark.parametrize("name", ["process", "later"])
async def test_processes_that_are_started_ahead_are_all_there_before_the_first_call(scorer, name):
    made = scorer(name, concurrency=5)
    assert not (await made.start()).failure
    server = made._process._process.pid
    there = in_group(server)
    values = rewards_of(await made.score(group()))
    assert in_group(server) == there
    if name == "later":
        assert there == {server}
    else:
        assert set(values) <= there - {server}
        assert len(there) >= 1 + 5


async def test_what_cannot_start_is_said_by_the_call_that_meets_it_and_closing_waits_for_no_start(scorer):
    made = scorer("one")
    made._process._setup = replace(made._process._setup, paths=("no_such_module:score",))
    assert (await made.start()).failure == "died"
    with pytest.raises(RewardFailed, match="the process that calls rewards: it ended"):
        await made.score(group())
    other = scorer("one")
    starting = other.start()
    await other.close()
    assert starting.cancelled()


@pytest.mark.parametrize(
    ("how", "reason", "says"),
    [
        ("raised", "raised", "rewards_.*:fails for rows:1 raised: KeyError: 'nothing'"),
        ("interrupted", "raised", "KeyboardInterrupt"),
        ("left", "raised", "SystemExit"),
        ("died", "died", "exit code 3"),
        ("killed", "died", "exit code -9"),
        ("nan", "not a number", "returned nan, not a finite number"),
        ("text", "not a number", "returned 'good', not a finite number"),
    ],
)
async def test_a_failure_is_that_group_s_alone(scorer, how, reason, says):
    made = scorer("fails")
    with pytest.raises(RewardFailed, match=says) as failed:
        await made.score(group(how, texts=("a",)))
    assert failed.value.reason == reason
    assert rewards_of(await made.score(group("fine"))) == [1, 1, 1]


@pytest.mark.parametrize("name", ["fails", "hangs"])
async def test_a_call_that_takes_too_long_is_ended_and_those_beside_it_go_on(scorer, name):
    made = scorer(name, timeout_s=5.0, concurrency=2)
    slow, quick = await asyncio.gather(
        made.score(group("timed out", texts=("a",))), made.score(group("fine")), return_exceptions=True
    )
    assert isinstance(slow, RewardFailed)
    assert slow.reason == "timed out"
    assert "took longer than 5 s" in str(slow)
    assert rewards_of(quick) == [1, 1, 1]


async def test_what_fails_once_is_tried_again_and_a_batch_must_answer_for_each(scorer):
    assert rewards_of(await scorer("once", max_attempts=2).score(group(texts=("a",)))) == [1]
    with pytest.raises(RewardFailed, match="returned 1 values for 3 completions"):
        await scorer("short").score(group())


async def test_a_module_that_only_this_process_looks_for_is_found_over_there(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "rewards_elsewhere.py").write_text("def two(completion): return 2.0\n")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    reward = find_reward("rewards_elsewhere:two", 1.0, {})
    scorer = FunctionScorer([reward], RewardConfig(concurrency=1), decode=decode, correct_at=1)
    try:
        assert rewards_of(await scorer.score(group())) == [2, 2, 2]
    finally:
        await scorer.close()


async def test_where_it_is_asked_for_a_failure_ends_the_run(scorer):
    with pytest.raises(TrainerError, match=r"reward\.on_failure=drop") as ended:
        await scorer("fails", on_failure=OnFailure.STOP).score(group("raised", texts=("a",)))
    assert not isinstance(ended.value, RewardFailed)


async def test_when_the_process_of_the_rewards_is_killed_another_takes_its_place(scorer, tmp_path):
    made = scorer("fails", timeout_s=600.0)
    assert rewards_of(await made.score(group("fine", texts=("a",)))) == [1]
    waiting = asyncio.create_task(made.score(group("timed out", texts=("a",))))
    await asyncio.sleep(0.5)
    os.kill(made._process._process.pid, signal.SIGKILL)
    with pytest.raises(RewardFailed, match="the process that calls rewards: it ended") as failed:
        await waiting
    assert failed.value.reason == "died"
    assert rewards_of(await made.score(group("fine", texts=("a",)))) == [1]
    assert "all is well with fine" in (tmp_path / "rewards.log").read_text()


@pytest.mark.parametrize(("how", "failure"), [("died", DIED), ("timed out", TIMED_OUT), ("raised", RAISED)])
def test_a_quick_call_that_fails_in_a_batch_fails_alone(tmp_path, how, failure):
    file = tmp_path / "rewards_in_batches.py"
    file.write_text(REWARDS)
    path, answers = f"{file}:fails", queue.SimpleQueue()
    server = Server(Setup(paths=(path,), search=(), concurrency=2, timeout_s=5.0), answers.put)
    try:
        calls = [Call(number=place, path=path, arguments={"how": "fine"}) for place in range(5)]
        calls[3] = replace(calls[3], arguments={"how": how})
        server._call_s[path] = 1e-9  # as if calls had been quick
        server.take(calls)
        found, frames = {}, []
        while len(found) < len(calls):
            frames.append(answers.get(timeout=600))
            found |= {answer.number: answer for answer in frames[-1]}
    finally:
        server.close()
    assert {number: answer.failure for number, answer in found.items()} == {
        0: "",
        1: "",
        2: "",
        3: failure,
        4: "",
    }
    assert [answer.value for number, answer in sorted(found.items()) if number != 3] == [1.0] * 4
    assert len(frames) == (1 if how == "raised" else 5)


DRIVER = """
import asyncio, os, sys
from offbeat_trainer.rollouts.client import CallProcess
from offbeat_trainer.rollouts.frames import Setup

async def main():
    process = CallProcess(Setup(paths=(sys.argv[1],), search=(), concurrency=2, timeout_s=600.0))
    asyncio.get_running_loop().create_task(process.call(sys.argv[1], {"how": "timed out"}))
    while True:
        answer = await process.call(sys.argv[1], {"how": "fine"})
        print(process._process.pid, answer.value, flush=True)
        os.kill(os.getpid(), 9)

asyncio.run(main())
"""


def test_a_driver_that_is_killed_leaves_no_process_behind(tmp_path):
    file = tmp_path / "rewards_of_a_driver.py"
    file.write_text(REWARDS)
    driver = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DRIVER), f"{file}:fails"],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert driver.returncode == -signal.SIGKILL
    server, value = driver.stdout.split()
    assert value == "1.0"
    while in_group(int(server)):
        time.sleep(0.05)


def in_group(leader):
    """The ids of the processes of a group that are alive."""
    listed = subprocess.run(
        ["ps", "-e", "-o", "pid=,pgid=,stat="], capture_output=True, text=True, timeout=600, check=True
    )
    rows = [line.split() for line in listed.stdout.splitlines()]
    return {int(pid) for pid, pgid, stat in rows if int(pgid) == leader and not stat.startswith("Z")}


async def test_a_task_s_own_score_fails_alike():
    class Task:
        def score(self, prompt, completion):
            if prompt.data["how"] == "raised":
                raise StopIteration
            threading.Event().wait()

    for how, reason, says in (
        ("raised", "raised", "StopIteration"),
        ("hangs", "timed out", "longer than 0.2 s"),
    ):
        with pytest.raises(RewardFailed, match=says) as failed:
            await TaskScorer(Task().score, RewardConfig(timeout_s=0.2)).score(group(how))
        assert failed.value.reason == reason


async def test_a_task_s_own_score_is_tried_again_as_often_as_a_function():
    calls = Counter()

    def score(prompt, completion):
        calls[prompt.uid] += 1
        if calls[prompt.uid] < 3:
            raise ConnectionError("the judge is busy")
        return Score(reward=1.0, correct=True)

    one = group(texts=("a",))
    assert rewards_of(await TaskScorer(score, RewardConfig(max_attempts=3)).score(one)) == [1.0]
    calls.clear()
    with pytest.raises(RewardFailed, match="the judge is busy"):
        await TaskScorer(score, RewardConfig(max_attempts=2)).score(one)
    assert calls.total() == 2


async def test_a_task_s_own_score_fails_for_one_completion_alone():
    def score(prompt, completion):
        if completion.num_trained == 3:
            raise ConnectionError("too long for the judge")
        return Score(reward=1.0)

    scored = await TaskScorer(score, RewardConfig(max_attempts=1)).score(group())
    assert rewards_of(scored)[:2] == rewards_of(scored.scored) == [1.0, 1.0]
    with pytest.raises(RewardFailed, match="too long for the judge"):
        await TaskScorer(score, RewardConfig(max_attempts=1)).score(group(texts=("a", "ccc")))


async def test_texts_that_wait_to_be_decoded_keep_no_thread_from_others(scorer):
    decoded = threading.Event()
    reward = scorer("one")
    reward._decode = lambda ids: str(decoded.wait())
    scored = [asyncio.create_task(reward.score(group())) for _ in range(64)]
    await asyncio.sleep(0)
    async with asyncio.timeout(60):  # what makes a batch, and what flushes a journal
        assert await asyncio.to_thread(lambda: "made") == "made"
    decoded.set()
    assert len(await asyncio.gather(*scored)) == 64


async def test_who_waits_for_one_of_many_groups_goes_on_before_all_have_their_scores():
    """A step is such a one: the last of its groups has its score, and hundreds of others that are not its own, too."""
    scorer = TaskScorer(lambda prompt, completion: Score(reward=1.0), RewardConfig())
    scored = [asyncio.create_task(scorer.score(group())) for _ in range(64)]
    await scored[0]
    assert sum(one.done() for one in scored) < 64
    assert [rewards_of(one) for one in await asyncio.gather(*scored)] == [[1.0] * 3] * 64


@pytest.mark.parametrize(
    ("score", "says"),
    [
        ("later", "`score` must return a Score at once, got coroutine"),
        ("number", "`score` must return a Score at once, got float"),
        ("nan", "must be a finite number, got nan"),
        ("array", "raised"),
        ("interrupted", "raised KeyboardInterrupt"),
    ],
)
async def test_what_a_task_gives_that_is_no_score_is_its_own_failure(score, says):
    class Task:
        async def later(self, prompt, completion):
            return Score(reward=1.0, correct=True)

        def number(self, prompt, completion):
            return 1.0

        def nan(self, prompt, completion):
            return Score(reward=float("nan"), correct=False)

        def array(self, prompt, completion):
            return Score(reward=completion.token_ids[[0, 0]], correct=False)

        def interrupted(self, prompt, completion):
            raise KeyboardInterrupt

    with pytest.raises(RewardFailed, match=says):
        await TaskScorer(getattr(Task(), score), RewardConfig()).score(group())


async def test_a_task_may_score_with_numbers_of_numpy():
    def score(prompt, completion):
        return Score(reward=completion.token_ids.mean(), correct=completion.token_ids.any())

    assert rewards_of(await TaskScorer(score, RewardConfig()).score(group())) == [97.0, 98.0, 99.0]


@pytest.mark.parametrize(
    ("names", "texts"),
    [(["forgets_to_return"], "abc"), (["none_for_b"], "ab"), (["none_for_b", "forgets_to_return"], "b")],
)
async def test_a_completion_to_which_no_reward_applies_has_no_score(scorer, names, texts):
    """A sum over nothing would be a silent 0 for every completion of a function that lacks its `return`."""
    with pytest.raises(
        RewardFailed, match=r"no reward applies to completion \d of rows:1: .*returned None"
    ) as raised:
        await scorer(*names).score(group(texts=texts))
    assert raised.value.reason == "none applies"
    with pytest.raises(TrainerError, match=r"reward\.on_failure=drop"):
        await scorer(*names, on_failure=OnFailure.STOP).score(group())


@pytest.mark.parametrize("name", ["none_for_b", "fails_for_b"])
async def test_a_completion_whose_reward_failed_leaves_the_others_of_its_group(scorer, name, caplog):
    scored = await scorer(name).score(group())
    assert [math.isnan(reward) for reward in rewards_of(scored)] == [False, True, False]
    kept = scored.scored
    assert (rewards_of(kept), decode(kept.trajectories[1].token_ids)) == ([1, 1], "ccc")
    assert "1 of 3 completions have no score" in caplog.text


async def test_a_reward_that_does_not_apply_leaves_the_others_score(scorer):
    [first, second, third] = (await scorer("one", "none_for_b").score(group())).scores
    assert [first.reward, second.reward, third.reward] == [2.0, 1.0, 4.0]
    assert second.parts == {"one": 1.0}


async def test_rewards_have_no_secret_of_the_run_in_their_environment(scorer, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setenv("JUDGE_API_KEY", "key")
    [score] = (await scorer("tokens").score(group(texts=("a",)))).scores
    assert score.reward == 30.0, "a judge's key stays"
