"""Experts of the batch in place of the choice of transformers' routers: `torch.topk`, asked for inside one, answers with them.

A router of transformers 5 is a module: it scores all experts, takes the `topk`, and makes weights of these scores. What comes of
other experts is then what its own code makes of their scores, whatever the family.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from offbeat_engine.errors import BatchError
from offbeat_engine.toolkit.hf.layouts import KEY, check_experts

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat_engine.batch import TrainBatch

# N = tokens fed, L = routers, K = experts of a token, E = all experts.

# By their class. Others choose in other ways (by groups, or by a score that is not the weight's).
ROUTERS = (
    "GptOssTopKRouter",
    "MixtralTopKRouter",
    "OlmoeTopKRouter",
    "Qwen2MoeTopKRouter",
    "Qwen3MoeTopKRouter",
)


class Routers:
    """The routers of a model, layer after layer. They are left as they are until a batch brings experts."""

    def __init__(self, hf: Any, compiled: bool) -> None:
        """Find them in `hf`; compiled layers (`compiled`) cannot be told what to take."""
        found = [module for module in hf.modules() if type(module).__name__.endswith("Router")]
        self._routers = [router for router in found if type(router).__name__ in ROUTERS]
        self._unknown = sorted({type(router).__name__ for router in found} - set(ROUTERS))
        self._compiled = compiled
        self._wrapped = False
        self._now: torch.Tensor | None = None

    def check(self, batch: TrainBatch) -> None:
        """Raise `BatchError` where what a batch brings cannot be taken here."""
        if KEY not in batch:
            return
        if self._unknown:
            raise BatchError(
                f"`{KEY}`: routers of the kind {', '.join(self._unknown)} cannot be given experts here; leave the key out"
            )
        if self._compiled:
            raise BatchError(f"`{KEY}`: compiled layers choose experts themselves; set `compile: false`")
        num_experts, top_k = (
            (int(self._routers[0].num_experts), int(self._routers[0].top_k)) if self._routers else (0, 0)
        )
        check_experts(batch, len(self._routers), num_experts, top_k)

    def take(self, experts_NK: torch.Tensor | None) -> None:
        """Take these in the pass that follows, and where its backward computes layers again; None: their own choice."""
        if experts_NK is None:
            self._now = None
            return
        if not self._wrapped:
            self._wrapped = True
            for layer, router in enumerate(self._routers):
                router.forward = self._replaying(layer, router.forward)
        self._now = experts_NK.unflatten(1, (len(self._routers), -1)).long()

    def _replaying(self, layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def call(*args: Any, **options: Any) -> Any:
            if self._now is None:
                return forward(*args, **options)
            now_NK = self._now[:, layer]
            with Choices(len(now_NK), now_NK):
                return forward(*args, **options)

        return call


class Choices(TorchFunctionMode):
    """Within it every `torch.topk` of the scores [N, E] of `num_tokens` tokens is taken down, or answered with what is given.

    So routers of any family are told what to take, in a whole forward pass: of `given_NK` each call gets as many columns as it asks
    for, in order. Where it is -1 a token keeps its own choice. `gap`, where it `measures`, is the most by which what was given scored
    other than that, as a part of the token's range of scores: little where rounding has decided.
    """

    def __init__(
        self, num_tokens: int, given_NK: torch.Tensor | None = None, *, measures: bool = False
    ) -> None:
        super().__init__()
        self.made: list[torch.Tensor] = []
        self.gap = 0.0
        self._num_tokens, self._given_NK, self._measures = num_tokens, given_NK, measures

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or args[0].shape[:-1] != (self._num_tokens,):
            return found
        (best_NK, index_NK), scores_NE = found, args[0]
        if self._given_NK is not None:
            now_NK, self._given_NK = self._given_NK.tensor_split([index_NK.shape[1]], 1)
            index_NK = torch.where(now_NK < 0, index_NK, now_NK)
            taken_NK = scores_NE.gather(-1, index_NK)
            found = taken_NK, index_NK
            if self._measures:
                range_N = scores_NE.amax(-1) - scores_NE.amin(-1)
                apart_N = (best_NK.amin(-1) - taken_NK.amin(-1)).abs() / range_N
                self.gap = max(self.gap, float(apart_N.nan_to_num().max()))
        self.made.append(index_NK)
        return found
