from __future__ import annotations

import asyncio
import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat_ckptsync.config import SyncConfig, make_transport
from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.control.members import ControlMember, LocalMember
from offbeat_ckptsync.control.ranks import Mailbox
from offbeat_ckptsync.errors import ManifestError, SyncFailed
from offbeat_ckptsync.member.rank import Rank
from offbeat_ckptsync.member.receiver import Receiver
from offbeat_ckptsync.member.sinks import DictSink
from offbeat_ckptsync.plan.buckets import bucket_starts, plan_buckets, tensor_views
from offbeat_ckptsync.plan.cutting import cut_offer
from offbeat_ckptsync.plan.manifest import manifest_of
from offbeat_ckptsync.plan.slices import CutSource, assemble, check_cut, own_buckets
from offbeat_ckptsync.seams import BucketSender
from offbeat_ckptsync.source.pipeline import send_weights
from offbeat_ckptsync.source.publisher import LocalSource, Publisher
from offbeat_ckptsync.testing import DictSource, assert_same
from offbeat_ckptsync.threads import in_thread
from offbeat_ckptsync.values import Cut, Seat, SyncOffer
from offbeat_ckptsync.wire import dumps, loads


def weights_of(seed):
    rng = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=rng)  # noqa: E731
    embed = normal(51, 8)
    return {
        "embed": embed,
        "norm": normal(16),
        "qkv": normal(24, 16).bfloat16(),
        "o": normal(16, 24).t().contiguous().t(),
        "up": normal(40, 16),
        "down": normal(16, 40),
        "empty": torch.empty(0, 16),
        "large": normal(33, 70),
        "head": embed,
    }


def split(size, num_ranks):
    """Return start and length of each rank's share; the last ones get less, or nothing."""
    chunk = -(-size // num_ranks)
    starts = [min(rank * chunk, size) for rank in range(num_ranks)]
    return [(start, min(chunk, size - start)) for start in starts]


def tp_layouts(num_ranks):
    """Return the layouts of a tensor-parallel replica: columns, rows, a fused one of three, replicated norms."""
    layouts = {rank: {} for rank in range(num_ranks)}
    for name, size, dim in (
        ("embed", 51, 0),
        ("up", 40, 0),
        ("down", 40, 1),
        ("o", 24, 1),
        ("large", 33, 0),
        ("head", 51, 0),
    ):
        for rank, (start, length) in enumerate(split(size, num_ranks)):
            layouts[rank][name] = (Cut(dim=dim, start=start, length=length),)
    for rank, (start, length) in enumerate(split(8, num_ranks)):
        layouts[rank]["qkv"] = tuple(Cut(dim=0, start=third + start, length=length) for third in (0, 8, 16))
    return layouts


def sliced(weights, layout):
    """Slice in the plain way."""
    got = {}
    for name, tensor in weights.items():
        cuts = layout.get(name)
        if cuts is None:
            got[name] = tensor
        elif cuts:
            got[name] = torch.cat(
                [tensor.narrow(cut.dim, cut.start, cut.length) for cut in cuts], cuts[0].dim
            )
    return got


def offer_of(weights, bucket_bytes=1024):
    return SyncOffer(
        sync_id="s", version=1, manifest=manifest_of(weights.items()), bucket_bytes=bucket_bytes,
        transport="loopback", endpoint={},
    )  # fmt: skip


@st.composite
def cases(draw):
    """Draw weights, and for one or two members layouts of a few ranks that cover them."""
    shapes = draw(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=6))
    weights = {
        f"t{i}": torch.arange(torch.Size(shape).numel()).reshape(shape) + i for i, shape in enumerate(shapes)
    }
    layouts = {}
    for member in draw(st.sampled_from([("a",), ("a", "b")])):
        num_ranks = draw(st.integers(1, 4))
        ranks = {rank: {} for rank in range(num_ranks)}
        for name, tensor in weights.items():
            if tensor.dim() == 0 or draw(st.integers(0, 3)) == 0:
                continue  # replicated
            dim = draw(st.integers(0, tensor.dim() - 1))
            size = tensor.shape[dim]
            borders = sorted(
                draw(st.lists(st.integers(0, size), min_size=num_ranks - 1, max_size=num_ranks - 1))
            )
            stretches = list(itertools.pairwise([0, *borders, size]))
            for rank in ranks:
                cuts = [stretches[rank]]
                if draw(st.integers(0, 4)) == 0:
                    cuts.append(stretches[draw(st.integers(0, num_ranks - 1))])
                ranks[rank][name] = tuple(Cut(dim=dim, start=a, length=b - a) for a, b in cuts)
        layouts[member] = ranks
    return weights, layouts


@given(cases(), st.integers(256, 700))
def test_what_a_rank_puts_together_is_what_plain_slicing_gives(case, bucket_bytes):
    weights, layouts = case
    offer = cut_offer(offer_of(weights, bucket_bytes), layouts)
    assert loads(SyncOffer, dumps(offer)) == offer
    cut = CutAll(weights, offer)
    buckets = plan_buckets(offer.manifest, offer.bucket_bytes)
    check_plan(offer, buckets)
    staged = cut.packed(buckets)
    for member, ranks in layouts.items():
        for rank, layout in ranks.items():
            seat = Seat(member=member, rank=rank, num_ranks=len(ranks))
            check_cut(offer, seat, layout)
            own = own_buckets(offer, seat, buckets)
            starts = bucket_starts(buckets)[0]
            views = tensor_views(offer.manifest, own, staged, [starts[bucket.index] for bucket in own])
            assert_same(dict(assemble(offer, layout, views)), sliced(weights, layout))
    if offer.whole is not None:
        exact(offer, layouts, buckets)


class CutAll:
    """The cells of weights, and a slow packer."""

    def __init__(self, weights, offer):
        source = DictSource(weights)
        self.tensors = dict((source if offer.whole is None else CutSource(source, offer)).tensors())
        self.offer = offer
        assert (
            manifest_of(self.tensors.items()).digest
            == manifest_of(
                [
                    (spec.name, torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)))
                    for spec in offer.manifest.specs
                ]
            ).digest
        )

    def packed(self, buckets):
        starts, num_bytes = bucket_starts(buckets)
        memory = torch.zeros(num_bytes, dtype=torch.uint8)
        for bucket in buckets:
            for piece in bucket.pieces:
                tensor = self.tensors[self.offer.manifest.specs[piece.spec_index].name]
                data = tensor.contiguous().reshape(-1).view(torch.uint8)
                at = starts[bucket.index] + piece.bucket_offset
                memory[at : at + piece.num_bytes] = data[
                    piece.tensor_offset : piece.tensor_offset + piece.num_bytes
                ]
        return memory


def check_plan(offer, buckets):
    """Buckets hold one part each, do not overlap, and come in the order in which a source completes them."""
    last = [bucket.pieces[-1] for bucket in buckets]
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    order = [(piece.spec_index, piece.tensor_offset) for piece in last]
    assert order == sorted(order)
    for bucket in buckets:
        assert {offer.manifest.specs[piece.spec_index].part for piece in bucket.pieces} == {bucket.part}


def exact(offer, layouts, buckets):
    """Nobody gets a cell that it does not need."""
    for member, ranks in layouts.items():
        for rank, layout in ranks.items():
            parts = offer.audiences[f"{member}/{rank}"]
            got = sum(
                torch.Size(piece.shape).numel() for piece in offer.manifest.specs if piece.part in parts
            )
            needed = set()
            for index, spec in enumerate(offer.whole.specs):
                numbers = torch.arange(torch.Size(spec.shape).numel()).reshape(spec.shape)
                for number in (
                    sliced({spec.name: numbers}, layout).get(spec.name, torch.empty(0)).flatten().tolist()
                ):
                    needed.add((index, number))
            assert got == len(needed)


def test_tensors_are_cut_once_for_the_same_ranks_and_anew_for_others():
    layouts = {"m": tp_layouts(2)}
    first = cut_offer(offer_of(weights_of(1)), layouts)
    again = cut_offer(offer_of(weights_of(2)), {"m": tp_layouts(2)})
    assert again.manifest is first.manifest
    assert again == first
    layouts["m"][1] = layouts["m"].pop(0) | {"norm": ()}  # a dictionary that was seen may be changed
    other = cut_offer(offer_of(weights_of(1)), {"m": {**layouts["m"], 0: {}}})
    assert other.manifest != first.manifest


def test_ranks_that_need_the_same_get_the_same_parts():
    offer = cut_offer(offer_of(weights_of(1)), {name: tp_layouts(2) for name in ("a", "b", "c")})
    for rank in (0, 1):
        assert len({offer.audiences[f"{name}/{rank}"] for name in ("a", "b", "c")}) == 1
    assert offer.manifest == cut_offer(offer_of(weights_of(1)), {"a": tp_layouts(2)}).manifest


@pytest.mark.parametrize(
    ("layouts", "named"),
    [
        (
            {"m": {0: {"wrong": (Cut(dim=0, start=0, length=1),)}}},
            "rank 0 of m declares .* unknown tensor 'wrong'",
        ),
        (
            {"m": {0: {"norm": (Cut(dim=1, start=0, length=1),)}}},
            r"rank 0 of m needs .* of 'norm', whose shape is \(16,\)",
        ),
        ({"m": {0: {"norm": (Cut(dim=0, start=9, length=8),)}}}, "rank 0 of m needs"),
        ({"m": {0: {"norm": (Cut(dim=0, start=0, length=8),)}}}, r"the ranks of m leave out norm\[8:16\]"),
        (
            {"m": {0: {"up": (Cut(dim=0, start=0, length=8), Cut(dim=1, start=0, length=8))}}},
            "cuts 'up' along several dimensions",
        ),
        (
            {"m": {0: {"norm": ()}, 1: {"norm": (Cut(dim=0, start=0, length=0),)}}},
            r"the ranks of m leave out norm\[0:16\]",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_names(layouts, named):
    with pytest.raises(ManifestError, match=named):
        cut_offer(offer_of(weights_of(1)), layouts)


def test_what_every_rank_of_a_member_says_it_does_not_need_goes_to_the_others_only():
    layouts = {"a": {0: {"norm": ()}, 1: {"norm": ()}}, "b": {0: {}}}
    offer = cut_offer(offer_of(weights_of(1)), layouts)
    (part,) = {spec.part for spec in offer.manifest.specs if spec.name == "norm[0:16]"}
    assert [key for key, parts in offer.audiences.items() if part in parts] == ["b/0"]


def test_an_offer_that_withholds_what_a_rank_needs_is_refused():
    layouts = tp_layouts(2)
    offer = cut_offer(offer_of(weights_of(1)), {"m": layouts})
    withheld = dataclasses.replace(offer, audiences={"m/0": offer.audiences["m/1"]})
    with pytest.raises(ManifestError, match=r"rank 0 of m needs .* and is not to get it"):
        check_cut(withheld, Seat(member="m"), layouts[0])
    lost = dataclasses.replace(offer, cells=offer.cells[:-1])
    with pytest.raises(ManifestError, match="cells for"):
        check_cut(lost, Seat(member="m"), layouts[0])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda w: {k: t for k, t in w.items() if k != "up"},
            r"yields 'down' .* where it offered 'up\[0:20,0:16\]'",
        ),
        (
            lambda w: {**w, "up": w["up"][:30]},
            r"yields 'up' \(30, 16\) .* where it offered 'up\[0:20,0:16\]'",
        ),
        (lambda w: {k: t for k, t in w.items() if k != "head"}, r"ended before 'head\[0:26,0:8\]'"),
        (lambda w: {**w, "extra": torch.ones(1)}, "yields 'extra' after"),
    ],
)
def test_a_source_that_yields_other_than_it_offers_is_found(change, named):
    offer = cut_offer(offer_of(weights_of(1)), {"m": tp_layouts(2)})
    offer.endpoint["timeout_s"] = 60.0
    source = DictSource(change(weights_of(1)))

    class Drop(BucketSender):
        def send(self, bucket, payload):
            pass

        def close(self):
            pass

    with pytest.raises(ManifestError, match=named):
        send_weights(CutSource(source, offer), offer, Drop)
    assert source.walks == 1


class Replica:
    """A tensor-parallel replica whose ranks are workers in this process."""

    def __init__(self, layouts, expected):
        self.layouts = layouts
        self.sinks = [DictSink(expected, layout) for layout in layouts.values()]
        self.workers = [
            Rank(sink, rank=rank, num_ranks=len(self.sinks)) for rank, sink in enumerate(self.sinks)
        ]

    async def control(self, op, payload):
        if op == "update":
            for worker in self.workers:
                await in_thread(lambda worker=worker: worker.handle(payload), name="rank")

    def close(self):
        for worker in self.workers:
            worker.close()


class Site:
    """A source, a manager and members."""

    def __init__(self, transport, folder):
        self.config = SyncConfig(transport=transport, bucket_mib=1024 / (1 << 20), disk_path=str(folder))
        self.source = DictSource(weights_of(1))
        self.publisher = Publisher(self.source, self.config)
        self.manager = CheckpointEngineManager(LocalSource(self.publisher), self.config)
        self.expected = manifest_of(self.source.weights.items())
        self.replicas, self.sinks, self.closing = {}, {}, []

    def replica(self, name, layouts):
        self.replicas[name] = Replica(layouts, self.expected)
        return ControlMember(name, self.replicas[name].control, mailbox=Mailbox(), config=self.config)

    def local(self, name, layout=None):
        self.sinks[name] = DictSink(self.expected, layout)
        self.closing.append(make_transport(self.config.transport, self.config))
        return LocalMember(Receiver(Seat(member=name), self.sinks[name]), self.closing[-1])

    def check(self):
        for replica in self.replicas.values():
            for sink, layout in zip(replica.sinks, replica.layouts.values(), strict=True):
                assert_same(sink.weights, sliced(self.source.weights, layout))
        for sink in self.sinks.values():
            assert_same(sink.weights, self.source.weights)

    async def sync(self, version):
        self.source.weights = weights_of(version)
        report = await self.manager.sync(version)
        self.check()
        return report

    def close(self):
        for each in [*self.replicas.values(), *self.closing, self.publisher]:
            each.close()


@pytest.fixture(params=["loopback", "shm", "broadcast", "disk", "auto"])
def site(request, tmp_path):
    made = Site(request.param, tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("num_ranks", [2, 4])
async def test_each_rank_of_a_tensor_parallel_replica_takes_its_slices(site, num_ranks):
    site.manager.add(site.replica("tp", tp_layouts(num_ranks)))
    labels = set()
    for version in (1, 2, 3):
        report = await site.sync(version)
        labels.add(report.content_digest)
        assert sorted(report.rank_bytes) == [f"tp/{rank}" for rank in range(num_ranks)]
        assert max(report.rank_bytes.values()) < 0.75 * report.num_bytes
    assert len(labels) == 3


async def test_members_of_other_degrees_take_one_sync_and_one_label(site):
    site.manager.add(site.replica("two", tp_layouts(2)))
    site.manager.add(site.local("whole"))
    site.manager.add(site.replica("three", tp_layouts(3)))
    for version in (1, 2):
        report = await site.sync(version)
        assert report.rank_bytes["whole/0"] == report.num_bytes
    await site.manager.catch_up(site.replica("four", tp_layouts(4)))
    site.check()
    await site.manager.catch_up(site.local("late"))
    site.check()
    await site.sync(3)


async def test_a_replica_whose_ranks_leave_something_out_is_refused_and_the_old_weights_stay(site):
    site.manager.add(site.replica("tp", tp_layouts(2)))
    await site.sync(1)
    layouts = tp_layouts(2)
    layouts[1]["down"] = (Cut(dim=1, start=21, length=19),)
    hole = site.replica("hole", layouts)
    site.replicas.pop("hole").close()
    with pytest.raises(SyncFailed, match=r"the ranks of hole leave out down\[0:16,20:21\]"):
        await site.manager.catch_up(hole)
    site.check()
    await site.sync(2)


class GivesAll:
    """A transport that knows nothing of audiences: every rank is sent every bucket."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def sender(self, offer, members):
        return self.inner.sender(dataclasses.replace(offer, whole=None), members)

    def receiver(self, offer, seat):
        inner = self.inner.receiver(dataclasses.replace(offer, whole=None), seat)

        class Plain:
            picks, receive_delta = False, inner.receive_delta
            lend, receive, close = inner.lend, inner.receive, inner.close
            told, wire_bytes = inner.told, inner.wire_bytes
            start, in_flight = inner.start, inner.in_flight

        return Plain()


async def test_a_transport_that_gives_every_rank_everything_serves_slices_too(monkeypatch):
    monkeypatch.setattr(
        "offbeat_ckptsync.member.rank.make_transport", lambda *given: GivesAll(make_transport(*given))
    )
    site = Site("loopback", "")
    site.publisher._transport = GivesAll(site.publisher._transport)
    site.manager.add(site.replica("tp", tp_layouts(2)))
    for version in (1, 2):
        report = await site.sync(version)
        assert max(report.rank_bytes.values()) < 0.75 * report.num_bytes
    site.close()


def test_one_rank_of_several_members_is_asked_once():
    site = Site("loopback", "")
    replica = site.replica("tp", tp_layouts(2))
    first = asyncio.run(replica.layouts())
    assert first == [*tp_layouts(2).values()]
    site.replicas["tp"].layouts = {}
    assert asyncio.run(replica.layouts()) is first
    site.close()
