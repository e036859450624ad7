"""The names of the transports: those built in, and those of other packages. Imports nothing heavy."""

from __future__ import annotations

from importlib.metadata import entry_points

GROUP = "offbeat.transports"
"""Entry-point group: name = "module:factory", where the factory takes a `SyncConfig` and returns a `Transport`."""

BUILT_IN = ("auto", "broadcast", "cuda_ipc", "disk", "loopback", "shm")


def transport_names() -> list[str]:
    """Return the names that `make_transport` knows."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=GROUP))})


def require_transport(name: str) -> None:
    """Raise `ValueError` unless a transport has this name."""
    if name not in BUILT_IN and name not in (names := transport_names()):
        raise ValueError(f"no transport is called {name!r}; there are {', '.join(names)}")
