"""Experts that are given, not chosen: drawn for a batch, and forced on a plain model."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Generator

    from offbeat_engine.batch import TrainBatch

# T = tokens, L = layers, K = experts of a token, E = all experts.


def with_drawn_experts(
    batch: TrainBatch, num_layers: int, num_experts: int, top_k: int, *, for_all: bool = False
) -> TrainBatch:
    """Return `batch` with different experts for each token of it, drawn from its own ids.

    Every third sequence has none, and keeps its own choice, unless they are drawn `for_all`.
    """
    shape = (*batch["input_ids"].shape, num_layers, num_experts)
    draw = torch.rand(shape, generator=torch.Generator().manual_seed(int(batch["input_ids"].sum())))
    experts_BTK = draw.argsort(-1)[..., :top_k].flatten(2).to(torch.int16)
    if not for_all:
        experts_BTK[::3] = -1
    batch = batch.copy()
    batch["routed_experts"] = experts_BTK
    return batch


@contextmanager
def replayed(model: Any, experts_TK: torch.Tensor | None) -> Generator[None]:
    """Let transformers' routers of `model` take these experts, layer after layer, where they are not -1.

    Raises:
        AssertionError: the model has none of transformers' routers (5 and later).
    """
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    if experts_TK is None:
        yield
        return
    assert routers, (
        "experts can be forced on models of transformers 5, whose routers are modules of their own"
    )
    with ExitStack() as stack:
        experts_TLK = experts_TK.unflatten(1, (len(routers), -1)).long()
        for layer, router in enumerate(routers):
            forced = partial(_forced, experts_TLK[:, layer])
            stack.callback(router.register_forward_hook(forced).remove)
        yield


def _forced(experts_TK: torch.Tensor, router: Any, _: object, output: Any) -> Any:
    logits_TE, _, own_TK = output
    index_TK = torch.where(experts_TK < 0, own_TK, experts_TK)
    scores_TK = logits_TE.float().softmax(-1).gather(1, index_TK)
    if getattr(router, "norm_topk_prob", True):
        scores_TK = scores_TK / scores_TK.sum(-1, keepdim=True)
    return logits_TE, scores_TK.to(logits_TE.dtype), index_TK
