"""What megatron-core takes from CUDA, for an engine on a CPU: for tests on gloo. Nothing imports this where an engine runs on a GPU.

Its own modules are mended for good; what belongs to torch is lent, inside `on_cpu` only.
"""

# megatron-core is untyped, and torch's own functions are replaced by others of their names.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false, reportPrivateUsage=false, reportUnknownLambdaType=false

from __future__ import annotations

import mmap
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

_CPU = torch.device("cpu")
_TYPES = {"torch.FloatTensor": "torch.cuda.FloatTensor", "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor"}
_depth = 0
_mended = False


class _Nothing:
    """A stream or an event: whatever is asked of it is done already."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, _: str) -> Callable[..., _Nothing]:
        return lambda *_, **__: self


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
        if kwargs.get("device") == "cuda":
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return made


def _zeros(*args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
    """Return zeros; a buffer's take no memory before somebody writes, as those of gradients do until the first step."""
    dtype = kwargs.get("dtype")
    size = args[0] if len(args) == 1 else None
    if kwargs.get("device") != _CPU or dtype is None or not isinstance(size, int) or not size:
        return _ZEROS(*args, **kwargs)
    pages = mmap.mmap(-1, size * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype)


def _type_of(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    answer = _TENSOR_TYPE(tensor, *args, **kwargs)
    return _TYPES.get(answer, answer) if not args and not kwargs else answer


def _all_to_all(output: torch.Tensor, given: torch.Tensor, *sizes: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Gloo takes sizes as integers, and megatron-core hands over what numpy made of them."""
    named = {
        key: [int(size) for size in value] if key.endswith("sizes") and value is not None else value
        for key, value in kwargs.items()
    }
    return _ALL_TO_ALL(output, given, *sizes, **named)


_ZEROS = _on_cpu(torch.zeros)
_TENSOR_TYPE = torch.Tensor.type
_ALL_TO_ALL = dist.all_to_all_single
_LENT: tuple[tuple[Any, str, Any], ...] = (
    (torch.cuda, "current_device", lambda: _CPU),
    (torch.cuda, "synchronize", lambda *_: None),
    (torch.cuda, "Stream", _Nothing),
    (torch.cuda, "Event", _Nothing),
    (torch.cuda, "current_stream", lambda *_: _Nothing()),
    (torch.cuda, "stream", lambda *_: nullcontext()),
    (torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
    (torch.Tensor, "record_stream", lambda *_: None),
    (torch.Tensor, "type", _type_of),
    (torch, "zeros", _zeros),
    (torch, "tensor", _on_cpu(torch.tensor)),
    (dist, "all_to_all_single", _all_to_all),
)


@contextmanager
def on_cpu() -> Generator[None]:
    """Lend torch what megatron-core asks of CUDA; may be entered again inside."""
    global _depth
    _mend()
    if _depth == 0:
        _kept.extend(getattr(owner, name) for owner, name, _ in _LENT)
        for owner, name, stand_in in _LENT:
            setattr(owner, name, stand_in)
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if _depth == 0:
            for (owner, name, _), was in zip(_LENT, _kept, strict=True):
                setattr(owner, name, was)
            _kept.clear()


_kept: list[Any] = []


def _mend() -> None:
    """Mend megatron-core itself: random states are of CUDA alone."""
    global _mended
    if _mended:
        return
    from megatron.core.tensor_parallel import random

    tracker: Any = random.CudaRNGStatesTracker
    tracker.fork = lambda *_, **__: nullcontext()
    random._get_all_rng_states = lambda: (torch.get_rng_state(), None, None)  # noqa: SLF001
    random._set_all_rng_states = lambda cpu, *_: torch.set_rng_state(cpu)  # noqa: SLF001
    _mended = True
