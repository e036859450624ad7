"""From accumulated gradients to new weights: norm, clipping, an update rule, learning rate.

torchao's AdamW with moments of eight bits: a quarter of the memory (arXiv 2110.02861: codes, and a scale for each block).

Blocks never cross rows here, so what a checkpoint holds is cut by rows like the weights and loads on any number of ranks
to the last bit. Weights whose rows do not come out in whole blocks (norms, biases) keep float32 moments.
"""

# torchao and torch's optimizer state are untyped, and torch names its fused list operations as private.
# pyright: reportMissingImports=false, reportUnknownParameterType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
from contextlib import nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from offbeat_engine.config import OptimizerName
from offbeat_engine.errors import StateError
from offbeat_engine.fsdp2.weights.export import local
from offbeat_engine.toolkit.collectives import sum_tensor
from offbeat_engine.toolkit.step.schedules import learning_rate

if TYPE_CHECKING:
    from offbeat_engine.config import OptimizerConfig
    from offbeat_engine.toolkit.world import World


Moments = dict[str, dict[str, torch.Tensor]]


class Updater:
    """Optimizer and schedule over `params` (name to master weight, float32): torch.optim.AdamW, fused.

    It is element-wise, so it runs on plain tensors that share their memory with the shards: the same result as on
    whole weights, without DTensor's dispatch on every call.
    """

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
        self._shards = {
            name: torch.nn.Parameter(local(param.detach())) for name, param in self.params.items()
        }
        settings = {"betas": (config.beta1, config.beta2), "eps": config.eps, "lr": config.lr}
        # A group may be empty, a list may not.
        self._optimizer = self._made(
            [{"params": list(self._shards.values())}], weight_decay=config.weight_decay, **settings
        )

    def _made(self, groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, fused=True, **settings)

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

    def step(self, grad_norm: float, lr: float, betas: tuple[float, float]) -> None:
        """Scale gradients of norm `grad_norm` to at most `max_grad_norm`, then take one step."""
        limit = self._config.max_grad_norm
        if 0 < limit < grad_norm:
            torch._foreach_mul_(self._local_gradients(), limit / (grad_norm + 1e-6))
        for name, shard in self._shards.items():
            grad = self.params[name].grad
            shard.grad = None if grad is None else local(grad)
        self._update(lr, betas)
        self._optimizer.zero_grad()

    def _update(self, lr: float, betas: tuple[float, float]) -> None:
        """Update every shard that has a gradient."""
        for group in self._optimizer.param_groups:
            group["lr"], group["betas"] = lr, betas
        self._optimizer.step()

    def _local_gradients(self) -> list[torch.Tensor]:
        return [local(param.grad) for param in self.params.values() if param.grad is not None]

    def set_num_steps(self, num_steps: int) -> float:
        """Jump to the learning rate of optimizer step `num_steps` and return it."""
        self.num_steps = num_steps
        return learning_rate(self._config, num_steps)

    def moments(self) -> Moments:
        """Return the optimizer's state by parameter name, sharing memory; empty before the first step.

        All but `step` is cut as the parameters are.
        """
        states = self._optimizer.state
        return {name: dict(states[shard]) for name, shard in self._shards.items() if states.get(shard)}

    def set_moments(self, moments: Moments) -> None:
        """Take over what `moments` returned, keyed and shaped alike; {} forgets the state."""
        self._optimizer.state.clear()
        for name, state in moments.items():
            self._optimizer.state[self._shards[name]] = state

    def empty_moments(self) -> Moments:
        """Return state of the right shapes to load into."""
        return {name: self._empty(name, shard) for name, shard in self._shards.items()}

    def _empty(self, name: str, shard: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        del name
        zeros = {key: torch.zeros_like(shard.detach()) for key in _SIGNED}
        return {"step": torch.zeros((), device=shard.device), **zeros}


_BLOCK = 256
_LEAST = 4096  # below so many numbers there is nothing to gain
_SIGNED = {"exp_avg": True, "exp_avg_sq": False}


def has_torchao() -> bool:
    """Return whether the torchao package is installed."""
    return find_spec("torchao") is not None


class AdamW8bit(Updater):
    """torchao.optim.AdamW8bit on each rank's shards; compiled on GPUs, one operator at a time on a CPU.

    Its moments have codes and scales apart.
    """

    def _made(self, groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
        from torchao.optim import AdamW8bit as Torchao

        return Torchao(groups, block_size=_BLOCK, **settings)

    def _update(self, lr: float, betas: tuple[float, float]) -> None:
        state: Any = self._optimizer.state
        for name, shard in self._shards.items():
            if not shard.numel():
                shard.grad = None
            if shard.grad is not None and not state.get(shard):
                state[shard] = _joined(self._empty(name, shard))
        group = self._optimizer.param_groups[0]
        group["lr"].fill_(lr)
        group["betas"] = betas
        on_cuda = any(shard.is_cuda for shard in self._shards.values())
        with nullcontext() if on_cuda else torch.compiler.set_stance("force_eager"):
            self._optimizer.step()

    def moments(self) -> Moments:  # noqa: D102
        states: Any = self._optimizer.state
        return {
            name: _parted(states[shard], len(shard)) if states.get(shard) else self._empty(name, shard)
            for name, shard in self._shards.items()
            if states and (states.get(shard) or not shard.numel())
        }

    def set_moments(self, moments: Moments) -> None:  # noqa: D102
        joined = {name: _joined(state) for name, state in moments.items() if self._shards[name].numel()}
        super().set_moments(joined)

    def _empty(self, name: str, shard: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        param, state = self.params[name], {"step": torch.zeros(())}
        for key in _SIGNED:
            if not _in_blocks(param):
                state[key] = torch.zeros_like(shard.detach())
                continue
            blocks = param.shape[1:].numel() // _BLOCK
            state[f"{key}_codes"] = torch.zeros_like(shard.detach(), dtype=torch.uint8)
            state[f"{key}_scale"] = torch.zeros(len(shard), blocks, device=shard.device)
        return state


def _in_blocks(param: torch.Tensor) -> bool:
    """Return whether moments of `param` are kept coarse: the same on any number of ranks."""
    return param.dim() > 1 and param.numel() >= _LEAST and param.shape[1:].numel() % _BLOCK == 0


def _joined(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what torchao keeps for `state`, as `moments` gives it, sharing memory."""
    from torchao.optim.subclass_8bit import OptimState8bit

    joined = {key: state[key] for key in ("step", *_SIGNED) if key in state}
    for key in (key for key in _SIGNED if key not in state):
        codes, scale = state[f"{key}_codes"], state[f"{key}_scale"]
        map_256 = OptimState8bit.zeros((_BLOCK,), _SIGNED[key], _BLOCK, device=codes.device).qmap
        joined[key] = OptimState8bit(codes, scale.view(-1), map_256, _SIGNED[key])
    return joined


def _parted(state: dict[str, Any], num_rows: int) -> dict[str, torch.Tensor]:
    parted: dict[str, torch.Tensor] = {"step": state["step"]}
    for key in _SIGNED:
        if hasattr(state[key], "codes"):
            parted[f"{key}_codes"] = state[key].codes
            parted[f"{key}_scale"] = state[key].scale.view(num_rows, -1)
        else:
            parted[key] = state[key]
    return parted


def make_updater(
    config: OptimizerConfig, params: dict[str, torch.nn.Parameter], world: World, num_replicas: int
) -> Updater:
    """Return the `Updater` that `config` names."""
    match config.name:
        case OptimizerName.ADAMW:
            return Updater(config, params, world, num_replicas)
        case OptimizerName.ADAMW_8BIT:
            return AdamW8bit(config, params, world, num_replicas)
        case OptimizerName.ADAFACTOR:
            raise AssertionError("`schedules.refusals` refuses it")
