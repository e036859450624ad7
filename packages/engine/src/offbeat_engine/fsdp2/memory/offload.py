"""Weights, gradients and optimizer state that wait in host memory while nobody needs them on the device.

Tensors are not replaced: their storage is emptied and filled again, so whatever refers to them (FSDP, the
optimizer, views) goes on to do so, and the bits come back as they left. While they wait, their values must not
be read; `Offloadable.resident` says when they may be. On a CPU the same path runs with a second buffer in the same
memory: it shows that nothing changes, and saves nothing.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch

from offbeat_engine.fsdp2.weights.shards import local

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

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
