"""Tensors on `cuda` without a GPU: they have a shape, a dtype and a device, and mixing devices raises as on a real one."""

# torch's modes and fake tensors are typed in part.
# pyright: reportMissingParameterType=false

from __future__ import annotations

import traceback
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from offbeat_engine.fsdp2.memory.updater import Updater

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from offbeat_engine.fsdp2 import Fsdp2Engine


class FakeCuda:
    """While it is entered, what is on the CPU is real and computed, and what is on `cuda` is only shaped.

    A value that comes back from the device is zero. Each time that the host waits for the device it is written down: for
    a value, or until it has taken a copy that is not `non_blocking`. `waits` holds the module and function of this
    project that did, and "backward" for each backward pass between. Such a pass is not run, for autograd's threads want a driver; whatever it would give a gradient gets one of its shape.
    """

    def __init__(self) -> None:
        self.waits: list[str] = []
        self._stack = ExitStack()

    def __enter__(self) -> FakeCuda:
        """Begin."""
        grad, backward = torch.autograd.grad, torch.Tensor.backward
        self._stack.callback(setattr, torch.autograd, "grad", grad)
        self._stack.callback(setattr, torch.Tensor, "backward", backward)
        torch.autograd.grad = _shaped_gradients
        setattr(torch.Tensor, "backward", self._shaped_backward)  # noqa: B010 pyright takes methods for constants
        self._stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        self._stack.enter_context(_Sorting(self.waits))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End."""
        self._stack.close()

    @property
    def _shaped_backward(self) -> Callable[[torch.Tensor], None]:
        waits = self.waits

        def backward(loss: torch.Tensor) -> None:
            waits.append("backward")
            for leaf in _leaves(loss):
                leaf.grad = torch.zeros_like(leaf)

        return backward


def _shaped_gradients(
    _: torch.Tensor, inputs: Sequence[torch.Tensor], *, allow_unused: bool = False
) -> tuple[torch.Tensor, ...]:
    """Stand in for `torch.autograd.grad`."""
    return tuple(torch.zeros_like(tensor) for tensor in inputs)


def _leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield what a backward pass from `loss` would leave a gradient on."""
    seen, todo = set[Any](), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        todo += [before for before, _ in node.next_functions]


class _Sorting(TorchDispatchMode):
    """Sends what touches the device to the fake mode below, and lets the rest be computed."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, _ = tree_flatten((args, kwargs))
        fakes = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        there = any(isinstance(leaf, torch.device) and leaf.type == "cuda" for leaf in leaves)
        if not fakes and not there:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:  # noqa: SLF001 `item`, `tolist` and `float`
            self._waits.append(_where())
            return 0.0 if fakes[0].dtype.is_floating_point else fakes[0].dtype is not torch.bool and 0
        copies = func is torch.ops.aten._to_copy.default and not fakes  # noqa: SLF001 what `to` comes to
        if copies and not kwargs.get("non_blocking"):
            self._waits.append(_where())
        return tree_map(self._back, func(*args, **kwargs))

    def _back(self, result: object) -> object:
        """Return a tensor that came to the CPU as a real one."""
        if not isinstance(result, FakeTensor) or result.device.type != "cpu":
            return result
        self._waits.append(_where())
        with unset_fake_temporarily():
            return torch.zeros(result.shape, dtype=result.dtype)


def _where() -> str:
    for frame, _ in traceback.walk_stack(None):
        module = str(frame.f_globals.get("__name__"))
        if module.startswith("offbeat_") and module != __name__:
            return f"{module}:{frame.f_code.co_name}"
    return "elsewhere"


def pretend_on_cuda(engine: Fsdp2Engine) -> None:
    """Send the model of an initialised engine of one rank to the device, inside `FakeCuda`."""
    # Not `engine.to`, which moves between the host and the device an engine was built on: this one has none.
    parts = engine._state  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    assert parts is not None
    parts.scorer.to("cuda")
    updater = Updater(engine.config.optimizer, dict(parts.scorer.hf.named_parameters()), engine.world)
    engine._state = replace(parts, updater=updater)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    engine.world = replace(engine.world, device="cuda")
