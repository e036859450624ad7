"""From a micro-batch to what the model is fed: only tokens that some asked-for log-probability depends on.

The log-probability of token t comes from the hidden state at t - 1. So of each sequence the tokens before its
last position under `loss_mask` are fed, and of the hidden states only those under the mask reach the head:
prompts cost no logits, and what follows the last trained token costs nothing. Causal models cannot tell.

Experts that come with a batch, for engines that let their routers take them (arXiv 2510.11370): what can be taken, and where it lies.

How much each expert counts is still the router's own score of it, so that gradients reach the router.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Protocol

import torch

from offbeat_engine.errors import BatchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat_engine.batch import TrainBatch


# B = sequences, T = tokens, N = tokens fed, L = layers with experts, K = experts of a token; of a batch K is all of L x K.

KEY = "routed_experts"


def check_experts(batch: TrainBatch, num_layers: int, num_experts: int, top_k: int) -> None:
    """Raise `BatchError` where what a batch brings is not what `num_layers` routers can take, each `top_k` of `num_experts`."""
    if KEY not in batch:
        return
    experts_BTK = batch[KEY]
    if not num_layers or not num_experts:
        raise BatchError(f"`{KEY}` came for a model that has no experts; leave the key out")
    if experts_BTK.shape[2] != num_layers * top_k:
        raise BatchError(
            f"`{KEY}` must have {num_layers} layers x {top_k} experts for each token, in the order of layers; got {experts_BTK.shape[2]}"
        )
    if not experts_BTK.numel():
        return
    experts_BTLK = experts_BTK.unflatten(2, (num_layers, top_k)).sort(-1).values
    none_BTLK = experts_BTLK < 0
    twice_BTLK = (experts_BTLK[..., 1:] == experts_BTLK[..., :-1]) & ~none_BTLK[..., 1:]
    low, high = int(experts_BTLK.min()), int(experts_BTLK.max())
    if low < -1 or high >= num_experts:
        raise BatchError(f"`{KEY}` must lie in 0..{num_experts - 1}, or be -1; got {low} to {high}")
    if bool(twice_BTLK.any()) or bool((none_BTLK.any(-1) != none_BTLK.all(-1)).any()):
        raise BatchError(f"`{KEY}` must name {top_k} different experts of a token in a layer, or -1 for all")


# ruff: noqa: N815 shapes ride in names, of fields too


# b = sequences of the micro-batch, T = tokens of its longest, N = tokens fed, M = tokens asked for.


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One micro-batch in the form the model takes.

    `model_inputs` are what the model takes; `select_M` indexes its flattened hidden
    states; `targets_M` are the tokens predicted there; `place_M` is where each answer goes in a flattened [b, T].
    A `dummy` layout asks for one answer that belongs to nobody: it keeps the ranks' collectives paired.

    Under sequence parallelism this is one rank's slice of the row: it feeds its tokens and answers what is asked
    for there. `counts_P` says how many answers each peer gives; `place_M` is still the place of all of them.

    `experts_NK` are those that come with the batch, of the tokens as the model sees them, -1 where none come; `top_ids_MK` are its `top_ids`.
    """

    model_inputs: dict[str, object]
    select_M: torch.Tensor
    targets_M: torch.Tensor
    temperature_M: torch.Tensor | None
    place_M: torch.Tensor
    dummy: bool
    counts_P: tuple[int, ...] = ()
    experts_NK: torch.Tensor | None = None
    top_ids_MK: torch.Tensor | None = None


class MakeInputs(Protocol):
    """Arrange the fed tokens `ids_bT[fed_bT]`; return model inputs and where each token of [b, T] went."""

    def __call__(
        self, ids_bT: torch.Tensor, fed_bT: torch.Tensor, device: torch.device
    ) -> tuple[dict[str, object], torch.Tensor]:
        """Return what the model takes and int64 [b, T] indices into its flattened states."""
        ...


def fed_lengths(loss_mask_BT: torch.Tensor) -> torch.Tensor:
    """Return how many tokens of each sequence must be fed, int64 [B]: those before the last one asked for."""
    position_T = torch.arange(loss_mask_BT.shape[1], device=loss_mask_BT.device)
    if loss_mask_BT.numel() == 0:
        return torch.zeros(loss_mask_BT.shape[0], dtype=torch.int64, device=loss_mask_BT.device)
    return (loss_mask_BT * position_T).amax(1)


def lay_out(
    batch: TrainBatch | None,
    make_inputs: MakeInputs,
    device: torch.device,
    cut: Callable[[Layout], Layout] | None = None,
    *,
    experts: bool = False,
) -> Layout:
    """Lay out one micro-batch; None, or one that asks for nothing, gives a dummy. `cut` takes this rank's part of it.

    With `experts` those that the batch brings are laid out with it.

    All is planned where the batch is, and moved once: nothing is read back from `device`, and no copy to it is waited for,
    which would last until the passes before have ended there.
    """
    asked = None if batch is None or not bool(batch["loss_mask"].any()) else batch
    layout = _dummy(make_inputs, device) if asked is None else _whole(asked, make_inputs, device, experts)
    if asked is None and batch is not None and "top_ids" in batch:
        layout = replace(layout, top_ids_MK=torch.zeros(1, batch["top_ids"].shape[-1], dtype=torch.int64))
    if cut is not None:
        layout = cut(layout)
    values = {item.name: getattr(layout, item.name) for item in fields(layout)}
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    return replace(layout, **{name: value.to(device, non_blocking=True) for name, value in tensors.items()})


def _whole(batch: TrainBatch, make_inputs: MakeInputs, device: torch.device, experts: bool) -> Layout:
    ids_bT, mask_bT = batch["input_ids"], batch["loss_mask"]
    position_T = torch.arange(ids_bT.shape[1], device=ids_bT.device)
    fed_bT = position_T[None] < fed_lengths(mask_bT)[:, None]
    inputs, where_bT = make_inputs(ids_bT, fed_bT, device)
    row_M, position_M = mask_bT.nonzero(as_tuple=True)
    experts_NK = None
    if experts and KEY in batch:
        ids = inputs["input_ids"]
        assert isinstance(ids, torch.Tensor)
        experts_NK = batch[KEY].new_full((ids.numel(), batch[KEY].shape[2]), -1)
        experts_NK[where_bT[fed_bT]] = batch[KEY][fed_bT]
    # At temperature 1 everywhere the division, and the pass over the logits it costs, is left out: x / 1 is x.
    cool = "temperature" not in batch or bool((batch["temperature"] == 1.0).all())
    return Layout(
        model_inputs=inputs,
        select_M=where_bT[row_M, position_M - 1],
        targets_M=ids_bT[row_M, position_M],
        temperature_M=None if cool else batch["temperature"][row_M],
        place_M=row_M * ids_bT.shape[1] + position_M,
        dummy=False,
        top_ids_MK=batch["top_ids"][row_M, position_M] if "top_ids" in batch else None,
        experts_NK=experts_NK,
    )


def _dummy(make_inputs: MakeInputs, device: torch.device) -> Layout:
    one = torch.zeros(1, 1, dtype=torch.int64)
    inputs, _ = make_inputs(one, torch.ones(1, 1, dtype=torch.bool), device)
    first = torch.zeros(1, dtype=torch.int64)
    return Layout(
        model_inputs=inputs, select_M=first, targets_M=first, temperature_M=None, place_M=first, dummy=True
    )


def place(output_M: torch.Tensor, layout: Layout, shape: torch.Size) -> torch.Tensor:
    """Return the answers [M] or [M, K] of `layout` where they belong, [b, T] as `shape` says, or [b, T, K]; zero elsewhere, and of a dummy."""
    beyond = output_M.shape[1:]
    flat = torch.zeros(shape.numel(), *beyond, device=output_M.device, dtype=output_M.dtype)
    return (flat if layout.dummy else flat.index_put((layout.place_M,), output_M)).view(*shape, *beyond)
