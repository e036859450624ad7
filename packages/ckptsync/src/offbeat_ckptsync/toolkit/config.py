"""Settings of a weight sync, and the transports that can be set. Imports nothing heavy."""

# No `from __future__ import annotations` here: pydantic reads these annotations at run time.
import math
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Literal, cast

from offbeat_ckptsync.errors import SyncError
from offbeat_ckptsync.values import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat_ckptsync.seams import Transport

GROUP = "offbeat.transports"
"""Entry-point group: name = "module:factory", where the factory takes a `SyncConfig` and returns a `Transport`."""

_OURS = "offbeat_ckptsync.transports"
BUILT_IN = {
    "auto": f"{_OURS}.auto:AutoTransport",
    "broadcast": f"{_OURS}.broadcast:BroadcastTransport",
    "cuda_ipc": f"{_OURS}.cuda_ipc:CudaIpcTransport",
    "disk": f"{_OURS}.disk:DiskTransport",
    "loopback": f"{_OURS}.loopback:LoopbackTransport",
    "relay": f"{_OURS}.relay:RelayTransport",
    "shm": f"{_OURS}.shm:ShmTransport",
}
"""The transports of this package, in the form of entry points."""


def transport_names() -> list[str]:
    """Return the names that `make_transport` knows."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=GROUP))})


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """How weights travel. Each phase has its own deadline, in seconds.

    `transport` is a built-in name or one that a package adds through the entry-point group `offbeat.transports`; "auto"
    picks for each sync by where its ranks are.
    `host` is the address the source listens on and receivers connect to: loopback unless told otherwise. Who does not
    know `secret` takes no part where ranks meet at a store; it is in no offer, but an engine's workers are given it in these settings. `device`
    is where payloads are when they travel: "cuda" means NCCL. `allow_cast` lets a receiver convert floating dtypes.
    Buckets have `bucket_mib`; without it 32 in host memory and 512 on GPUs (where nothing was measured yet).
    `silent` says what happens when a member gives no word within the deadline of a phase before the flip while others do: "fence"
    takes it out, and the others get the new version; "fail" fails the sync, and all keep the old version.
    `canary` asks every replica a fixed question after its flip; an answer further than
    `canary_tolerance` (log-probs: nats) from what most say fences it off. It needs room for a few requests at once.
    """

    transport: str = "broadcast"
    bucket_mib: float | None = field(default=None, metadata={"more_than": 0})
    """32 in host memory, 512 on GPUs"""
    begin_timeout_s: float = 30.0
    transfer_timeout_s: float = 300.0
    verify_timeout_s: float = 30.0
    flip_timeout_s: float = 60.0
    commit_timeout_s: float = 30.0
    host: str = "127.0.0.1"
    secret: str = field(default="", repr=False)
    device: Literal["cpu", "cuda"] = "cpu"
    allow_cast: bool = False
    disk_path: str = ""  # folder shared by all members; needed by `disk`
    silent: Literal["fence", "fail"] = "fence"
    canary: bool = False
    canary_tolerance: float = 0.05

    def __post_init__(self) -> None:
        """Refuse a transport that nobody has, with the names there are, and numbers that cannot be: `ValueError`."""
        require_transport(self.transport)
        for name in ("bucket_mib", *(f"{phase}_timeout_s" for phase in Phase)):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"`{name}` must be above 0 and finite, got {value}")
        if self.device not in _BUCKET_MIB:
            raise ValueError(f"`device` is one of {', '.join(_BUCKET_MIB)}, got {self.device!r}")

    @property
    def bucket_bytes(self) -> int:
        """Bytes of a bucket on the wire, at most."""
        mib = _BUCKET_MIB[self.device] if self.bucket_mib is None else self.bucket_mib
        return int(mib * (1 << 20))


_BUCKET_MIB = {"cpu": 32.0, "cuda": 512.0}
"""A bucket on a GPU costs the latency of a ring and a look at the device, which larger ones share."""


def require_transport(name: str) -> None:
    """Raise `ValueError` unless a transport has this name."""
    if name not in BUILT_IN and name not in (names := transport_names()):
        raise ValueError(f"no transport is called {name!r}; there are {', '.join(names)}")


def make_transport(name: str, config: SyncConfig) -> "Transport":
    """Make the transport called `name`; both sides of a sync make the same one.

    Raises:
        SyncError: no transport has this name.
    """
    if name in BUILT_IN:
        found = [EntryPoint(name=name, value=BUILT_IN[name], group=GROUP)]
    else:
        found = [*entry_points(group=GROUP, name=name)]
    if not found:
        raise SyncError(f"no transport is called {name!r}; there are {', '.join(transport_names())}")
    return cast("Callable[[SyncConfig], Transport]", found[0].load())(config)
