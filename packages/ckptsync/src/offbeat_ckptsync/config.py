"""Settings of a weight sync."""

# No `from __future__ import annotations` here: pydantic reads these annotations at run time.
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """How weights travel. Each phase has its own deadline, in seconds."""

    transport: Literal["loopback", "broadcast", "disk"] = "broadcast"
    bucket_mib: float = 64.0
    begin_timeout_s: float = 30.0
    transfer_timeout_s: float = 300.0
    verify_timeout_s: float = 30.0
    flip_timeout_s: float = 60.0
    disk_path: str = ""  # folder shared by all members; needed by `disk`
