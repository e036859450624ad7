"""A small key-value store over TCP for rendezvous and control mail: torch's TCPStore with deadlines that name keys."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import TCPStore

from offbeat_ckptsync.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Callable

_POLL_S = 0.001
_POLL_MAX_S = 0.01


class Store:
    """One connection to a store; hosts it too when made by `serve`."""

    def __init__(self, store: TCPStore, host: str, port: int) -> None:
        self.raw = store
        self.host = host
        self.port = port

    @classmethod
    def serve(cls, host: str, port: int = 0) -> Store:
        """Host a store on `port` (0: a free one) of `host`, an address of this machine; nothing else is listened on."""
        # TCPStore by itself listens on every interface; a socket handed in keeps it to this one.
        listener = socket.create_server((host, port), backlog=512)
        port = int(listener.getsockname()[1])
        store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=_EACH,
        )
        return cls(store, host, port)

    @classmethod
    def join(cls, host: str, port: int, timeout_s: float) -> Store:
        """Connect to a store; raises `TransferError` when nobody answers in time."""
        try:
            store = TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
            )
        except (RuntimeError, ValueError) as error:
            raise TransferError(
                f"no store answers at {host}:{port} within {timeout_s:g} s: {error}"
            ) from error
        store.set_timeout(_EACH)
        return cls(store, host, port)

    def set(self, key: str, text: str) -> None:
        """Write `text` under `key`."""
        self.raw.set(key, text)

    def get(self, key: str) -> str | None:
        """Return what is under `key`, or None; does not wait."""
        return self.raw.get(key).decode() if self.raw.check([key]) else None

    def delete(self, key: str) -> None:
        """Forget `key`; harmless when it is not there."""
        self.raw.delete_key(key)

    def wait(self, keys: list[str], timeout_s: float, stop: Callable[[], bool]) -> list[str]:
        """Wait until all `keys` are there; return those that are not when the time is over or `stop()` says so."""
        deadline = time.monotonic() + timeout_s
        pause_s = _POLL_S
        missing = keys
        while True:
            missing = [key for key in missing if not self.raw.check([key])]
            if not missing or stop() or time.monotonic() > deadline:
                return missing
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _POLL_MAX_S)


_EACH = timedelta(seconds=30)  # one request to a store that answers takes microseconds
