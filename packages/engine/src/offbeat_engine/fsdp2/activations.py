"""What backward will need, kept in host memory between the two passes.

Every tensor that autograd saves in a forward pass goes to the host and comes back when backward asks for it. On a
GPU the way out is asynchronous, on a stream of its own into pinned memory, while later layers compute. Weights
stay: FSDP frees and gathers them itself. With activation checkpointing only the inputs of the layers are saved, so
only they travel. On a CPU the same path copies within the same memory and saves nothing.
"""

# torch.multiprocessing's weak references to storages are not typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import weakref
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Generator, Hashable

# Device memory that copies under way may hold: they fall behind where computing is faster than the bus.
_MAX_OUTGOING_BYTES = 1 << 29


@dataclass(slots=True, eq=False)
class _Kept:
    """One tensor in host memory; `sent` is done when it is whole, `back` is its latest copy on the device."""

    host: torch.Tensor
    sent: torch.cuda.Event | None
    back: weakref.ref[torch.Tensor] | None = None


class HostActivations:
    """Keeps what forward passes inside `kept()` save; make one per step. `num_bytes` counts what went out."""

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = 0
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._outgoing: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self._outgoing_bytes = 0
        self._known: dict[Hashable, tuple[object, _Kept]] = {}

    @contextmanager
    def kept(self) -> Generator[None]:
        """Send what a forward pass inside saves; its backward pass may run outside."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._settle(0)
        self._known.clear()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Kept:
        base = tensor if tensor._base is None else tensor._base  # noqa: SLF001 a saved `weight.t()` is a weight
        # Indices are few, and the layout that all layers share holds them anyway.
        if isinstance(base, torch.nn.Parameter) or not tensor.is_floating_point():
            return tensor
        if tensor.device != self._device or not tensor.numel():
            return tensor
        # Queries, keys and values come of one tensor that is saved three times, and travels once. The weak
        # reference keeps its address from being given to another as long as we remember it.
        from torch.multiprocessing.reductions import StorageWeakRef

        alive = StorageWeakRef(tensor.untyped_storage())
        place = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key = (alive.cdata, *place, tensor._version)  # noqa: SLF001 the only way to see a change in place
        if key not in self._known:
            self._known[key] = (alive, self._send(tensor))
        return self._known[key][1]

    def _send(self, tensor: torch.Tensor) -> _Kept:
        self.num_bytes += tensor.nbytes
        host = torch.empty_like(tensor, device="cpu", pin_memory=self._stream is not None)
        if self._stream is None:
            return _Kept(host.copy_(tensor), None)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        sent = torch.cuda.Event()
        sent.record(self._stream)
        # We hold the tensor until its copy is known to be done before whatever reuses the memory.
        self._outgoing.append((sent, tensor))
        self._outgoing_bytes += tensor.nbytes
        self._settle(_MAX_OUTGOING_BYTES)
        return _Kept(host, sent)

    def _settle(self, max_bytes: int) -> None:
        """Let the computing stream wait for the oldest copies until at most `max_bytes` are on their way."""
        while self._outgoing and self._outgoing_bytes > max_bytes:
            sent, tensor = self._outgoing.popleft()
            torch.cuda.current_stream(self._device).wait_event(sent)
            self._outgoing_bytes -= tensor.nbytes

    def _unpack(self, kept: torch.Tensor | _Kept) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        tensor = None if kept.back is None else kept.back()
        if tensor is None:
            if kept.sent is not None:
                torch.cuda.current_stream(self._device).wait_event(kept.sent)
            # A copy on the CPU too: backward must read what was kept, not what it may alias.
            tensor = torch.empty_like(kept.host, device=self._device).copy_(kept.host, non_blocking=True)
            kept.back = weakref.ref(tensor)
        return tensor
