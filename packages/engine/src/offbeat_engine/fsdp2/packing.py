"""From a micro-batch to what the model is fed: only tokens that some asked-for log-probability depends on.

The log-probability of token t comes from the hidden state at t - 1. So of each sequence the tokens before its
last position under `loss_mask` are fed, and of the hidden states only those under the mask reach the head:
prompts cost no logits, and what follows the last trained token costs nothing. Causal models cannot tell.
"""

# ruff: noqa: N815 shapes ride in names, of fields too

# torch and tensordict are typed in part: `tolist` and keyed access answer with unknown types.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch.nn import functional

from offbeat_engine.errors import ConfigError
from offbeat_engine.fsdp2.ulysses import padded_length

if TYPE_CHECKING:
    from offbeat_engine.batch import TrainBatch
    from offbeat_engine.fsdp2.attention import PlanRows
    from offbeat_engine.world import SubGroup

# Beginnings are shared where that saves at least this part of the tokens.
MIN_SHARED = 0.05

# b = sequences of the micro-batch, T = tokens of its longest, N = tokens fed, M = tokens asked for.


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One micro-batch in the form the model takes.

    `model_inputs` are keyword arguments of the Hugging Face base model; `select_M` indexes its flattened hidden
    states; `targets_M` are the tokens predicted there; `place_M` is where each answer goes in a flattened [b, T].
    A `dummy` layout asks for one answer that belongs to nobody: it keeps the ranks' collectives paired.

    Under sequence parallelism this is one rank's slice of the row: it feeds its tokens and answers what is asked
    for there. `counts_P` says how many answers each peer gives; `place_M` is still the place of all of them.
    """

    model_inputs: dict[str, object]
    select_M: torch.Tensor
    targets_M: torch.Tensor
    temperature_M: torch.Tensor | None
    place_M: torch.Tensor
    dummy: bool
    counts_P: tuple[int, ...] = ()


class MakeInputs(Protocol):
    """Arrange the fed tokens `ids_bT[fed_bT]`; return model inputs and where each token of [b, T] went."""

    def __call__(
        self, ids_bT: torch.Tensor, fed_bT: torch.Tensor, device: torch.device
    ) -> tuple[dict[str, object], torch.Tensor]:
        """Return keyword arguments for the base model and int64 [b, T] indices into its flattened states."""
        ...


def fed_lengths(loss_mask_BT: torch.Tensor) -> torch.Tensor:
    """Return how many tokens of each sequence must be fed, int64 [B]: those before the last one asked for."""
    position_T = torch.arange(loss_mask_BT.shape[1], device=loss_mask_BT.device)
    if loss_mask_BT.numel() == 0:
        return torch.zeros(loss_mask_BT.shape[0], dtype=torch.int64, device=loss_mask_BT.device)
    return (loss_mask_BT * position_T).amax(1)


def lay_out(
    batch: TrainBatch | None, make_inputs: MakeInputs, device: torch.device, peers: SubGroup | None = None
) -> Layout:
    """Lay out one micro-batch; None, or one that asks for nothing, gives a dummy. Given `peers`, return this rank's slice.

    All is planned where the batch is, and moved once: nothing is read back from `device`.
    """
    asked = None if batch is None or not bool(batch["loss_mask"].any()) else batch
    layout = _dummy(make_inputs, device) if asked is None else _whole(asked, make_inputs, device)
    if peers is not None:
        layout = _slice(layout, peers)
    temperature_M = layout.temperature_M
    return replace(
        layout,
        select_M=layout.select_M.to(device),
        targets_M=layout.targets_M.to(device),
        temperature_M=None if temperature_M is None else temperature_M.to(device),
        place_M=layout.place_M.to(device),
    )


def _whole(batch: TrainBatch, make_inputs: MakeInputs, device: torch.device) -> Layout:
    ids_bT, mask_bT = batch["input_ids"], batch["loss_mask"]
    position_T = torch.arange(ids_bT.shape[1], device=ids_bT.device)
    fed_bT = position_T[None] < fed_lengths(mask_bT)[:, None]
    inputs, where_bT = make_inputs(ids_bT, fed_bT, device)
    row_M, position_M = mask_bT.nonzero(as_tuple=True)
    # At temperature 1 everywhere the division, and the pass over the logits it costs, is left out: x / 1 is x.
    cool = "temperature" not in batch or bool((batch["temperature"] == 1.0).all())
    return Layout(
        model_inputs=inputs,
        select_M=where_bT[row_M, position_M - 1],
        targets_M=ids_bT[row_M, position_M],
        temperature_M=None if cool else batch["temperature"][row_M],
        place_M=row_M * ids_bT.shape[1] + position_M,
        dummy=False,
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
    temperature_M = layout.temperature_M
    return replace(
        layout,
        model_inputs={**inputs, "packed": replace(cast("Any", plan), peers=peers)},
        select_M=layout.select_M[mine_M] - start,
        targets_M=layout.targets_M[mine_M],
        temperature_M=None if temperature_M is None else temperature_M[mine_M],
        counts_P=tuple(map(int, owner_M.bincount(minlength=peers.size).tolist())),
    )


@dataclass(frozen=True, slots=True)
class RowInputs:
    """One row of all fed tokens, with a plan of who sees whom: a `MakeInputs`.

    With `share` a beginning that several sequences have in common lies in it once. What a causal model makes of a token
    depends on the tokens before it alone. So the prompt of a group of completions is computed once, its keys and values
    are looked up by each of them, and its gradient is the sum over all.
    """

    plan: PlanRows
    share: bool = False

    def __call__(
        self, ids_bT: torch.Tensor, fed_bT: torch.Tensor, device: torch.device
    ) -> tuple[dict[str, object], torch.Tensor]:
        """Lay out the row; see `MakeInputs`."""
        own_bT, owner_bT = fed_bT, None
        if self.share:
            owned_bT, found_bT = _owners(ids_bT, fed_bT)
            if int(owned_bT.sum()) <= (1 - MIN_SHARED) * int(fed_bT.sum()):
                own_bT, owner_bT = owned_bT, found_bT
        row_N, position_N = own_bT.nonzero(as_tuple=True)
        where_bT = torch.zeros_like(ids_bT)
        where_bT[row_N, position_N] = torch.arange(len(row_N), device=ids_bT.device)
        if owner_bT is not None:
            where_bT = where_bT.gather(0, owner_bT)
        lengths_b = fed_bT.sum(1)
        rows_S = lengths_b.nonzero().squeeze(1)
        lengths = [int(length) for length in lengths_b[rows_S].tolist()]
        inputs: dict[str, object] = {
            "input_ids": ids_bT[row_N, position_N][None].to(device),
            "position_ids": position_N[None].to(device),
            "packed": self.plan(where_bT[rows_S].cpu(), own_bT[rows_S].cpu(), lengths, device),
        }
        return inputs, where_bT


def _owners(ids_bT: torch.Tensor, fed_bT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which fed tokens must be computed, bool, and for each fed token the row that computes it, int64.

    In the order of a dictionary, what two sequences have in common at their beginning they have in common with all
    between them: comparing neighbours finds everything.
    """
    lengths = fed_bT.sum(1).tolist()
    words = ids_bT.cpu().numpy().astype(">i8")  # big-endian: bytes of numbers >= 0 sort as the numbers do
    order = sorted(range(len(words)), key=lambda row: words[row, : lengths[row]].tobytes())
    order_b = torch.tensor(order, device=ids_bT.device)
    ids_bT, fed_bT = ids_bT[order_b], fed_bT[order_b]
    same_bT = torch.zeros_like(fed_bT)
    same_bT[1:] = (ids_bT[1:] == ids_bT[:-1]) & fed_bT[1:] & fed_bT[:-1]
    own_bT = fed_bT & ~same_bT.int().cumprod(1).bool()
    place_b1 = torch.arange(len(words), device=ids_bT.device)[:, None]
    owner_bT = order_b[torch.where(own_bT, place_b1, 0).cummax(0).values]
    back_b = order_b.argsort()
    return own_bT[back_b], owner_bT[back_b]


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
    return {"input_ids": ids.to(device), "attention_mask": mask_bT.to(device)}, where_bT


def _dummy(make_inputs: MakeInputs, device: torch.device) -> Layout:
    one = torch.zeros(1, 1, dtype=torch.int64)
    inputs, _ = make_inputs(one, torch.ones(1, 1, dtype=torch.bool), device)
    first = torch.zeros(1, dtype=torch.int64)
    return Layout(
        model_inputs=inputs, select_M=first, targets_M=first, temperature_M=None, place_M=first, dummy=True
    )
