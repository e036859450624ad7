"""Verified, transactional weight sync between a trainer and its generation replicas."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat_ckptsync.config import SyncConfig
    from offbeat_ckptsync.errors import (
        DigestError,
        ManifestError,
        PlanError,
        SyncError,
        SyncFailed,
        TransferError,
        VersionError,
    )
    from offbeat_ckptsync.interface import (
        BucketReceiver,
        BucketSender,
        Member,
        Source,
        WeightSink,
        WeightSource,
    )
    from offbeat_ckptsync.types import (
        Bucket,
        Echo,
        Flip,
        Manifest,
        Phase,
        Piece,
        Sent,
        SyncOffer,
        SyncReport,
        TensorSpec,
    )

# Public names and the module each lives in: importing the package stays cheap, torch comes with the first use.
_HOMES = {
    "SyncConfig": "config",
    "DigestError": "errors",
    "ManifestError": "errors",
    "PlanError": "errors",
    "SyncError": "errors",
    "SyncFailed": "errors",
    "TransferError": "errors",
    "VersionError": "errors",
    "BucketReceiver": "interface",
    "BucketSender": "interface",
    "Member": "interface",
    "Source": "interface",
    "WeightSink": "interface",
    "WeightSource": "interface",
    "Bucket": "types",
    "Echo": "types",
    "Flip": "types",
    "Manifest": "types",
    "Phase": "types",
    "Piece": "types",
    "Sent": "types",
    "SyncOffer": "types",
    "SyncReport": "types",
    "TensorSpec": "types",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = [
    "Bucket",
    "BucketReceiver",
    "BucketSender",
    "DigestError",
    "Echo",
    "Flip",
    "Manifest",
    "ManifestError",
    "Member",
    "Phase",
    "Piece",
    "PlanError",
    "Sent",
    "Source",
    "SyncConfig",
    "SyncError",
    "SyncFailed",
    "SyncOffer",
    "SyncReport",
    "TensorSpec",
    "TransferError",
    "VersionError",
    "WeightSink",
    "WeightSource",
]
