"""Several ranks of one source, each of which hands what it gathered to the receiving ranks beside it."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.control.members import ControlMember, LocalMember
from offbeat_ckptsync.control.ranks import Mailbox
from offbeat_ckptsync.control.source_ranks import PASS, SourceRanks, _by_machine
from offbeat_ckptsync.ends.rank import Rank
from offbeat_ckptsync.ends.receiver import Receiver
from offbeat_ckptsync.ends.sender import Sender
from offbeat_ckptsync.ends.sinks import DictSink
from offbeat_ckptsync.errors import SyncFailed
from offbeat_ckptsync.seams import NO_TRAFFIC
from offbeat_ckptsync.testing import DictSource, assert_same, awkward_weights
from offbeat_ckptsync.toolkit.config import SyncConfig, make_transport
from offbeat_ckptsync.toolkit.ops import SENDER_OPS, answer_blocking, failure
from offbeat_ckptsync.transports import auto
from offbeat_ckptsync.transports.rendezvous import here
from offbeat_ckptsync.values import RankId

TIMEOUT_S = 600.0
BESIDE = {"alone": [0], "pair": [1, 2]}  # and nobody is beside rank 3


class GatheringSource(DictSource):
    """Gives those that send a tensor when all ranks ask for it, as gathering does; a rank that dies breaks the others' waits."""

    def __init__(self, weights, together, rank):
        super().__init__(weights)
        self.together = together
        self.rank = rank
        self.dies_at = None
        self.given = 0

    def tensors_on(self, senders):
        for number, (name, tensor) in enumerate(self.weights.items()):
            if number == self.dies_at:
                self.dies_at = None
                self.together.abort()
                raise ConnectionError("planted: this rank is lost")
            self.together.wait(TIMEOUT_S)
            self.given += self.rank in senders
            yield name, tensor if self.rank in senders else None
        self.walks += 1


class Ranks:
    """Four sending ranks, a member of one rank and a member of two, in this process; `met` says who was sent to by whom."""

    def __init__(self, transport, folder):
        config = SyncConfig(transport=transport, bucket_mib=4096 / (1 << 20), disk_path=str(folder))
        self.met = {}
        self.together = threading.Barrier(4)
        self.sources = [GatheringSource(awkward_weights(1), self.together, rank) for rank in range(4)]
        self.senders = [
            Sender(source, config, transport=self._noting(rank, make_transport(transport, config)))
            for rank, source in enumerate(self.sources)
        ]
        self.manager = CheckpointEngineManager(SourceRanks(self.ask, 4, BESIDE.__getitem__), config)
        self.sink, self.parts = DictSink(), [DictSink(), DictSink()]
        self.receiver = Receiver(RankId(member="alone"), self.sink)
        self.manager.add(LocalMember(self.receiver, make_transport(transport, config), gate=NO_TRAFFIC))
        self.workers = [Rank(sink, rank=rank, num_ranks=2) for rank, sink in enumerate(self.parts)]
        self.manager.add(
            ControlMember("pair", self.control, mailbox=Mailbox(), config=config, gate=NO_TRAFFIC)
        )

    def _noting(self, rank, transport):
        sender = transport.sender

        def noting(offer, members):
            self.met[rank] = members
            return sender(offer, members)

        transport.sender = noting
        return transport

    async def ask(self, op, requests):
        def one(rank):
            own, request = op, requests[rank]
            if op == PASS:
                own, request = request["op"], request["request"]
            try:
                return {"ok": answer_blocking(self.senders[rank], SENDER_OPS, own, request)}
            except Exception as error:  # noqa: BLE001 -- told, as a carrier does
                return failure(error)

        with ThreadPoolExecutor(4) as pool:
            loop = asyncio.get_running_loop()
            outcomes = [loop.run_in_executor(pool, one, rank) for rank in requests]
            return dict(zip(requests, await asyncio.gather(*outcomes), strict=True))

    async def control(self, op, payload):
        if op == "update":
            answers = [asyncio.to_thread(worker.handle, payload) for worker in self.workers]
            for answer in await asyncio.gather(*answers, return_exceptions=True):
                if isinstance(answer, Exception):
                    raise answer

    def take(self, seed):
        for source in self.sources:
            source.weights = awkward_weights(seed)

    def require_serving(self, version):
        """All ranks serve the weights of this version, under one label."""
        want = awkward_weights(version)
        assert_same(self.sink.weights, want)
        for sink in self.parts:
            assert_same(sink.weights, want)
        statuses = [self.receiver.status(), *(worker.status() for worker in self.workers)]
        assert [status.version for status in statuses] == [version] * 3
        assert len({status.label for status in statuses}) == 1

    def close(self):
        for end in (*self.senders, *self.workers):
            end.close()


@pytest.fixture(params=["shm", "auto", "broadcast", "disk"])
def ranks(request, tmp_path):
    made = Ranks(request.param, tmp_path)
    yield made
    made.close()


async def test_each_rank_sends_to_those_beside_it_alone_and_all_agree(ranks):
    for version in (1, 2, 3):
        ranks.take(version)
        ranks.met.clear()
        report = await ranks.manager.sync(version)
        assert ranks.met == {0: ["alone/0"], 1: ["pair/0"], 2: ["pair/1"]}
        assert report.why.endswith("rank 0 to alone/0; rank 1 to pair/0; rank 2 to pair/1")
        ranks.require_serving(version)
    assert [source.walks for source in ranks.sources] == [3] * 4
    each = 3 * len(ranks.sources[0].weights)
    assert [source.given for source in ranks.sources] == [each, each, each, 0], (
        "nothing comes to who sends nothing"
    )
    assert report.rank_bytes == dict.fromkeys(("alone/0", "pair/0", "pair/1"), report.num_bytes)


async def test_all_ranks_train_on_once_each_has_copied_out_what_it_sends(ranks):
    def train():
        for tensor in (tensor for source in ranks.sources for tensor in source.weights.values()):
            tensor.zero_()

    for version in (1, 2):
        ranks.take(version)
        await ranks.manager.sync(version, gathered=train)
        assert not any(source.weights["half"].any() for source in ranks.sources)
        ranks.require_serving(version)
    assert [source.walks for source in ranks.sources] == [2] * 4


async def test_where_one_rank_is_lost_all_serve_the_old_version_and_the_next_sync_is_good(ranks):
    await ranks.manager.sync(1)
    for lost in (0, 2, 3):
        ranks.take(2)
        ranks.sources[lost].dies_at = 5
        with pytest.raises(SyncFailed, match=r"this rank is lost|BrokenBarrier"):
            await ranks.manager.sync(2)
        ranks.require_serving(1)
        ranks.together.reset()
    await ranks.manager.sync(2)
    ranks.require_serving(2)


async def test_ranks_that_gathered_different_weights_change_nobody_over(ranks):
    await ranks.manager.sync(1)
    ranks.take(2)
    ranks.sources[1].weights["half"] = awkward_weights(3)["half"]
    told = r"ranks 0 and 1 of the source hold different weights: bucket \d+ .* it holds .*half"
    with pytest.raises(SyncFailed, match=told):
        await ranks.manager.sync(2)
    ranks.require_serving(1)
    ranks.take(2)
    await ranks.manager.sync(2)
    ranks.require_serving(2)


async def test_a_rank_that_nobody_is_beside_refuses_the_offer(ranks, monkeypatch):
    monkeypatch.setitem(BESIDE, "pair", [1])
    with pytest.raises(
        SyncFailed, match="rank 1 of pair has no sender: those of this sync are for alone/0, pair/0"
    ):
        await ranks.manager.sync(1)


async def test_a_member_that_left_is_sent_nothing_and_its_rank_walks(ranks):
    await ranks.manager.sync(1)
    ranks.manager.remove("alone")
    ranks.take(2)
    ranks.met.clear()
    await ranks.manager.sync(2)
    assert ranks.met == {1: ["pair/0"], 2: ["pair/1"]}
    assert [worker.status().version for worker in ranks.workers] == [2, 2]
    assert [source.walks for source in ranks.sources] == [2] * 4


async def test_where_one_gpu_has_no_room_one_rank_of_each_machine_sends_through_host_memory(
    tmp_path, monkeypatch
):
    def on_gpu(device):  # senders, and the receiving ranks, which see room enough
        free_bytes = 10 if device == "cuda:2" else 1 << 40
        return dataclasses.replace(here("cpu"), gpu="that of both", free_bytes=free_bytes)

    monkeypatch.setattr(auto, "here", on_gpu)
    ranks = Ranks("auto", tmp_path)
    for rank, sender in enumerate(ranks.senders[:3]):
        sender._transport._device = f"cuda:{rank}"
    report = await ranks.manager.sync(1)
    assert report.transport == "shm"
    assert ranks.met == {0: ["alone/0", "pair/0", "pair/1"]}
    ranks.require_serving(1)
    ranks.close()


def test_several_machines_have_a_sender_each():
    endpoints = {rank: {"machine": f"node {rank // 2}"} for rank in range(4)}
    shares = {rank: [f"replica {rank}/0"] for rank in (0, 1, 3)}
    assert _by_machine(shares, endpoints) == {0: ["replica 0/0", "replica 1/0"], 3: ["replica 3/0"]}
