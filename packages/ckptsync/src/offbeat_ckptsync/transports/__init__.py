"""The transports, by name; other packages add theirs through the entry-point group `offbeat.transports`."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, cast

from offbeat_ckptsync.errors import SyncError
from offbeat_ckptsync.registry import GROUP, transport_names

__all__ = ["GROUP", "make_transport", "transport_names"]

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat_ckptsync.config import SyncConfig
    from offbeat_ckptsync.interface import Transport


def make_transport(name: str, config: SyncConfig) -> Transport:
    """Make the transport called `name`; both sides of a sync make the same one.

    Raises:
        SyncError: no transport has this name.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name](config)
    for point in entry_points(group=GROUP, name=name):
        factory = cast("Callable[[SyncConfig], Transport]", point.load())
        return factory(config)
    raise SyncError(f"no transport is called {name!r}; there are {', '.join(transport_names())}")


def _loopback(_config: SyncConfig) -> Transport:
    from offbeat_ckptsync.transports.loopback import LoopbackTransport

    return LoopbackTransport()


def _broadcast(config: SyncConfig) -> Transport:
    from offbeat_ckptsync.transports.broadcast import BroadcastTransport

    return BroadcastTransport(host=config.host, device=config.device)


def _shm(_config: SyncConfig) -> Transport:
    from offbeat_ckptsync.transports.shm import ShmTransport

    return ShmTransport()


def _cuda_ipc(_config: SyncConfig) -> Transport:
    from offbeat_ckptsync.transports.cuda_ipc import CudaIpcTransport

    return CudaIpcTransport()


def _auto(config: SyncConfig) -> Transport:
    from offbeat_ckptsync.transports.auto import AutoTransport

    return AutoTransport(lambda name: make_transport(name, config), host=config.host, device=config.device)


def _disk(config: SyncConfig) -> Transport:
    from offbeat_ckptsync.transports.disk import DiskTransport

    return DiskTransport(config.disk_path)


_BUILT_IN: dict[str, Callable[[SyncConfig], Transport]] = {
    "loopback": _loopback,
    "broadcast": _broadcast,
    "disk": _disk,
    "auto": _auto,
    "cuda_ipc": _cuda_ipc,
    "shm": _shm,
}
