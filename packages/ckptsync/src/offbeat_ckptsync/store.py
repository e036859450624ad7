"""A small key-value store over TCP for rendezvous and control mail: torch's TCPStore on one address."""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta

from torch.distributed import TCPStore

from offbeat_ckptsync.errors import TransferError


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
        """Return what is under `key`, or None; does not wait. What is no UTF-8 comes with marks in its place."""
        return self.raw.get(key).decode(errors="replace") if self.raw.check([key]) else None

    def delete(self, key: str) -> None:
        """Forget `key`; harmless when it is not there."""
        self.raw.delete_key(key)

    def clear(self, keep: str = "") -> None:
        """Forget every key that does not begin with `keep`; with "" all."""
        for key in self.raw.list_keys():
            if not (keep and key.startswith(keep)):
                self.raw.delete_key(key)


def is_loopback(host: str) -> bool:
    """Say whether `host`, a name or an address, leads every machine to itself; so does 0.0.0.0."""
    try:
        address = ipaddress.ip_address(host)
        return address.is_loopback or address.is_unspecified
    except ValueError:
        return host == "localhost"


def own_address(host: str, port: int) -> str:
    """Return the address of this machine from which `host` is reached; `host` itself where that is this machine's."""
    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)  # sends nothing: the kernel only chooses the way
        return str(probe.getsockname()[0])


_EACH = timedelta(seconds=30)  # one request to a store that answers takes microseconds
