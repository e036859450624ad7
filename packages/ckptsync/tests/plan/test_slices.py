from __future__ import annotations

import dataclasses
import gc
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from as_text import dumps, loads
from offbeat_ckptsync.errors import ManifestError
from offbeat_ckptsync.plan.buckets import bucket_starts, buckets_of, tensor_views
from offbeat_ckptsync.plan.cells import sent_of
from offbeat_ckptsync.plan.cutting import cut_offer, prepared
from offbeat_ckptsync.plan.manifest import make_manifest, manifest_of
from offbeat_ckptsync.plan.slices import CutSource, assemble, check_cut, own_buckets
from offbeat_ckptsync.seams import BucketSender
from offbeat_ckptsync.source.pipeline import send_weights
from offbeat_ckptsync.testing import DictSource, assert_same
from offbeat_ckptsync.values import Cut, Seat, SyncOffer, TensorSpec
from sliced_weights import sliced, tp_layouts, weights_of


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
    sent = sent_of(offer)
    cut = CutAll(weights, offer)
    buckets = buckets_of(offer)
    check_plan(offer, buckets)
    staged = cut.packed(buckets)
    for member, ranks in layouts.items():
        for rank, layout in ranks.items():
            seat = Seat(member=member, rank=rank, num_ranks=len(ranks))
            check_cut(offer, seat, layout)
            own = own_buckets(offer, seat, buckets)
            starts = bucket_starts(buckets)[0]
            views = tensor_views(sent, own, staged, [starts[bucket.index] for bucket in own])
            assert_same(dict(assemble(offer, layout, views)), sliced(weights, layout))
    if offer.cutting is not None:
        exact(offer, layouts, buckets)


class CutAll:
    """The cells of weights, and a slow packer."""

    def __init__(self, weights, offer):
        source = DictSource(weights)
        self.tensors = dict((source if offer.cutting is None else CutSource(source, offer)).tensors())
        self.offer = offer
        self.specs = sent_of(offer).specs
        assert manifest_of(self.tensors.items()).specs == tuple(self.specs)
        assert [self.specs[place] for place in range(len(self.specs))] == [*self.specs]
        assert list(self.specs[1:-1]) == [*self.specs][1:-1]

    def packed(self, buckets):
        starts, num_bytes = bucket_starts(buckets)
        memory = torch.zeros(num_bytes, dtype=torch.uint8)
        for bucket in buckets:
            for piece in bucket.pieces:
                tensor = self.tensors[self.specs[piece.spec_index].name]
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
        assert {parts_by_cell(offer)[piece.spec_index] for piece in bucket.pieces} == {bucket.part}


def parts_by_cell(offer):
    """The part of each cell, the slow way."""
    if offer.cutting is None:
        return [0] * len(offer.manifest.specs)
    return [cell.part for kind in offer.cutting.kind_of for cell in offer.cutting.kinds[kind]]


def exact(offer, layouts, buckets):
    """Nobody gets a cell that it does not need."""
    for member, ranks in layouts.items():
        for rank, layout in ranks.items():
            parts = offer.audiences[f"{member}/{rank}"]
            got = sum(
                torch.Size(spec.shape).numel()
                for spec, part in zip(sent_of(offer).specs, parts_by_cell(offer), strict=True)
                if part in parts
            )
            needed = set()
            for index, spec in enumerate(offer.manifest.specs):
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
    assert again.cutting is first.cutting
    assert sent_of(again) == sent_of(first)
    assert buckets_of(again) is buckets_of(first)
    assert again == first
    layouts["m"][1] = layouts["m"].pop(0) | {"norm": ()}  # a dictionary that was seen may be changed
    other = cut_offer(offer_of(weights_of(1)), {"m": {**layouts["m"], 0: {}}})
    assert other.cutting != first.cutting
    assert sent_of(other).digest != sent_of(first).digest


def test_ranks_that_need_the_same_get_the_same_parts():
    offer = cut_offer(offer_of(weights_of(1)), {name: tp_layouts(2) for name in ("a", "b", "c")})
    for rank in (0, 1):
        assert len({offer.audiences[f"{name}/{rank}"] for name in ("a", "b", "c")}) == 1
    assert offer.cutting == cut_offer(offer_of(weights_of(1)), {"a": tp_layouts(2)}).cutting


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
    (part,) = {
        part
        for spec, part in zip(sent_of(offer).specs, parts_by_cell(offer), strict=True)
        if spec.name == "norm[0:16]"
    }
    assert [key for key, parts in offer.audiences.items() if part in parts] == ["b/0"]


def test_an_offer_that_withholds_what_a_rank_needs_is_refused():
    layouts = tp_layouts(2)
    offer = cut_offer(offer_of(weights_of(1)), {"m": layouts})
    withheld = dataclasses.replace(offer, audiences={"m/0": offer.audiences["m/1"]})
    with pytest.raises(ManifestError, match=r"rank 0 of m needs .* and is not to get it"):
        check_cut(withheld, Seat(member="m"), layouts[0])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda cut: {"kind_of": cut.kind_of[:-1]}, "cut tensors of .* kinds for"),
        (lambda cut: {"kind_of": (*cut.kind_of[:-1], len(cut.kinds))}, "cut tensors of .* kinds for"),
        (lambda cut: {"kinds": tuple(kind[:-1] for kind in cut.kinds)}, "the cells of 'embed' hold"),
        (
            lambda cut: {
                "kinds": tuple(tuple(c._replace(starts=(*c.starts[:-1], 1)) for c in k) for k in cut.kinds)
            },
            r"cut tensor 'embed\[0:26,1:9\]' reaches beyond",
        ),
        (
            lambda cut: {
                "kinds": tuple(tuple(c._replace(starts=(0, *c.starts)) for c in k) for k in cut.kinds)
            },
            "is none of 'embed'",
        ),
        # As many elements as there are, some of them twice.
        (
            lambda cut: {
                "kinds": tuple(
                    tuple(c._replace(starts=k[0].starts) if c.shape == k[0].shape else c for c in k)
                    for k in cut.kinds
                )
            },
            "the cells of 'qkv' hold not each of its elements once",
        ),
    ],
)
def test_cells_that_are_not_the_tensors_are_refused(change, named):
    offer = cut_offer(offer_of(weights_of(1)), {"m": tp_layouts(2)})
    wrong = dataclasses.replace(offer, cutting=dataclasses.replace(offer.cutting, **change(offer.cutting)))
    with pytest.raises(ManifestError, match=named):
        check_cut(wrong, Seat(member="m"), tp_layouts(2)[0])


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


def test_a_cut_in_many_ways_makes_few_objects():
    """A garbage collector goes through all there are, again and again, and holds up every thread meanwhile."""
    num_tensors, num_ranks = 2000, 16
    manifest = make_manifest(
        TensorSpec(name=f"t{i}", shape=(64, 8), dtype="bfloat16") for i in range(num_tensors)
    )
    cuts = [(Cut(dim=0, start=4 * rank, length=4),) for rank in range(num_ranks)]
    layouts = {
        "m": {
            rank: dict.fromkeys((spec.name for spec in manifest.specs), cuts[rank])
            for rank in range(num_ranks)
        }
    }
    offer = SyncOffer(
        sync_id="s", version=1, manifest=manifest, bucket_bytes=1 << 16, transport="loopback", endpoint={}
    )
    before = len(gc.get_objects())
    cut = prepared(cut_offer(offer, layouts))
    text = dumps(cut)
    buckets = buckets_of(cut)
    made = len(gc.get_objects()) - before
    assert sum(len(bucket.pieces) for bucket in buckets) == len(sent_of(cut).specs) == num_tensors * num_ranks
    assert made < 2 * num_tensors, f"{made} objects for {num_tensors} tensors"
    assert len(text) < 2 * len(dumps(offer))
