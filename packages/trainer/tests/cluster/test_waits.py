"""What becomes of Ray's own exceptions; no cluster is started."""

import asyncio

import pytest
import torch

from offbeat_engine import BatchError
from offbeat_trainer.errors import DeadlineExceeded, WorkerGone

ASK = {"what": "train", "timeout_s": 600.0}


@pytest.fixture
def waits():
    from offbeat_trainer.cluster import waits

    return waits


def over_there(cause):
    """Return `cause` the way Ray hands it over: an exception of a class made of its own and the cause's."""
    from ray import exceptions

    return exceptions.RayTaskError("update", "a page of traceback", cause).as_instanceof_cause()


def died():
    from ray import exceptions

    return exceptions.ActorDiedError()


async def fails(error, after_s=0.0):
    await asyncio.sleep(after_s)
    raise error


async def says(value, after_s=0.0):
    await asyncio.sleep(after_s)
    return value


async def test_answers_come_in_the_order_of_their_owners(waits):
    calls = [says("a", 0.02), says("b")]
    assert await waits.answers(calls, owners=["rank 0", "rank 1"], **ASK) == ["a", "b"]


@pytest.mark.parametrize(
    "cause", [BatchError("no lengths"), TimeoutError("no peer"), ConnectionError("closed"), KeyError("k")]
)
async def test_an_error_comes_back_as_itself_with_a_note_of_where(waits, cause):
    with pytest.raises(type(cause)) as caught:
        await waits.answer(fails(over_there(cause)), owner="rank 1", **ASK)
    assert caught.value is cause
    assert "(rank 1, train)" in cause.__notes__


async def test_an_error_in_a_file_of_the_users_names_the_file_and_the_line(waits, tmp_path):
    from ray import exceptions

    own = tmp_path / "offbeat_experiments" / "kl.py"
    trace = f'File "{waits.__file__}", line 3, in do\n  File "{own}", line 34, in learn\n  File "{torch.__file__}", line 5, in add\n'
    error = exceptions.RayTaskError("do", trace, TypeError("no key")).as_instanceof_cause()
    with pytest.raises(TypeError) as caught:
        await waits.answer(fails(error), owner="rank 1", **ASK)
    assert caught.value.__notes__ == [f"(rank 1, train, at {own}:34)"]


async def test_a_missing_answer_names_who_what_and_how_long(waits):
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.05 s for rank 1 to train and got no answer"):
        await waits.answer(asyncio.Event().wait(), owner="rank 1", what="train", timeout_s=0.05)


async def test_a_dead_process_is_named(waits):
    with pytest.raises(WorkerGone, match="rank 1 died while it should train"):
        await waits.answer(fails(died()), owner="rank 1", **ASK)


async def test_a_process_that_could_not_begin_is_told_with_what_it_raised(waits):
    from ray import exceptions

    full = OSError(28, "No space left on device", "/full/logs/replica0.log")
    raised = exceptions.RayTaskError("ReplicaWorker.__init__", f"a page of traceback\n{full}", full)
    with pytest.raises(
        WorkerGone, match=r"\(\[Errno 28\] No space left on device: '/full/logs/replica0\.log'\)$"
    ):
        await waits.answer(fails(exceptions.ActorDiedError(raised)), owner="replica 0", **ASK)


async def test_a_death_comes_before_what_its_peers_saw_of_it(waits):
    broken = over_there(RuntimeError("Connection closed by peer"))
    calls = [fails(broken), fails(died(), 0.05), says("fine")]
    with pytest.raises(WorkerGone, match="rank 1 died"):
        await waits.answers(calls, owners=["rank 0", "rank 1", "rank 2"], **ASK)


async def test_the_others_are_given_up_soon_after_a_failure(waits, monkeypatch):
    monkeypatch.setattr(waits, "GRACE_S", 0.05)
    given_up = asyncio.Event()

    async def stuck():
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    calls = [stuck(), fails(over_there(BatchError("no lengths")))]
    with pytest.raises(BatchError, match="no lengths"):
        await asyncio.wait_for(waits.answers(calls, owners=["rank 0", "rank 1"], **ASK), 600.0)
    assert given_up.is_set()


@pytest.mark.parametrize("name", ["hf", "sglang", "vllm"])
def test_a_replica_that_stops_is_waited_for_longer_than_its_engine_takes(name):
    from offbeat_rollout.toolkit.registry import adapter_class
    from offbeat_trainer.cluster.rollout_group import stop_limit_s

    assert stop_limit_s(name) > adapter_class(name).stop_timeout_s
