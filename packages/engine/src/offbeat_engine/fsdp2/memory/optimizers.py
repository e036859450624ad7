"""The update rule: torch's AdamW on each rank's own shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from offbeat_engine.fsdp2.weights.shards import local

if TYPE_CHECKING:
    from offbeat_engine.config import OptimizerConfig

Params = dict[str, torch.nn.Parameter]
Moments = dict[str, dict[str, torch.Tensor]]


class Rule(Protocol):
    """One optimizer over named parameters, which may be DTensors; state goes by the parameters' names."""

    def step(self, rate: float) -> None:
        """Update every parameter that has a gradient, leaving the gradients."""
        ...

    def moments(self) -> Moments:
        """Return the state, sharing memory; empty before the first step. All but `step` is cut as the parameters are."""
        ...

    def set_moments(self, moments: Moments) -> None:
        """Take over what `moments` returned, keyed and shaped alike; {} forgets the state."""
        ...

    def empty_moments(self) -> Moments:
        """Return state of the right shapes to load into."""
        ...


class AdamW:
    """torch.optim.AdamW, fused.

    It is element-wise, so it runs on plain tensors that share their memory with the shards: the same result as on
    whole weights, without DTensor's dispatch on every call.
    """

    def __init__(self, config: OptimizerConfig, params: Params) -> None:
        self._params = params
        self._shards = {name: torch.nn.Parameter(local(param.detach())) for name, param in params.items()}
        self._optimizer = torch.optim.AdamW(
            [{"params": list(self._shards.values())}],  # a group may be empty, a list may not
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def step(self, rate: float) -> None:
        """See `Rule`."""
        for name, shard in self._shards.items():
            grad = self._params[name].grad
            shard.grad = None if grad is None else local(grad)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()

    def moments(self) -> Moments:
        """See `Rule`."""
        states = self._optimizer.state
        return {name: dict(states[shard]) for name, shard in self._shards.items() if states.get(shard)}

    def set_moments(self, moments: Moments) -> None:
        """See `Rule`."""
        self._optimizer.state.clear()
        for name, state in moments.items():
            self._optimizer.state[self._shards[name]] = state

    def empty_moments(self) -> Moments:
        """See `Rule`."""
        return {
            name: {
                "step": torch.zeros((), device=shard.device),
                "exp_avg": torch.zeros_like(shard.detach()),
                "exp_avg_sq": torch.zeros_like(shard.detach()),
            }
            for name, shard in self._shards.items()
        }
