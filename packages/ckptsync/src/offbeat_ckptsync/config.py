"""Settings of a weight sync."""

# No `from __future__ import annotations` here: pydantic reads these annotations at run time.
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """How weights travel. Each phase has its own deadline, in seconds.

    `host` is the address the source listens on and receivers connect to: loopback unless told otherwise. `device`
    is where payloads are when they travel: "cuda" means NCCL. `allow_cast` lets a receiver convert floating dtypes.
    """

    transport: Literal["loopback", "broadcast", "disk"] = "broadcast"
    bucket_mib: float = 32.0
    begin_timeout_s: float = 30.0
    transfer_timeout_s: float = 300.0
    verify_timeout_s: float = 30.0
    flip_timeout_s: float = 60.0
    host: str = "127.0.0.1"
    device: Literal["cpu", "cuda"] = "cpu"
    allow_cast: bool = False
    disk_path: str = ""  # folder shared by all members; needed by `disk`
