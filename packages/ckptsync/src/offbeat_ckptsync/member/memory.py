"""The memory of one rank that weights are staged in, kept from sync to sync: fresh pages cost more than copying."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np
import torch

from offbeat_ckptsync.plan.buckets import tensor_views
from offbeat_ckptsync.threads import HostPages

if TYPE_CHECKING:
    import mmap

    from numpy.typing import NDArray

    from offbeat_ckptsync.values import Bucket, Manifest


class Pages:
    """The first `num_bytes` of a mapping."""

    def __init__(self, mapping: mmap.mmap, num_bytes: int) -> None:
        """Look at `mapping`; it lives as long as any array over it."""
        self._mapping = mapping
        self._num_bytes = num_bytes
        self._lent: weakref.ref[NDArray[np.uint8]] | None = None

    def array(self) -> NDArray[np.uint8]:
        """Return the bytes, for a look that nobody needs to know of."""
        return np.frombuffer(self._mapping, dtype=np.uint8, count=self._num_bytes)

    def lend(self) -> NDArray[np.uint8]:
        """Return the bytes; the array lives as long as the storage of any tensor made from it."""
        array = None if self._lent is None else self._lent()
        if array is None:
            array = self.array()
            self._lent = weakref.ref(array)
        return array

    def is_lent(self) -> bool:
        """Say whether what was lent is still in use."""
        return self._lent is not None and self._lent() is not None


class Memory:
    """Bytes on one device; in host memory it is known whether a tensor over them is still in use."""

    def __init__(self, num_bytes: int, device: str) -> None:
        """Take `num_bytes` of zeros on a torch device type such as "cpu"."""
        self.num_bytes = num_bytes
        self.device = device
        self._bytes: Pages | torch.Tensor
        if device == "cpu":
            self._bytes = Pages(HostPages.private(num_bytes), num_bytes)
        else:
            self._bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def lend(self) -> torch.Tensor:
        """Return all bytes, uint8 [num_bytes], as they were left; ask `is_lent` before writing to them."""
        return torch.from_numpy(self._bytes.lend()) if isinstance(self._bytes, Pages) else self._bytes

    def is_lent(self) -> bool:
        """Say whether a tensor over these bytes lives; of a device's memory nobody knows, and it says no."""
        return isinstance(self._bytes, Pages) and self._bytes.is_lent()


class StagingPool:
    """Staging memory that is not in use, and a copy of what is served, where there is one.

    After a load the memory that was staged in holds such a copy, which joiners may be given. A sink that serves weights from
    where they were staged has no copy beside them; two memories take turns then, and joiners may be given what is served.
    """

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._copy: Memory | None = None
        self._plan: tuple[Manifest, tuple[Bucket, ...]] | None = None  # how to read it
        self._others: list[Memory] = []
        # What is served from where it was staged.
        self._served: tuple[Manifest, list[tuple[str, torch.Tensor]]] | None = None

    def take(self) -> Memory | None:
        """Return memory to stage in that nobody looks at, if there is some; the copy is given up for it."""
        self.forget()
        free = [memory for memory in self._others if not memory.is_lent()]
        self._others = [memory for memory in self._others if memory not in free]
        return free[-1] if free else None

    def put_back(self, memory: Memory | None) -> None:
        """Take memory back whose content is not to be read from here; None where it was the transport's."""
        if memory is not None:
            self._others.append(memory)

    def keep(self, memory: Memory | None, manifest: Manifest, buckets: tuple[Bucket, ...]) -> None:
        """Take memory back that holds what is served now; None where it was the transport's."""
        self.forget()
        self._served = None
        self._copy, self._plan = memory, None if memory is None else (manifest, buckets)

    def serve(self, manifest: Manifest, views: list[tuple[str, torch.Tensor]]) -> None:
        """Note that live weights are these views, until something else is kept."""
        self._served = manifest, views

    def forget(self) -> None:
        """Trust the copy no longer; its memory can be staged in."""
        self.put_back(self._copy)
        self._copy = self._plan = None

    def read(self) -> tuple[Manifest, list[tuple[str, torch.Tensor]]] | None:
        """Return the copy as views of its memory, or what is served from where it was staged, or None."""
        if self._plan is None or self._copy is None:
            return self._served
        return self._plan[0], list(tensor_views(*self._plan, self._copy.lend()))
