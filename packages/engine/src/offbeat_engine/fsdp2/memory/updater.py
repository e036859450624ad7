"""From accumulated gradients to new weights: norm, clipping, an update rule, learning rate."""

# torch names its fused list operations as private; DTensor hands out its local shard as unknown.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from offbeat_engine.config import OptimizerName
from offbeat_engine.errors import StateError
from offbeat_engine.fsdp2.memory.eight_bits import AdamW8bit
from offbeat_engine.fsdp2.memory.optimizers import AdamW, Moments, Params, Rule, local
from offbeat_engine.toolkit.collectives import sum_tensor
from offbeat_engine.toolkit.step.schedules import learning_rate

if TYPE_CHECKING:
    from offbeat_engine.config import OptimizerConfig
    from offbeat_engine.world import World


def _make_rule(config: OptimizerConfig, params: Params) -> Rule:
    match config.name:
        case OptimizerName.ADAMW:
            return AdamW(config, params)
        case OptimizerName.ADAMW_8BIT:
            return AdamW8bit(config, params)
        case OptimizerName.ADAFACTOR:
            raise AssertionError("`schedules.refusals` refuses it")


class Updater:
    """Optimizer and schedule over `params` (name to master weight, float32)."""

    def __init__(
        self,
        config: OptimizerConfig,
        params: dict[str, torch.nn.Parameter],
        world: World,
        num_replicas: int = 1,
    ) -> None:
        self._config = config
        self._world = world
        self._num_replicas = num_replicas  # of each shard among the ranks (hybrid sharding)
        self.num_steps = 0  # scheduled steps so far
        self.params = {name: param for name, param in params.items() if param.requires_grad}
        self._rule = _make_rule(self._config, self.params)

    @property
    def rule_name(self) -> OptimizerName:
        """Which rule's moments these are."""
        return self._config.name

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for param in self.params.values():
            param.grad = None

    def grad_norm(self) -> float:
        """Return the L2 norm of the gradient over all parameters and ranks, the same on all ranks."""
        grads = self._local_gradients()
        if not grads:
            raise StateError("no weight that is trained has a gradient; see `freeze`")
        norms = torch.stack(torch._foreach_norm(grads, 2.0)).double()  # noqa: SLF001 the fused form has no public name
        # What is no DTensor lies on every rank, and counts once for each copy of the weights.
        whole = [
            not isinstance(param.grad, DTensor) for param in self.params.values() if param.grad is not None
        ]
        num_ranks = self._world.size // self._num_replicas
        shares = torch.tensor([1 / num_ranks if each else 1.0 for each in whole], dtype=torch.float64)
        square = (norms.square() * shares.to(norms.device)).sum()
        return math.sqrt(float(sum_tensor(self._world, square)) / self._num_replicas)

    def step(self, grad_norm: float) -> None:
        """Scale gradients of norm `grad_norm` to at most `max_grad_norm`, then take one step."""
        limit = self._config.max_grad_norm
        if 0 < limit < grad_norm:
            torch._foreach_mul_(self._local_gradients(), limit / (grad_norm + 1e-6))
        self._rule.step(learning_rate(self._config, self.num_steps))

    def _local_gradients(self) -> list[torch.Tensor]:
        return [local(param.grad) for param in self.params.values() if param.grad is not None]

    def set_num_steps(self, num_steps: int) -> float:
        """Jump to the learning rate of optimizer step `num_steps` and return it."""
        self.num_steps = num_steps
        return learning_rate(self._config, num_steps)

    def moments(self) -> Moments:
        """Return the rule's state by parameter name, empty before the first step."""
        return self._rule.moments()

    def set_moments(self, moments: Moments) -> None:
        """Take over what `moments` returned, keyed and shaped alike; {} forgets the state."""
        self._rule.set_moments(moments)

    def empty_moments(self) -> Moments:
        """Return state of the right shapes to load into."""
        return self._rule.empty_moments()
