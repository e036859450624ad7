"""Experts that come with a batch, for engines that let their routers take them (arXiv 2510.11370): what can be taken, and where it lies.

How much each expert counts is still the router's own score of it, so that gradients reach the router.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat_engine.errors import BatchError

if TYPE_CHECKING:
    import torch

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


def experts_fed(
    experts_bTK: torch.Tensor, fed_bT: torch.Tensor, where_bT: torch.Tensor, num_places: int
) -> torch.Tensor:
    """Return the experts [N, K] of `num_places` tokens that are fed, each where `where_bT` puts it; -1 in other places."""
    experts_NK = experts_bTK.new_full((num_places, experts_bTK.shape[2]), -1)
    experts_NK[where_bT[fed_bT]] = experts_bTK[fed_bT]
    return experts_NK
