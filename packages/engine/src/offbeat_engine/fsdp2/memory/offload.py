"""Weights, gradients and optimizer state that wait in host memory while nobody needs them on the device.

Tensors are not replaced: their storage is emptied and filled again, so whatever refers to them (FSDP, the
optimizer, views) goes on to do so, and the bits come back as they left. While they wait, their values must not
be read; `Offloadable.resident` says when they may be. On a CPU the same path runs with a second buffer in the same
memory: it shows that nothing changes, and saves nothing.

What backward will need, kept in host memory between the two passes.

Every tensor that autograd saves in a forward pass goes to the host and comes back when backward asks for it. On a
GPU both ways are asynchronous, on streams of their own over pinned memory: out while later layers compute, and back
ahead of the layers that ask, for backward asks in the reverse order of forward. Weights
stay: FSDP frees and gathers them itself. With activation checkpointing only the inputs of the layers are saved, so
only they travel. On a CPU the same path copies within the same memory and saves nothing.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from offbeat_engine.fsdp2.weights.export import local

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Hashable, Iterable, Iterator


T = TypeVar("T")
W = TypeVar("W", torch.Tensor, torch.Tensor | None)


class Offloadable:
    """A set of tensors, as `tensors()` lists them, that is on the device while somebody holds it and may wait elsewhere."""

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._tensors = tensors
        self._holders = 0
        self._waits_in_host = False
        self._away: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    def stay(self, *, in_host: bool) -> None:
        """Decide where they are while nobody holds them; that begins now, or when the last holder lets go."""
        self._waits_in_host = in_host
        if not self._holders:
            self._send() if in_host else self._fetch()

    @contextmanager
    def resident(self) -> Generator[None]:
        """Have them on the device inside."""
        if not self._holders:
            self._fetch()
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            if not self._holders and self._waits_in_host:
                self._send()

    def handed_out(self, named: Iterable[tuple[T, W]]) -> Iterator[tuple[T, W]]:
        """Yield `named` while they are on the device; what shares memory with them must not outlive that, so it is copied."""
        with self.resident():
            addresses: set[int] = set()  # the same for the whole stream
            for name, tensor in named:
                if tensor is not None and self._waits_in_host:
                    addresses = addresses or self.addresses()
                    if tensor.untyped_storage().data_ptr() in addresses:
                        tensor = tensor.clone()  # the live one is about to leave
                yield name, tensor

    def addresses(self) -> set[int]:
        """Return where their memory begins while they are on the device: what lies there is lost when they leave."""
        return {storage.data_ptr() for storage in self._storages()}

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        """Yield each storage once: gradients of one reduction, and tied weights, share theirs."""
        seen: set[int] = set()
        for tensor in self._tensors():
            storage = local(tensor.detach()).untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage

    def _send(self) -> None:
        if self._away:
            return
        copies: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        for storage in self._storages():
            # Pinned, so that the copies neither wait for the CPU nor for one another.
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
            host.copy_(_bytes(storage), non_blocking=True)
            copies.append((storage, host))
        cuda = torch.cuda.is_initialized()
        if cuda:
            torch.cuda.synchronize()  # also streams of FSDP that read the weights
        self._away = copies  # whole: a copy that failed has changed nothing
        for storage, _ in copies:
            storage.resize_(0)
        if cuda:
            torch.cuda.empty_cache()  # to others on this device (a sleeping engine shares it), not only to us

    def _fetch(self) -> None:
        for storage, host in self._away:
            storage.resize_(host.nbytes)
            # Ordered before all later work of this stream, which FSDP's own streams wait for.
            _bytes(storage).copy_(host, non_blocking=True)
        self._away.clear()


def own_memory(module: torch.nn.Module) -> None:
    """Copy parameters whose memory cannot be let go of (a file mapped into memory) to memory of their own."""
    for param in module.parameters():
        if not param.untyped_storage().resizable():
            param.data = param.data.clone()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


# Device memory that copies under way may hold: they fall behind where computing is faster than the bus.
_MAX_OUTGOING_BYTES = 1 << 29
# Device memory for what comes back before backward asks for it.
_MAX_AHEAD_BYTES = 1 << 28


@dataclass(slots=True, eq=False)
class _Kept:
    """One tensor in host memory; `sent` is done when it is whole, `back` is its latest copy on the device.

    `before` was kept before it, so is asked for after it. `ahead` has come, or is coming until `came`, unasked.
    """

    host: torch.Tensor
    sent: torch.cuda.Event | None
    before: _Kept | None = None
    back: weakref.ref[torch.Tensor] | None = None
    ahead: torch.Tensor | None = None
    came: torch.cuda.Event | None = None


class HostActivations:
    """Keeps what forward passes inside `kept()` save; make one per step. `num_bytes` counts what went out."""

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = 0
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._outgoing: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self._outgoing_bytes = 0
        self._known: dict[Hashable, tuple[object, _Kept]] = {}
        self._return = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._next: _Kept | None = None  # in forward the latest, in backward the next to come back unasked
        self._ahead_bytes = 0

    @contextmanager
    def kept(self) -> Generator[None]:
        """Send what a forward pass inside saves; its backward pass may run outside."""
        self._next, self._ahead_bytes = None, 0
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
            self._next = self._send(tensor, self._next)
            self._known[key] = (alive, self._next)
        return self._known[key][1]

    def _send(self, tensor: torch.Tensor, before: _Kept | None) -> _Kept:
        self.num_bytes += tensor.nbytes
        host = torch.empty_like(tensor, device="cpu", pin_memory=self._stream is not None)
        if self._stream is None:
            return _Kept(host.copy_(tensor), None, before)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        sent = torch.cuda.Event()
        sent.record(self._stream)
        # We hold the tensor until its copy is known to be done before whatever reuses the memory.
        self._outgoing.append((sent, tensor))
        self._outgoing_bytes += tensor.nbytes
        self._settle(_MAX_OUTGOING_BYTES)
        return _Kept(host, sent, before)

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
            if kept.ahead is None:
                self._fetch(kept)
                self._ahead_bytes += kept.host.nbytes
            tensor = self._taken(kept)
            kept.back = weakref.ref(tensor)
        while self._next is not None and self._ahead_bytes + self._next.host.nbytes <= _MAX_AHEAD_BYTES:
            coming, self._next = self._next, self._next.before
            if coming.back is None:  # not asked for out of turn
                self._fetch(coming)
                self._ahead_bytes += coming.host.nbytes
        return tensor

    def _fetch(self, kept: _Kept) -> None:
        """Begin to bring `kept` back."""
        if self._return is None:
            # A copy on the CPU too: backward must read what was kept, not what it may alias.
            kept.ahead = torch.empty_like(kept.host, device=self._device).copy_(kept.host)
            return
        if kept.sent is not None:
            self._return.wait_event(kept.sent)
        with torch.cuda.stream(self._return):
            kept.ahead = torch.empty_like(kept.host, device=self._device).copy_(kept.host, non_blocking=True)
        kept.came = torch.cuda.Event()
        kept.came.record(self._return)

    def _taken(self, kept: _Kept) -> torch.Tensor:
        """Return what `_fetch` brought, for the computing stream."""
        tensor, kept.ahead = kept.ahead, None
        assert tensor is not None
        self._ahead_bytes -= kept.host.nbytes
        if kept.came is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(kept.came)
            # Its memory is of the other stream, and must not go back there too early.
            tensor.record_stream(stream)
        return tensor
