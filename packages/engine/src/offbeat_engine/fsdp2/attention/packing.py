"""How the micro-batches of `toolkit.hf.layouts` are arranged for Hugging Face models: packed rows, padded rows, slices of ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn import functional

from offbeat_engine.errors import ConfigError
from offbeat_engine.fsdp2.attention.packed import padded_length
from offbeat_engine.toolkit.hf import layouts
from offbeat_engine.toolkit.hf.layouts import KEY

if TYPE_CHECKING:
    from offbeat_engine.batch import TrainBatch
    from offbeat_engine.fsdp2.attention.packed import PlanRows
    from offbeat_engine.toolkit.hf.layouts import Layout, MakeInputs
    from offbeat_engine.toolkit.world import SubGroup

# Prefixes are shared where that saves at least this part of the tokens.
MIN_SHARED = 0.05

# b = sequences of the micro-batch, T = tokens of its longest, N = tokens fed, M = tokens asked for.


def lay_out(
    batch: TrainBatch | None, make_inputs: MakeInputs, device: torch.device, peers: SubGroup | None = None
) -> Layout:
    """As `layouts.lay_out`; given `peers`, this rank's slice: it feeds its tokens and answers what is asked for there.

    `Layout.counts_P` says how many answers each peer gives then; `place_M` is still the place of all of them.
    """
    if isinstance(make_inputs, RowInputs) and batch is not None and KEY in batch:
        make_inputs = replace(make_inputs, told=batch[KEY])
    return layouts.lay_out(
        batch, make_inputs, device, None if peers is None else partial(_slice, peers=peers), experts=True
    )


def _slice(layout: Layout, peers: SubGroup) -> Layout:
    """Cut a packed row among `peers`, padded to equal slices; return this rank's.

    Each token keeps its position in its own sequence. The slices' answers, one rank after the other, are in the
    order of the whole layout, because a packed row is laid out in that order.
    """
    inputs = dict(layout.model_inputs)
    plan, ids_1N = inputs.get("packed"), inputs["input_ids"]
    if plan is None:
        raise ConfigError("sequence parallelism cuts packed rows only; set `packing: true`")
    assert isinstance(ids_1N, torch.Tensor)
    num_tokens = ids_1N.shape[1]
    padding = padded_length(num_tokens, peers.size) - num_tokens
    share = (num_tokens + padding) // peers.size
    start = peers.rank * share
    for name in ("input_ids", "position_ids"):
        row_1N = inputs[name]
        assert isinstance(row_1N, torch.Tensor)
        inputs[name] = functional.pad(row_1N, (0, padding))[:, start : start + share]
    owner_M = layout.select_M // share
    mine_M = owner_M == peers.rank
    temperature_M, experts_NK = layout.temperature_M, layout.experts_NK
    if experts_NK is not None:
        experts_NK = functional.pad(experts_NK, (0, 0, 0, padding), value=-1)[start : start + share]
    if layout.top_ids_MK is not None:
        raise ConfigError(
            "`top_ids` under sequence parallelism are not there; set `sequence_parallel_size: 1`"
        )
    return replace(
        layout,
        experts_NK=experts_NK,
        model_inputs={**inputs, "packed": replace(cast("Any", plan), peers=peers)},
        select_M=layout.select_M[mine_M] - start,
        targets_M=layout.targets_M[mine_M],
        temperature_M=None if temperature_M is None else temperature_M[mine_M],
        counts_P=tuple(map(int, owner_M.bincount(minlength=peers.size).tolist())),
    )


@dataclass(frozen=True, slots=True)
class RowInputs:
    """One row of all fed tokens, with a plan of attention: a `MakeInputs`.

    With `share` a prefix that several sequences have in common lies in it once. What a causal model makes of a token
    depends on the tokens before it alone. So the prompt of a group of completions is computed once, its keys and values
    are looked up by each of them, and its gradient is the sum over all. With `told` [b, T, K], tokens of which different things are told
    are different tokens.
    """

    plan: PlanRows
    share: bool = False
    told: torch.Tensor | None = None

    def __call__(
        self, ids_bT: torch.Tensor, fed_bT: torch.Tensor, device: torch.device
    ) -> tuple[dict[str, object], torch.Tensor]:
        """Lay out the row; see `MakeInputs`."""
        query_bT, owner_bT = fed_bT, None
        if self.share:
            words = [ids_bT[..., None]] if self.told is None else [ids_bT[..., None], self.told + 1]
            found_query_bT, found_owner_bT = _owners(torch.cat(words, -1), fed_bT)
            if int(found_query_bT.sum()) <= (1 - MIN_SHARED) * int(fed_bT.sum()):
                query_bT, owner_bT = found_query_bT, found_owner_bT
        row_N, position_N = query_bT.nonzero(as_tuple=True)
        where_bT = torch.zeros_like(ids_bT)
        where_bT[row_N, position_N] = torch.arange(len(row_N), device=ids_bT.device)
        if owner_bT is not None:
            where_bT = where_bT.gather(0, owner_bT)
        lengths_b = fed_bT.sum(1)
        rows_S = lengths_b.nonzero().squeeze(1)
        lengths = [int(length) for length in lengths_b[rows_S].tolist()]
        inputs: dict[str, object] = {
            "input_ids": ids_bT[row_N, position_N][None].to(device, non_blocking=True),
            "position_ids": position_N[None].to(device, non_blocking=True),
            "packed": self.plan(where_bT[rows_S].cpu(), query_bT[rows_S].cpu(), lengths, device),
        }
        return inputs, where_bT


def _owners(words_bTW: torch.Tensor, fed_bT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which fed tokens must be computed, bool, and for each fed token the row that computes it, int64.

    A token is as many numbers >= 0 as say all that is known of it.

    In the order of a dictionary, what two sequences have in common in their prefix they have in common with all
    between them: comparing neighbours finds everything.
    """
    lengths = fed_bT.sum(1).tolist()
    words = words_bTW.cpu().numpy().astype(">i8")  # big-endian: bytes of numbers >= 0 sort as the numbers do
    order = sorted(range(len(words)), key=lambda row: words[row, : lengths[row]].tobytes())
    order_b = torch.tensor(order, device=words_bTW.device)
    words_bTW, fed_bT = words_bTW[order_b], fed_bT[order_b]
    same_bT = torch.zeros_like(fed_bT)
    same_bT[1:] = (words_bTW[1:] == words_bTW[:-1]).all(-1) & fed_bT[1:] & fed_bT[:-1]
    query_bT = fed_bT & ~same_bT.int().cumprod(1).bool()
    place_b1 = torch.arange(len(words), device=words_bTW.device)[:, None]
    owner_bT = order_b[torch.where(query_bT, place_b1, 0).cummax(0).values]
    back_b = order_b.argsort()
    return query_bT[back_b], owner_bT[back_b]


def padded_inputs(
    ids_bT: torch.Tensor, fed_bT: torch.Tensor, device: torch.device
) -> tuple[dict[str, object], torch.Tensor]:
    """Plain right-padded rows with an attention mask, for any attention; rows that feed nothing keep one token."""
    num_rows, num_fed = fed_bT.shape[0], max(1, int(fed_bT.sum(1).max()))
    mask_bT = fed_bT[:, :num_fed].clone()
    mask_bT[:, 0] = True
    ids = torch.where(mask_bT, ids_bT[:, :num_fed], 0)
    where_bT = torch.zeros_like(ids_bT)
    where_bT[:, :num_fed] = torch.arange(num_rows * num_fed, device=ids_bT.device).view(num_rows, num_fed)
    inputs = {"input_ids": ids, "attention_mask": mask_bT}
    return {name: value.to(device, non_blocking=True) for name, value in inputs.items()}, where_bT
