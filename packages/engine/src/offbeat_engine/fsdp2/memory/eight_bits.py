"""torchao's AdamW with moments of eight bits: a quarter of the memory (arXiv 2110.02861: codes, and a scale for each block).

Blocks never cross rows here, so what a checkpoint holds is cut by rows like the weights and loads on any number of ranks
to the last bit. Weights whose rows do not come out in whole blocks (norms, biases) keep float32 moments.
"""

# torchao and torch's optimizer state are untyped.
# pyright: reportMissingImports=false, reportUnknownParameterType=false

from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from offbeat_engine.fsdp2.weights.shards import local

if TYPE_CHECKING:
    from offbeat_engine.config import OptimizerConfig
    from offbeat_engine.fsdp2.memory.optimizers import Moments, Params

_BLOCK = 256
_LEAST = 4096  # below so many numbers there is nothing to gain
_SIGNED = {"exp_avg": True, "exp_avg_sq": False}


def has_torchao() -> bool:
    """Return whether the torchao package is installed."""
    return find_spec("torchao") is not None


class AdamW8bit:
    """A `Rule`: torchao.optim.AdamW8bit on each rank's shards; compiled on GPUs, one operator at a time on a CPU."""

    def __init__(self, config: OptimizerConfig, params: Params) -> None:
        self._params = params
        self._shards = {name: torch.nn.Parameter(local(param.detach())) for name, param in params.items()}
        self._coarse = {name for name, param in params.items() if _in_blocks(param)}
        self._optimizer = _optimizer(config, list(self._shards.values()))

    def step(self, rate: float) -> None:
        """See `Rule`."""
        state: Any = self._optimizer.state
        for name, shard in self._shards.items():
            grad = self._params[name].grad
            shard.grad = None if grad is None or not shard.numel() else local(grad)
            if shard.grad is not None and not state.get(shard):
                state[shard] = _joined(self._empty(name, shard))
        self._optimizer.param_groups[0]["lr"].fill_(rate)
        on_cuda = any(shard.is_cuda for shard in self._shards.values())
        with nullcontext() if on_cuda else torch.compiler.set_stance("force_eager"):
            self._optimizer.step()
        self._optimizer.zero_grad()

    def moments(self) -> Moments:
        """See `Rule`; codes and scales apart."""
        states: Any = self._optimizer.state
        return {
            name: _parted(states[shard], len(shard)) if states.get(shard) else self._empty(name, shard)
            for name, shard in self._shards.items()
            if states and (states.get(shard) or not shard.numel())
        }

    def set_moments(self, moments: Moments) -> None:
        """See `Rule`."""
        self._optimizer.state.clear()
        for name, state in moments.items():
            if self._shards[name].numel():
                self._optimizer.state[self._shards[name]] = _joined(state)

    def empty_moments(self) -> Moments:
        """See `Rule`."""
        return {name: self._empty(name, shard) for name, shard in self._shards.items()}

    def _empty(self, name: str, shard: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        state = {"step": torch.zeros(())}
        for key in _SIGNED:
            if name not in self._coarse:
                state[key] = torch.zeros_like(shard.detach())
                continue
            blocks = self._params[name].shape[1:].numel() // _BLOCK
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


def _optimizer(config: OptimizerConfig, shards: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit as Torchao

    return Torchao(
        [{"params": shards}],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        block_size=_BLOCK,
    )
