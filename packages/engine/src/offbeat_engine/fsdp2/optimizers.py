"""The update rules: torch's AdamW on each rank's own shards, torch's Adafactor on whole weights one at a time."""

# torch's optimizer state is an untyped dictionary; DTensor hands out its local shard as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

if TYPE_CHECKING:
    from offbeat_engine.config import OptimizerConfig

Params = dict[str, torch.nn.Parameter]
Moments = dict[str, dict[str, torch.Tensor]]


class Rule(Protocol):
    """One optimizer over named parameters, which may be DTensors; state goes by the parameters' names."""

    sharded: bool
    """Whether moments other than `step` are this rank's shards, cut like their parameter; else they are whole."""

    def step(self, rate: float) -> None:
        """Update every parameter that has a gradient, leaving the gradients; a collective unless `sharded`."""
        ...

    def moments(self) -> Moments:
        """Return the state, sharing memory; empty before the first step."""
        ...

    def set_moments(self, moments: Moments) -> None:
        """Take over what `moments` returned, keyed and shaped alike; {} forgets the state."""
        ...

    def empty_moments(self) -> Moments:
        """Return state of the right shapes to load into."""
        ...


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of `tensor` as a plain tensor sharing its memory, or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class AdamW:
    """torch.optim.AdamW, fused.

    It is element-wise, so it runs on plain tensors that share their memory with the shards: the same result as on
    whole weights, without DTensor's dispatch on every call.
    """

    sharded = True

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


class Adafactor:
    """torch.optim.Adafactor (arXiv 1804.04235): means of squares per row and column instead of per weight.

    Those means, and the size of an update, are over a whole matrix, so each weight and its gradient are gathered in
    turn, every rank computes the same update, and keeps its shard of it: the bits do not depend on the number of
    ranks. State is whole on every rank, which is small; one whole weight and gradient exist at a time. (On DTensors
    torch's own would take the norm of a shard for the norm of the whole.)
    """

    sharded = False

    def __init__(self, config: OptimizerConfig, params: Params) -> None:
        self._params = params
        # An optimizer for each: its one parameter stands for the weight while that is whole.
        self._optimizers = {
            name: torch.optim.Adafactor(
                [torch.nn.Parameter(torch.empty(0))], lr=config.lr, weight_decay=config.weight_decay
            )
            for name in params
        }

    def step(self, rate: float) -> None:
        """See `Rule`."""
        for name, param in self._params.items():
            if param.grad is None:
                continue
            optimizer, whole = self._optimizers[name], _whole(param.detach())
            group = optimizer.param_groups[0]
            group["lr"], stand_in = rate, group["params"][0]
            stand_in.data, stand_in.grad = whole, _whole(param.grad)
            optimizer.step()
            stand_in.grad = None
            stand_in.data = torch.empty(0)
            if isinstance(param, DTensor):
                _write_back(whole, param)

    def moments(self) -> Moments:
        """See `Rule`."""
        states = {name: next(iter(opt.state.values()), None) for name, opt in self._optimizers.items()}
        return {name: dict(state) for name, state in states.items() if state}

    def set_moments(self, moments: Moments) -> None:
        """See `Rule`."""
        for name, optimizer in self._optimizers.items():
            optimizer.state.clear()
            if name in moments:
                optimizer.state[optimizer.param_groups[0]["params"][0]] = moments[name]

    def empty_moments(self) -> Moments:
        """See `Rule`."""
        return {name: _empty_factors(param) for name, param in self._params.items()}


def _empty_factors(param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    shape = list(param.shape)
    if len(shape) > 1:
        shapes = {"row_var": [*shape[:-1], 1], "col_var": [*shape[:-2], 1, shape[-1]]}
    else:
        shapes = {"variance": shape}
    zeros = {key: torch.zeros(size, device=local(param).device) for key, size in shapes.items()}
    return {"step": torch.zeros(()), **zeros}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _write_back(whole: torch.Tensor, param: DTensor) -> None:
    """Copy this rank's part of `whole` into its shard; nothing is sent, for every rank has the same."""
    cut = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
    local(param.detach()).copy_(cut.to_local())
