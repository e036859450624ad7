"""Environments in processes of their own: what they are asked, and every way in which they can fail."""

import asyncio
from pathlib import Path

import pytest

from offbeat_trainer.config import EnvironmentConfig
from offbeat_trainer.data.loading import load_object
from offbeat_trainer.data.types import Prompt
from offbeat_trainer.errors import EnvironmentFailed, PlanRefused
from offbeat_trainer.rollouts.environment import Action, find_environment
from offbeat_trainer.rollouts.processes import EnvironmentProcesses
from offbeat_trainer.testing import check_environment

EXAMPLES = Path(__file__).parents[3] / "examples"

FILE = """
import asyncio, os, signal, threading, time
from offbeat_trainer import Feedback
print("begun", os.getpid(), flush=True)

class Plain:
    def reset(self, prompt, seed):
        self.said = [prompt.uid]
        self.how = prompt.data.get("how", "")
        return f"{os.getpid()}"
    def step(self, action):
        if self.how == "hangs": time.sleep(3600)
        if self.how == "exits": os._exit(1)
        if self.how == "raises": raise OSError("no such place")
        if self.how == "leaves": raise SystemExit(0)
        if self.how == "lambda": return Feedback(observation="x", parts={"f": lambda: 1})
        if self.how == "alarm":
            signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError("my own alarm")))
            signal.alarm(1)
            time.sleep(600)
        assert threading.current_thread() is threading.main_thread()
        self.said.append(action.text)
        return Feedback(observation=",".join(self.said), reward=len(self.said), done=action.turn == 1)
    def close(self):
        print("closed", self.said)

class Coroutine(Plain):
    async def step(self, action):
        if self.how == "hangs": await asyncio.sleep(3600)
        if self.how == "raises": raise OSError("no such place")
        await asyncio.sleep(0.01)
        self.said.append(action.text)
        return Feedback(observation=",".join(self.said), reward=len(self.said), done=action.turn == 1)

def made():
    return Coroutine()

class NoStep:
    def reset(self, prompt, seed): return ""

class WrongStep(Plain):
    def step(self): ...

class Wants:
    def __init__(self, what): ...

number = 3
"""

LIMIT_S = 15.0
"""Of a call where one hangs: what the others do within it must fit on a busy machine, too."""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    return str(tmp_path / "mine.py")


@pytest.fixture
async def processes(tmp_path, path):
    begun = []

    def begin(name, **settings):
        begun.append(
            EnvironmentProcesses(EnvironmentConfig(path=f"{path}:{name}", **settings), tmp_path / "log")
        )
        return begun[-1]

    yield begin
    for one in begun:
        await one.close()
        await one.close()


@pytest.fixture
def slow_import(path):
    with open(path, "a") as file:
        file.write(f"\nimport time\ntime.sleep({LIMIT_S + 1})\n")


def prompt(uid, how=""):
    return Prompt(uid=uid, text="", token_ids=(1,), data={"how": how})


def action(turn, text):
    return Action(turn=turn, text=text, token_ids=(1, 2), finish="stop")


def workers():
    """Return the processes with environments that this one has begun."""
    here = [
        Path("/proc") / pid
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]
    return [path for path in here if b"offbeat_trainer.rollouts.worker" in (path / "cmdline").read_bytes()]


async def talk(one, uid):
    """Two turns; return the process it was in, and what was said last."""
    pid = await one.reset(prompt(uid), 1)
    assert not (await one.step(action(0, "a"))).done
    last = await one.step(action(1, "b"))
    await one.close()
    return pid, last


@pytest.mark.spawns
async def test_processes_start_before_anything_is_asked_and_are_those_that_answer(processes, tmp_path):
    pool = processes("Plain")
    await pool.start()
    begun = {
        line.split()[1] for line in (tmp_path / "log").read_text().splitlines() if line.startswith("begun")
    }
    found = await asyncio.gather(*(talk(pool.make(), f"u{number}") for number in range(4)))
    assert {pid for pid, _ in found} == begun
    assert len(begun) == 2


@pytest.mark.spawns
async def test_what_cannot_start_is_said_by_the_first_reset_and_leaves_no_process(processes, path):
    pool = processes("Wants")
    await pool.start()
    with pytest.raises(EnvironmentFailed, match="cannot be made"):
        await pool.make().reset(prompt("u"), 1)
    assert workers() == []


@pytest.mark.spawns
async def test_closing_waits_for_no_start_and_leaves_no_process(processes):
    pool = processes("Plain")
    starting = pool.start()
    while not workers():  # noqa: ASYNC110 - until it is in the middle of its start
        await asyncio.sleep(0.01)
    await pool.close()
    assert starting.cancelled()
    assert workers() == []


@pytest.mark.spawns
@pytest.mark.parametrize(("name", "num_processes"), [("Plain", 2), ("Coroutine", 1), ("made", 1)])
async def test_instances_keep_their_state_and_share_processes(processes, tmp_path, name, num_processes):
    pool = processes(name)
    found = await asyncio.gather(*(talk(pool.make(), f"u{number}") for number in range(6)))
    assert len({pid for pid, _ in found}) == num_processes
    assert [last.observation for _, last in found] == [f"u{number},a,b" for number in range(6)]
    assert all(last.done and last.reward == 3 for _, last in found)
    async with asyncio.timeout(60):
        while (tmp_path / "log").read_text().count("closed") < 6:  # noqa: ASYNC110 - nobody waits for a close
            await asyncio.sleep(0.05)


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("how", "counted", "words"),
    [
        ("hangs", "timed out", rf"it took longer than {LIMIT_S:g} s \(environment.timeout_s\)"),
        ("exits", "died", "the process that calls environments: it ended"),
        ("raises", "raised", "OSError: no such place"),
        ("leaves", "raised", "SystemExit: 0"),
        ("lambda", "raised", "what was returned cannot be sent"),
        ("alarm", "raised", "TimeoutError: my own alarm"),
    ],
)
async def test_one_that_fails_is_said_and_the_others_go_on(processes, how, counted, words):
    limit = {"timeout_s": LIMIT_S} if how == "hangs" else {}
    pool = processes("Plain", concurrency=1, **limit)
    other, bad = pool.make(), pool.make()
    await other.reset(prompt("other"), 1)
    await bad.reset(prompt("bad", how), 1)
    with pytest.raises(EnvironmentFailed, match=words) as caught:
        await bad.step(action(0, "a"))
    assert caught.value.counted_as == f"environment {counted}"
    assert not caught.value.innocent
    if counted in ("timed out", "died"):
        with pytest.raises(EnvironmentFailed, match="for another one's sake") as caught:
            await other.step(action(0, "a"))
        assert caught.value.innocent, "it is begun anew, and not blamed"
    else:
        assert (await other.step(action(0, "a"))).observation == "other,a"
    assert (await talk(pool.make(), "next"))[1].observation == "next,a,b"


@pytest.mark.spawns
@pytest.mark.usefixtures("slow_import")  # slower than a call may be
@pytest.mark.parametrize("how", ["exits", "hangs"])
@pytest.mark.deep
async def test_a_process_that_is_started_again_takes_its_time_from_nobody(processes, how):
    pool = processes("Plain", timeout_s=LIMIT_S, concurrency=1)
    bad, other = pool.make(), pool.make()
    await bad.reset(prompt("bad", how), 1)
    step = asyncio.create_task(bad.step(action(0, "a")))
    await asyncio.sleep(0)
    assert (await talk(other, "other"))[1].observation == "other,a,b"
    with pytest.raises(EnvironmentFailed):
        await step


@pytest.mark.spawns
async def test_coroutines_have_a_limit_each_and_the_others_do_not_notice(processes):
    pool = processes("Coroutine", timeout_s=LIMIT_S)
    other, hangs, bad = (pool.make() for _ in range(3))
    await other.reset(prompt("other"), 1)
    await hangs.reset(prompt("hangs", "hangs"), 1)
    await bad.reset(prompt("bad", "raises"), 1)
    hanging = asyncio.create_task(hangs.step(action(0, "a")))
    with pytest.raises(EnvironmentFailed, match="OSError: no such place"):
        await bad.step(action(0, "a"))
    assert (await other.step(action(0, "a"))).observation == "other,a"
    assert not hanging.done()
    with pytest.raises(EnvironmentFailed, match=f"it took longer than {LIMIT_S:g} s") as caught:
        await hanging
    assert caught.value.counted_as == "environment timed out"
    assert (await other.step(action(1, "b"))).observation == "other,a,b"


@pytest.mark.spawns
@pytest.mark.deep
async def test_a_call_that_was_given_up_is_waited_for_before_the_next(processes):
    pool = processes("Plain", timeout_s=LIMIT_S, concurrency=1)
    bad, other = pool.make(), pool.make()
    await bad.reset(prompt("bad", "hangs"), 1)
    step = asyncio.create_task(bad.step(action(0, "a")))
    await asyncio.sleep(0.5)
    step.cancel()
    assert (await talk(other, "other"))[1].observation == "other,a,b", (
        "its own limit begins when its turn does"
    )


def test_what_can_be_named(path):
    assert find_environment(f"{path}:Plain")().reset(prompt("a"), 1).isdigit()
    assert callable(find_environment(f"{path}:made"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NoStep", r"has no `step`; an environment has reset\(prompt, seed\) and step\(action\)"),
        ("WrongStep", r"`step` is called with \(action\): too many positional arguments"),
        (
            "Wants",
            r"must be called without arguments \(environment.args has none\): missing a required argument: 'what'",
        ),
        ("number", "is neither a class nor a function but 3"),
        ("Nothing", "has no 'Nothing'"),
    ],
)
def test_what_is_no_environment_is_refused_before_anything_starts(path, name, words):
    with pytest.raises(PlanRefused, match=words):
        find_environment(f"{path}:{name}")


def class_of(path, name):
    return load_object(f"{path}:{name}")


KEEPS_NOT = """
import random
from offbeat_trainer import Feedback

class Fine:
    def reset(self, prompt, seed):
        self.draws = random.Random(seed)
        return [1, 2]
    def step(self, action):
        return Feedback(observation=f"{self.draws.random()}", reward=1, done=action.text == "end")

class Shares(Fine):
    seen = []
    def step(self, action):
        self.seen.append(action.text)
        return Feedback(observation=str(len(self.seen)))

class Dice(Fine):
    def step(self, action):
        return Feedback(reward=random.random())

class Says(Fine):
    def reset(self, prompt, seed):
        return [{"content": "no role"}]

class Unsendable(Fine):
    def step(self, action):
        return Feedback(parts={"f": lambda: 1})

class Nothing(Fine):
    def step(self, action):
        return None

one = Fine()
def same(): return one
"""


async def test_an_environment_that_keeps_its_promises_passes(tmp_path):
    (tmp_path / "keeps.py").write_text(KEEPS_NOT)
    told = await check_environment(
        class_of(tmp_path / "keeps.py", "Fine"), prompt("a"), ["x", "end", "never"]
    )
    assert [one.done for one in told] == [False, True]
    calculator = class_of(EXAMPLES / "calculator.py", "Calculator")
    asked = Prompt(uid="a", text="47*86+29=", token_ids=(1,), data={"answer": "4071"})
    told = await check_environment(
        calculator, asked, ["47*86", "4042+29", "four", "__import__('os')", ":4071"]
    )
    assert [one.observation for one in told] == ["4042;", "4071;", "????;", "????;", ""]
    assert (told[-1].reward, told[-1].correct, told[-1].done) == (1.0, True, True)


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("Shares", AssertionError, "the same prompt, seed and actions gave"),
        ("Dice", AssertionError, "the same prompt, seed and actions gave"),
        ("Says", AssertionError, "an observation is text, token ids, or messages"),
        ("Unsendable", AssertionError, "cannot be sent to another process"),
        ("Nothing", EnvironmentFailed, "`step` returned None"),
        ("same", AssertionError, "an instance of its own, and `make` gave one twice"),
    ],
)
async def test_one_that_does_not_is_told_which(tmp_path, name, error, words):
    (tmp_path / "keeps.py").write_text(KEEPS_NOT)
    with pytest.raises(error, match=words):
        await check_environment(class_of(tmp_path / "keeps.py", name), prompt("a"), ["x", "y"])
