"""Members in processes of their own, over gloo: the way the trainer drives replicas."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import multiprocessing as mp

import pytest

from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.control.members import ControlMember
from offbeat_ckptsync.control.ranks import Mailbox
from offbeat_ckptsync.ends.sender import LocalSource, Sender
from offbeat_ckptsync.errors import SyncFailed, TransferError
from offbeat_ckptsync.seams import GenerationGate
from offbeat_ckptsync.testing import DictSource, awkward_weights, prints_of
from offbeat_ckptsync.toolkit.config import SyncConfig
from offbeat_ckptsync.toolkit.store import Store
from offbeat_ckptsync.toolkit.threads import in_thread
from sync_faults.ranks import serve_rank

pytestmark = pytest.mark.spawns

CONFIG = SyncConfig(bucket_mib=4096 / (1 << 20))


class Replica(GenerationGate):
    """An engine with several ranks behind `control`; like vLLM it keeps a session and answers nothing."""

    def __init__(self, num_ranks):
        context = mp.get_context("forkserver")  # which has loaded torch, once for all of them
        context.set_forkserver_preload(["offbeat_ckptsync.testing"])
        pairs = [context.Pipe() for _ in range(num_ranks)]
        self.pipes = [near for near, _ in pairs]
        self.processes = [
            context.Process(target=serve_rank, args=(far, rank, num_ranks), daemon=True)
            for rank, (_, far) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()
        for pipe in self.pipes:
            assert pipe.poll(600), "a worker process did not start within 600 s"
            assert pipe.recv_bytes() == b"ready"
        self.active = False
        self.paused = 0
        self.label = "0"

    async def control(self, op, payload):
        match op:
            case "start":
                if self.active:
                    raise RuntimeError("session already open")
                self.active = True
            case "update":
                failures = [text for text in await self.ask(json.dumps(payload).encode()) if text]
                if failures:
                    self.active = False
                    raise RuntimeError(failures[0].decode())
            case "finish":
                self.active = False
                self.label = payload.get("version", self.label)

    async def ask(self, message):
        for pipe in self.pipes:
            pipe.send_bytes(message)
        return [await in_thread(pipe.recv_bytes, name="ask") for pipe in self.pipes]

    async def serving(self):
        return [json.loads(text) for text in await self.ask(b"serving")]

    async def pause(self):
        self.paused += 1

    async def resume(self):
        self.paused -= 1

    def close(self):
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send_bytes(b"end")
            process.join(120)
            pipe.close()


@pytest.fixture(scope="module")
def replicas():
    made = {"one": Replica(1), "two": Replica(2)}
    yield made
    for replica in made.values():
        replica.close()


@pytest.fixture(scope="module")
def local(replicas):
    source = DictSource(awkward_weights(1))
    sender = Sender(source, CONFIG)
    manager = CheckpointEngineManager(LocalSource(sender), CONFIG)
    mailbox = Mailbox()
    for name, replica in replicas.items():
        manager.add(ControlMember(name, replica.control, mailbox=mailbox, config=CONFIG, gate=replica))
    yield source, manager
    sender.close()


async def test_two_replicas_of_one_and_two_ranks_take_three_versions(local, replicas):
    source, manager = local
    for version in (1, 2, 3):
        source.weights = awkward_weights(version)
        report = await manager.sync(version)
        assert set(report.members) == {"one", "two"}
        for replica in replicas.values():
            assert await replica.serving() == [[version, prints_of(source.weights)]] * len(replica.pipes)
            assert (replica.label, replica.paused, replica.active) == (version, 0, False)


async def test_a_replica_that_joins_between_syncs_takes_the_next(local, replicas):
    source, manager = local
    third = Replica(2)
    manager.enlist(ControlMember("third", third.control, mailbox=Mailbox(), config=CONFIG, gate=third))
    for version in (4, 5, 6, 7):
        source.weights = awkward_weights(version)
        report = await manager.sync(version)
        assert set(report.members) == {"one", "two", "third"}
        for replica in (*replicas.values(), third):
            assert await replica.serving() == [[version, prints_of(source.weights)]] * len(replica.pipes)
    manager.remove("third")
    third.close()


async def test_a_refusal_comes_back_with_its_names_from_every_kind_of_replica(local, replicas):
    source, manager = local
    kept = source.weights
    source.weights = {name.replace("mask", "masque"): tensor for name, tensor in awkward_weights(8).items()}
    with pytest.raises(SyncFailed, match=r"begin: .*unknown tensor 'masque'") as caught:
        await manager.sync(8)
    assert caught.value.served == {"one": 7, "two": 7}
    assert await replicas["two"].serving() == [[7, prints_of(kept)]] * 2
    source.weights = awkward_weights(8)
    await manager.sync(8)
    assert await replicas["two"].serving() == [[8, prints_of(awkward_weights(8))]] * 2


async def test_a_session_that_a_dead_manager_left_open_is_taken_over(local, replicas):
    source, manager = local
    await replicas["one"].control("start", {})
    source.weights = awkward_weights(9)
    await manager.sync(9)
    assert replicas["one"].active is False


@pytest.mark.parametrize("silent", ["fail", "fence"])
async def test_a_replica_that_is_killed_is_named_and_the_others_live_on(local, replicas, silent):
    source, manager = local
    version = (manager.version or 0) + 1
    third = Replica(1)
    source.weights = awkward_weights(version)
    await manager.sync(version)
    await manager.catch_up(
        ControlMember("third", third.control, mailbox=Mailbox(), config=CONFIG, gate=third)
    )
    third.processes[0].kill()
    third.processes[0].join(120)
    source.weights = awkward_weights(version + 1)
    manager._config = dataclasses.replace(CONFIG, silent=silent)
    if silent == "fail":
        with pytest.raises(SyncFailed, match="third") as caught:
            await manager.sync(version + 1)
        assert caught.value.served == {"one": version, "two": version}
        manager.remove("third")
        await manager.sync(version + 1)
    else:
        report = await manager.sync(version + 1)
        assert (sorted(report.members), [*report.fenced]) == (["one", "two"], ["third"])
        assert "did not say what it serves" in report.fenced["third"]
    assert await replicas["one"].serving() == [[version + 1, prints_of(awkward_weights(version + 1))]]
    manager._config = CONFIG
    third.close()


async def test_a_mailbox_names_the_rank_that_is_silent():
    mailbox = Mailbox()
    post = Store.join(str(mailbox.address["host"]), int(str(mailbox.address["port"])), 60)
    post.set("k/0", json.dumps({"num_ranks": 2}))
    with pytest.raises(TransferError, match=r"rank 1 of vllm did not answer within 0\.2 s"):
        await mailbox.read("k", who="vllm", timeout_s=0.2)
    waiting = asyncio.create_task(mailbox.read("k2", who="vllm", timeout_s=60), name="read")
    await asyncio.sleep(0.05)
    post.set("k2/0", json.dumps({"num_ranks": 1, "x": 1}))
    assert await waiting == [{"num_ranks": 1, "x": 1}]


async def test_a_rank_that_refuses_is_heard_though_one_before_it_hangs():
    mailbox = Mailbox()
    post = Store.join(str(mailbox.address["host"]), int(str(mailbox.address["port"])), 60)
    refusal = {"error": {"type": "ManifestError", "message": "no"}, "num_ranks": 3}
    post.set("k/2", json.dumps(refusal))
    assert await mailbox.read("k", who="vllm", timeout_s=300, num_ranks=3) == [refusal]
    post.set("k/2", json.dumps(refusal))
    with pytest.raises(TransferError, match=r"ranks 0, 1 of vllm did not answer within 0\.2 s"):
        await mailbox.read("k", who="vllm", timeout_s=0.2, num_ranks=3, hear_all=True)


class Counted(Replica):
    """Writes down the calls it gets, those of its gate among them."""

    def __init__(self, num_ranks):
        super().__init__(num_ranks)
        self.calls = []

    async def control(self, op, payload):
        self.calls.append(payload.get("op", op))
        await super().control(op, payload)

    async def pause(self):
        self.calls.append("pause")
        await super().pause()

    async def resume(self):
        self.calls.append("resume")
        await super().resume()


async def test_a_sync_makes_six_calls_of_an_engine_and_the_next_one_tells_its_ranks_of_the_commit():
    replica = Counted(2)
    source = DictSource(awkward_weights(1))
    sender = Sender(source, CONFIG)
    manager = CheckpointEngineManager(LocalSource(sender), CONFIG)
    member = ControlMember("m", replica.control, mailbox=Mailbox(), config=CONFIG, gate=replica)
    manager.add(member)
    await manager.sync(1)
    replica.calls.clear()
    await manager.sync(2)
    assert replica.calls == ["start", "begin", "pause", "flip", "finish", "resume"]
    assert (await member.status()).committed
    # Another one that drives the same engine, as after a death, finds the label of the last sync uncommitted.
    await manager.sync(3)
    other = ControlMember("m", replica.control, mailbox=Mailbox(), config=CONFIG, gate=replica)
    status = await other.status()
    assert (status.label, status.committed) == (manager.label, False)
    assert await other.commit(manager.label) == manager.label
    assert (await other.status()).committed
    sender.close()
    replica.close()
