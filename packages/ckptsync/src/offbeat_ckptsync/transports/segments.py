"""Shared memory without names: anonymous files (memfd) that travel as open files and vanish with their last holder.

Nothing has to be unlinked, whoever dies when: the kernel frees the pages when the last mapping and the last open file
are gone. Nobody who is not handed the file can open it. Their size is sealed, so that no receiver can be made to fault.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import uuid
import weakref
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from offbeat_ckptsync.errors import TransferError
from offbeat_ckptsync.member.memory import Pages
from offbeat_ckptsync.threads import HostPages

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from offbeat_ckptsync.transports.line import Line
    from offbeat_ckptsync.values import Seat

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14: fault pages in, or say that there are none
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Lease(NamedTuple):
    """A receiving rank's claim on what is in a segment, for as long as its line is open."""

    line: Line
    seat: Seat
    version: int


class Segment:
    """The source's side: memory that it may write while nobody holds a lease on it."""

    def __init__(self, num_bytes: int) -> None:
        """Make a segment of `num_bytes`, with all its pages.

        Raises:
            TransferError: there is not that much memory.
        """
        self.id = uuid.uuid4().hex
        self.num_bytes = num_bytes
        self.leases: list[Lease] = []
        self.fd = os.memfd_create("offbeat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            size = max(num_bytes, mmap.PAGESIZE)
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            pages = HostPages(self.fd, size)
            _fill(self.fd, pages, size)
            pages.pin()
        except (OSError, ValueError) as error:
            os.close(self.fd)
            raise TransferError(
                f"shm: no shared memory for {num_bytes} bytes: {error}; free some, or choose another transport"
            ) from error
        self.memory = torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes]

    def is_free(self) -> bool:
        """Say whether nobody holds what is in it."""
        still = [lease for lease in self.leases if lease.line.is_open()]
        for lease in self.leases:
            if lease not in still:
                lease.line.close()
        self.leases = still
        return not still

    def close(self) -> None:
        """Let go of it; receivers that hold it keep it."""
        for lease in self.leases:
            lease.line.close()
        self.leases = []
        self.memory = self.memory.new_empty(0)
        fd, self.fd = self.fd, -1  # another file may get the number, and must not be sent for this one
        os.close(fd)


class Mapping:
    """A receiver's view of a segment, kept from sync to sync: page tables cost more than half a copy.

    It is private: a loader that writes into the tensors it is given changes nothing for others. Pages it wrote no
    longer follow the source, so a mapping that was written to is used once only (`written`, `is_spoilt`). For the same
    reason it is not pinned: that would write to all of them.
    """

    def __init__(self, segment_id: str, fd: int, num_bytes: int) -> None:
        """Map the open file `fd`, which is closed here.

        Raises:
            TransferError: it is too small, or its size is not sealed.
        """
        self.id = segment_id
        try:
            seals, size = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd).st_size
            if seals & fcntl.F_SEAL_SHRINK == 0 or size < num_bytes:
                raise TransferError(
                    f"shm: a segment of {size} bytes with seals {seals:#x} for {num_bytes} bytes; not taken"
                )
            self._pages = Pages(mmap.mmap(fd, size, access=mmap.ACCESS_COPY), num_bytes)
        finally:
            os.close(fd)
        self._base: torch.Tensor | None = None
        self._version = 0
        self._was_kept = False  # tensors over it outlived the sync that staged them

    def lend(self, lease: Line) -> torch.Tensor:
        """Return the bytes, uint8; `lease` is closed when the last tensor over them is gone."""
        array = self._pages.lend()
        weakref.finalize(array, lease.close)
        self._base = torch.from_numpy(array)
        self._version = self._base._version  # noqa: SLF001 -- torch has no public name for it
        return self._base

    def view(self) -> torch.Tensor:
        """Return the bytes, uint8, for copying out at once: no lease guards them."""
        return torch.from_numpy(self._pages.array())

    def written(self) -> bool:
        """Forget the tensor lent last; say whether anybody wrote into it, or into a view of it."""
        base, self._base = self._base, None
        written = base is not None and base._version != self._version  # noqa: SLF001 -- as above
        del base
        self._was_kept |= self._pages.is_lent()
        return written

    def is_spoilt(self) -> bool:
        """Say whether somebody who kept tensors over it, and has let go of them since, wrote into them.

        Torch does not count what is written through a parameter that was pointed here, so the kernel is asked.
        """
        if not self._was_kept or self._pages.is_lent():
            return False  # what is still in use is looked at when it is wanted again
        self._was_kept = False
        return _has_own_pages(self._pages.array())

    def is_shared(self, start: int, end: int) -> bool:
        """Say whether these bytes are those that all who map the segment see: none of their pages was written to here."""
        return not _has_own_pages(self._pages.array()[start:end])


def _has_own_pages(array: NDArray[np.uint8]) -> bool:
    """Say whether any page of a private mapping was copied for this process, which is what writing to it does.

    The kernel's word for each page is in /proc/self/pagemap (docs.kernel.org/admin-guide/mm/pagemap.html): bit 63 or 62
    where there is one, in memory or swapped out, bit 61 where it is still the file's. Where that cannot be read, yes.
    """
    first = array.ctypes.data // mmap.PAGESIZE
    num_pages = -(-(array.ctypes.data + len(array)) // mmap.PAGESIZE) - first
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(8 * first)
            words = np.frombuffer(file.read(8 * num_pages), dtype=np.uint64)
    except OSError:
        return True
    there, of_file = words >> np.uint64(62) != 0, words >> np.uint64(61) & np.uint64(1) != 0
    return len(words) < num_pages or bool((there & ~of_file).any())


def _fill(fd: int, pages: mmap.mmap, size: int) -> None:
    """Get all pages now: a page that is missing later ends the process with SIGBUS."""
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)  # where the kernel has them for shared memory
    try:
        pages.madvise(_POPULATE_WRITE)
    except OSError as error:
        if error.errno != 22:  # EINVAL: a kernel before 5.14
            raise
        os.posix_fallocate(fd, 0, size)
