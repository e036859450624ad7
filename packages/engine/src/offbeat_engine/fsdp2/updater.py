"""From accumulated gradients to new weights: norm, clipping, AdamW, learning rate.

AdamW is element-wise, so it runs on each rank's own shards as plain tensors that share their memory with the
sharded parameters: the same result, without DTensor's dispatch on every call.
"""

# torch names its fused list operations as private; its optimizer state is an untyped dictionary; DTensor hands out its local shard as unknown.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch
from torch.distributed.tensor import DTensor

from offbeat_engine.errors import StateError
from offbeat_engine.fsdp2.ranks import sum_tensor
from offbeat_engine.schedules import learning_rate

if TYPE_CHECKING:
    from offbeat_engine.config import OptimizerConfig
    from offbeat_engine.world import World

MOMENTS = ("exp_avg", "exp_avg_sq")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of `tensor` as a plain tensor sharing its memory, or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Updater:
    """Optimizer and schedule over `params` (name to master weight, float32)."""

    def __init__(self, config: OptimizerConfig, params: dict[str, torch.nn.Parameter], world: World) -> None:
        self._config = config
        self._world = world
        self.num_steps = 0  # scheduled steps so far
        self.rebind(params)

    def rebind(self, params: dict[str, torch.nn.Parameter]) -> None:
        """Start afresh on `params`: no moments, no gradients, the learning rate of `num_steps`."""
        self.params = params
        self._shards = {name: torch.nn.Parameter(local(param.detach())) for name, param in params.items()}
        config = self._config
        self._adamw = torch.optim.AdamW(
            self._shards.values(),
            lr=learning_rate(config, self.num_steps),
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for param in self.params.values():
            param.grad = None

    def has_gradients(self) -> bool:
        """Return whether any backward pass has left a gradient."""
        return any(param.grad is not None for param in self.params.values())

    def grad_norm(self) -> float:
        """Return the L2 norm of the gradient over all parameters and ranks, the same on all ranks."""
        grads = [local(param.grad) for param in self.params.values() if param.grad is not None]
        if not grads:
            raise StateError("`optimizer_step` without a gradient; call `forward_backward_step` first")
        norms = list(torch._foreach_norm(grads, 2.0))  # noqa: SLF001 the fused form has no public name
        square = torch.stack(norms).double().square().sum()
        return math.sqrt(float(sum_tensor(self._world, square)))

    def step(self, grad_norm: float) -> None:
        """Scale gradients of norm `grad_norm` to at most `max_grad_norm`, then take one AdamW step."""
        limit = self._config.max_grad_norm
        scale = limit / (grad_norm + 1e-6) if 0 < limit < grad_norm else None
        for name, shard in self._shards.items():
            grad = self.params[name].grad
            shard.grad = None if grad is None else local(grad)
        if scale is not None:
            torch._foreach_mul_([s.grad for s in self._shards.values() if s.grad is not None], scale)
        self._adamw.step()
        self._adamw.zero_grad()

    def advance(self) -> float:
        """Count one scheduled step; return the learning rate of the next."""
        return self.set_num_steps(self.num_steps + 1)

    def set_num_steps(self, num_steps: int) -> float:
        """Jump to the learning rate of optimizer step `num_steps` and return it."""
        self.num_steps = num_steps
        rate = learning_rate(self._config, num_steps)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        return rate

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return AdamW's state by parameter name, empty before the first step; tensors are this rank's shards."""
        states = self._adamw.state
        return {name: dict(states[shard]) for name, shard in self._shards.items() if states.get(shard)}

    def set_moments(self, moments: dict[str, dict[str, torch.Tensor]]) -> None:
        """Take over what `moments` returned, keyed and shaped alike; {} forgets the state."""
        self._adamw.state.clear()
        for name, state in moments.items():
            self._adamw.state[self._shards[name]] = state

    def empty_moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return state of the right shapes to load into."""
        return {
            name: {
                "step": torch.zeros((), device=shard.device),
                **{key: torch.zeros_like(shard.detach()) for key in MOMENTS},
            }
            for name, shard in self._shards.items()
        }

    def to(self, device: torch.device) -> None:
        """Move the moments to `device`; a step needs them where the parameters are."""
        for state in self._adamw.state.values():
            for key in MOMENTS:
                state[key] = cast("torch.Tensor", state[key]).to(device)
