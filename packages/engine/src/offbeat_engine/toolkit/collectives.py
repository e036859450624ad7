"""The few collectives the engine needs outside FSDP, each a plain function when there is one rank.

Control messages are JSON or integers over a gloo group of their own (`World.control_group`), never pickles: what a rank
receives cannot run code, and on GPUs no message waits for the device.
"""

# torch and tensordict are typed in part: `tolist` and keyed access answer with unknown types; torch.autograd.Function is untyped.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.nn import functional

from offbeat_engine.config import Dtype
from offbeat_engine.errors import EngineError, RankLostError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from offbeat_engine.config import EngineConfig
    from offbeat_engine.toolkit.world import World

T = TypeVar("T")

# A message no longer than this needs one collective; a longer one needs a second for the rest.
_INLINE = 504
_LENGTH = 8


def gather(world: World, value: T) -> list[T]:
    """Return every rank's `value`, in rank order, on every rank.

    `value` is small and made of what JSON can say; floats come back bit for bit, also NaN, tuples as lists.
    """
    if world.size == 1:
        return [value]
    return [json.loads(part) for part in _gather_bytes(world, json.dumps(value).encode())]


def gather_ints(world: World, *values: int) -> list[tuple[int, ...]]:
    """Return every rank's integers, in rank order, on every rank: one small tensor collective."""
    if world.size == 1:
        return [values]
    mine = torch.tensor(values, dtype=torch.int64)
    return [tuple(map(int, part.tolist())) for part in _all_gather(world, mine)]


def gather_tensors(world: World, tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Return every rank's named CPU tensors, in rank order, on every rank; names, shapes and dtypes may differ."""
    if world.size == 1:
        return [tensors]
    said = gather(world, {key: (str(tensor.dtype), list(tensor.shape)) for key, tensor in tensors.items()})
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(world.size)]
    for key in dict.fromkeys(key for one in said for key in one):
        empty = [_empty(*one[key]) if key in one else torch.empty(0) for one in said]
        sizes = [tensor.numel() * tensor.element_size() for tensor in empty]
        mine = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        if key in tensors:
            mine[: sizes[world.rank]] = _bytes_of(tensors[key])
        for rank, came in enumerate(_all_gather(world, mine)):
            if key in said[rank]:
                _bytes_of(empty[rank]).copy_(came[: sizes[rank]])
                parts[rank][key] = empty[rank]
    return parts


def sum_tensor(world: World, tensor: torch.Tensor) -> torch.Tensor:
    """Add `tensor` up over all ranks, in place, on the group that moves tensors."""
    if world.size > 1:
        dist.all_reduce(tensor)
    return tensor


def from_rank_zero(world: World, value: T) -> T:
    """Return rank 0's `value` (as in `gather`) on every rank; what the others pass is ignored."""
    if world.size == 1:
        return value
    message = json.dumps(value if world.rank == 0 else None).encode()
    first = _first_part(message)
    with _meeting(world) as group:
        dist.broadcast(first, src=0, group=group)
        rest = torch.zeros(max(0, _num_bytes(first) - _INLINE), dtype=torch.uint8)
        if len(rest):
            if world.rank == 0:
                rest = _as_tensor(message[_INLINE:])
            dist.broadcast(rest, src=0, group=group)
    return json.loads(_joined(first, rest))


def first_said(world: World, mine: str | None) -> str | None:
    """Return what the lowest rank says that says anything, the same on all ranks, or None."""
    return next((each for each in gather(world, mine) if each is not None), None)


def first_failure(world: World, error: BaseException | None) -> str | None:
    """Let the ranks agree: return the lowest failed rank's message, the same on all ranks, or None.

    Every rank must call this at the same place, so that all raise together or none does.
    """
    mine = None if error is None else f"{type(error).__name__}: {error}"
    for rank, message in enumerate(gather(world, mine)):
        if message is not None:
            return message if world.size == 1 else f"rank {rank}: {message}"
    return None


def gather_answers(
    answers: Sequence[torch.Tensor], counts: Sequence[int], group: dist.ProcessGroup, *, adds_up: bool
) -> tuple[torch.Tensor, ...]:
    """Join what the ranks of `group` answer, float32 [counts[rank]] each, in rank order: the same tensors on all of them.

    Backward hands each rank the gradient by its own answers; with `adds_up` the sum of what all ranks say of them.
    """
    joined_CM = cast(
        "torch.Tensor", _GatherAnswers.apply(torch.stack(list(answers)), tuple(counts), group, adds_up)
    )
    # An answer without a gradient must not seem to have one because it travelled with one that has.
    return tuple(
        row_M if answer.requires_grad else row_M.detach()
        for row_M, answer in zip(joined_CM.unbind(), answers, strict=True)
    )


class _GatherAnswers(torch.autograd.Function):
    @staticmethod
    def forward(  # M answers of C kinds
        ctx: Any, mine_CM: torch.Tensor, counts: tuple[int, ...], group: dist.ProcessGroup, adds_up: bool
    ) -> torch.Tensor:
        ctx.counts, ctx.group, ctx.adds_up = counts, group, adds_up
        longest = max(counts)  # parts must be of one size
        mine = functional.pad(mine_CM, (0, longest - mine_CM.shape[1])).contiguous()
        parts = [torch.empty_like(mine) for _ in counts]
        dist.all_gather(parts, mine, group=group)
        return torch.cat([part[:, :count] for part, count in zip(parts, counts, strict=True)], 1)

    @staticmethod
    def backward(ctx: Any, grad_CM: torch.Tensor) -> tuple[Any, ...]:
        if ctx.adds_up:
            grad_CM = grad_CM.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(grad_CM, group=ctx.group)
        rank = dist.get_rank(ctx.group)
        start = sum(ctx.counts[:rank])
        return grad_CM[:, start : start + ctx.counts[rank]], None, None, None


def compute_device(world: World) -> torch.device:
    """Return the device this rank computes on."""
    return torch.device("cuda", world.local_rank) if world.device == "cuda" else torch.device(world.device)


def compute_dtype(config: EngineConfig) -> torch.dtype:
    """Return the dtype in which the model computes and its weights leave."""
    return torch.bfloat16 if config.dtype == Dtype.BFLOAT16 else torch.float32


@contextmanager
def _meeting(world: World) -> Generator[dist.ProcessGroup]:
    """Give the control group, and say what a rank has waited for in vain in words of the engine."""
    try:
        yield world.control_group()
    except EngineError:
        raise
    except RuntimeError as error:
        raise RankLostError(
            f"rank {world.rank} of {world.size} waited for a message of the others, {world.timeout_s:g} s at most: one of "
            f"them died, hangs, or raised alone; see their logs, or raise the timeout if they were only slow ({error})"
        ) from error


def _all_gather(world: World, mine: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(mine) for _ in range(world.size)]
    with _meeting(world) as group:
        dist.all_gather(parts, mine, group=group)
    return parts


def _gather_bytes(world: World, mine: bytes) -> list[bytes]:
    firsts = _all_gather(world, _first_part(mine))
    longest = max(map(_num_bytes, firsts))
    if longest <= _INLINE:
        return [_joined(first, torch.empty(0, dtype=torch.uint8)) for first in firsts]
    rest = torch.zeros(longest - _INLINE, dtype=torch.uint8)
    rest[: max(0, len(mine) - _INLINE)] = _as_tensor(mine[_INLINE:])
    return [_joined(*both) for both in zip(firsts, _all_gather(world, rest), strict=True)]


def _first_part(message: bytes) -> torch.Tensor:
    first = torch.zeros(_LENGTH + _INLINE, dtype=torch.uint8)
    start = len(message).to_bytes(_LENGTH, "little") + message[:_INLINE]
    first[: len(start)] = _as_tensor(start)
    return first


def _num_bytes(first: torch.Tensor) -> int:
    return int.from_bytes(bytes(first[:_LENGTH].tolist()), "little")


def _joined(first: torch.Tensor, rest: torch.Tensor) -> bytes:
    return (first.numpy().tobytes()[_LENGTH:] + rest.numpy().tobytes())[: _num_bytes(first)]


def _as_tensor(message: bytes) -> torch.Tensor:
    # A copy: torch warns of memory that must not be written to.
    return (
        torch.frombuffer(bytearray(message), dtype=torch.uint8)
        if message
        else torch.empty(0, dtype=torch.uint8)
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of `tensor`, sharing its memory if that is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _empty(dtype: str, shape: list[int]) -> torch.Tensor:
    known: Any = getattr(torch, dtype.removeprefix("torch."))
    return torch.empty(shape, dtype=known)
