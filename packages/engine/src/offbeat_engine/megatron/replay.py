"""Experts that a sampler's routers chose, taken by this engine's in place of their own choice (arXiv 2510.11370).

How much each expert counts is still this router's own probability of it, so that gradients reach the router.
"""

# megatron-core is untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from offbeat_engine.toolkit.hf.replaying import KEY, check_experts

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat_engine.batch import TrainBatch
    from offbeat_engine.megatron.families import Shape

# S = tokens of a row on this rank, L = layers of the model, K = experts of a token, E = all experts.

__all__ = ["KEY", "Replay", "check", "forget", "hand_over", "install"]


class Replay:
    """What one router takes, row after row: in the place of megatron-core's `RouterReplay`, whose instances are global."""

    def __init__(self) -> None:
        self._now: torch.Tensor | None = None
        self._again: deque[torch.Tensor | None] = deque()

    def take(self, experts_SK: torch.Tensor | None, again: bool) -> None:
        """Take these in the forward pass that follows; None, or -1 for a token: the router's own.

        `again`: backward computes the layer a second time, row after row in the same order.
        """
        self._now = experts_SK
        if again:
            self._again.append(experts_SK)

    def forget(self) -> None:
        """Drop what a pass that failed has left."""
        self._now = None
        self._again.clear()

    def get_replay_topk(
        self,
        scores_SE: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and numbers of each token's experts, as megatron-core asks for them."""
        # What is computed again runs without gradients at first.
        later = bool(self._again) and torch.is_grad_enabled()
        experts_SK = self._again.popleft() if later else self._now
        own_SK, index_SK = choose(scores_SE, topk, num_groups=num_groups, group_topk=group_topk)
        if experts_SK is None:
            return own_SK, index_SK
        index_SK = torch.where(experts_SK < 0, index_SK, experts_SK.long())
        return scores_SE.gather(1, index_SK), index_SK


def install(chunk: Any) -> None:  # noqa: ANN401
    """Let the routers of a chunk of layers ask for what they are to take."""
    for _, router in _routers(chunk):
        router.router_replay = Replay()


def hand_over(chunk: Any, experts_SLK: torch.Tensor | None, again: bool) -> None:  # noqa: ANN401
    """Tell each router of `chunk` its experts for the row that comes next."""
    for layer, router in _routers(chunk):
        router.router_replay.take(None if experts_SLK is None else experts_SLK[:, layer], again)


def forget(chunk: Any) -> None:  # noqa: ANN401
    """Drop what is left of a step."""
    for _, router in _routers(chunk):
        router.router_replay.forget()


def _routers(chunk: Any) -> list[tuple[int, Any]]:  # noqa: ANN401
    layers = [layer for layer in chunk.decoder.layers if hasattr(layer.mlp, "router")]
    return [(int(layer.layer_number) - 1, layer.mlp.router) for layer in layers]


def check(batch: TrainBatch, shape: Shape) -> None:
    """Raise `BatchError` where what a batch brings is not what routers of `shape` can take."""
    check_experts(batch, shape.num_layers, shape.num_experts, shape.experts_per_token)
