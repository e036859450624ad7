"""What the machine itself can do: the limits that syncs are held against. GB are 1e9 bytes."""

# torch types its distributed bindings in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportPrivateUsage=false

from __future__ import annotations

import ctypes
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from timed_weights import loaded_context
from torch.distributed import PrefixStore, ProcessGroupGloo
from torch.distributed.distributed_c10d import BroadcastOptions

from offbeat_ckptsync.errors import TransferError
from offbeat_ckptsync.toolkit.store import Store
from offbeat_ckptsync.transports.broadcast import CHUNK_BYTES, IN_FLIGHT, StoreForTorch

if TYPE_CHECKING:
    from collections.abc import Callable

_REPEATS = 5
_DEADLINE = timedelta(seconds=120)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """A way to broadcast a buffer: in calls of `num_bytes`, `in_flight` of them at a time."""

    num_bytes: int
    in_flight: int


PER_TENSOR = Calls(num_bytes=5 << 19, in_flight=1)
GLOO_CALLS = (
    Calls(num_bytes=1 << 30, in_flight=1),
    Calls(num_bytes=32 << 20, in_flight=1),
    PER_TENSOR,
    Calls(num_bytes=CHUNK_BYTES, in_flight=IN_FLIGHT),
)
"""How raw gloo is measured: a whole buffer at once, bucket by bucket, tensor by tensor (400 to a GiB, as weights are
usually sent), and in the chunks that our `broadcast` sends."""


def memcpy(num_bytes: int) -> float:
    """Return GB/s of copying `num_bytes` from one buffer to another, by one thread of torch's, the best of some."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    try:
        return num_bytes / _best(lambda: target.copy_(source)) / 1e9
    finally:
        torch.set_num_threads(threads)


def libc_memcpy(num_bytes: int) -> float:
    """Return the same of one call to the C library, which writes past the caches where it takes that for faster."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    return num_bytes / _best(lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), num_bytes)) / 1e9


def raw_gloo(num_bytes: int) -> dict[Calls, float]:
    """Return GB/s of broadcasting one buffer of `num_bytes` to one other process, per way of `GLOO_CALLS`.

    Nothing but the calls: no packing, no digests, no loading.

    Raises:
        TransferError: the other process did not come.
    """
    store = Store.serve("127.0.0.1")
    process = loaded_context().Process(target=_listen, args=(store.port, num_bytes), daemon=True)
    process.start()
    try:
        met_at = StoreForTorch(store, _DEADLINE.total_seconds())
        group = _group(met_at, 0)
        payload = torch.ones(num_bytes, dtype=torch.uint8)
        rates = {
            calls: num_bytes / _best(lambda calls=calls: _broadcast(group, payload, calls)) / 1e9
            for calls in GLOO_CALLS
        }
        process.join(30)
        return rates
    except RuntimeError as error:
        raise TransferError(f"raw gloo could not be measured: {error}") from error
    finally:
        process.kill()


def plain(rates: dict[Calls, float]) -> float:
    """Return the best of the plain ways: one call at a time. Ours, with its chunks in flight, is held against that."""
    return max(rate for calls, rate in rates.items() if calls.in_flight == 1)


def disk(num_bytes: int, folder: str) -> float:
    """Return GB/s of writing a file of `num_bytes` in `folder` and reading it back; the page cache helps both."""
    data, path = bytearray(num_bytes), Path(folder) / "offbeat-sync-bench"

    def there_and_back() -> None:
        path.write_bytes(data)
        with path.open("rb") as file:
            file.readinto(data)

    Path(folder).mkdir(parents=True, exist_ok=True)
    try:
        return num_bytes / _best(there_and_back) / 1e9
    finally:
        path.unlink(missing_ok=True)


def _best(work: Callable[[], object]) -> float:
    work()  # touches memory, opens connections
    best = float("inf")
    for _ in range(_REPEATS):
        mark = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - mark)
    return best


def _listen(port: int, num_bytes: int) -> None:
    torch.set_num_threads(1)
    limit_s = _DEADLINE.total_seconds()
    met_at = StoreForTorch(Store.join("127.0.0.1", port, limit_s), limit_s)
    group = _group(met_at, 1)
    payload = torch.zeros(num_bytes, dtype=torch.uint8)
    for calls in GLOO_CALLS:
        for _ in range(_REPEATS + 1):
            _broadcast(group, payload, calls)


def _group(met_at: StoreForTorch, rank: int) -> Any:  # noqa: ANN401 -- torch does not type it
    options = ProcessGroupGloo._Options()  # noqa: SLF001 -- torch gives no public way
    options._timeout = _DEADLINE  # noqa: SLF001 -- as above
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001 -- as above
    return ProcessGroupGloo(PrefixStore("bench", met_at), rank, 2, options)


def _broadcast(group: Any, payload: torch.Tensor, calls: Calls) -> None:  # noqa: ANN401 -- as above
    options: Any = BroadcastOptions()
    options.rootRank = 0
    options.timeout = _DEADLINE
    works: deque[Any] = deque()
    for start in range(0, payload.numel(), calls.num_bytes):
        works.append(group.broadcast([payload[start : start + calls.num_bytes]], options))
        if len(works) >= calls.in_flight:
            works.popleft().wait()
    for work in works:
        work.wait()
