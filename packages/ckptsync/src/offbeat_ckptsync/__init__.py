"""Verified, transactional weight sync between a trainer and its generation replicas."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat_ckptsync.agent import Agent
    from offbeat_ckptsync.canary import module_canary
    from offbeat_ckptsync.config import SyncConfig
    from offbeat_ckptsync.errors import (
        DigestError,
        LoadError,
        ManifestError,
        PhaseError,
        PlanError,
        SyncError,
        SyncFailed,
        TransferError,
        VersionError,
        WireError,
    )
    from offbeat_ckptsync.hybrid import HybridMember, SleepingGate
    from offbeat_ckptsync.interface import (
        BucketReceiver,
        BucketSender,
        CanaryMember,
        CommittingMember,
        DeltaReceiver,
        DeltaSender,
        DeltaTransport,
        Member,
        PeerMember,
        PickingReceiver,
        SlicedMember,
        SlicedSink,
        Source,
        SupervisedMember,
        Transport,
        WeightSink,
        WeightSource,
    )
    from offbeat_ckptsync.mailbox import Mailbox
    from offbeat_ckptsync.manager import CheckpointEngineManager
    from offbeat_ckptsync.manifest import diff_manifests, make_manifest, manifest_of
    from offbeat_ckptsync.members import ControlMember, GenerationGate, LocalMember
    from offbeat_ckptsync.membership import Membership
    from offbeat_ckptsync.peer import StagedCopy, agent_of
    from offbeat_ckptsync.plan import plan_buckets
    from offbeat_ckptsync.receiver import Receiver, State
    from offbeat_ckptsync.registry import transport_names
    from offbeat_ckptsync.sender import send_weights, walk
    from offbeat_ckptsync.sinks import CastSource, DictSink, ModuleSink, ModuleSource, specs_of
    from offbeat_ckptsync.source import LocalSource, Publisher
    from offbeat_ckptsync.transports import make_transport
    from offbeat_ckptsync.types import (
        Bucket,
        Cut,
        Echo,
        Flip,
        Label,
        Manifest,
        Phase,
        Piece,
        Registration,
        Seat,
        Sent,
        Status,
        SyncOffer,
        SyncReport,
        TensorSpec,
    )
    from offbeat_ckptsync.worker import Worker

# Public names and the module each lives in: importing the package stays cheap, torch comes with the first use.
_HOMES = {
    "Agent": "agent",
    "module_canary": "canary",
    "SyncConfig": "config",
    "DigestError": "errors",
    "LoadError": "errors",
    "ManifestError": "errors",
    "PhaseError": "errors",
    "PlanError": "errors",
    "SyncError": "errors",
    "SyncFailed": "errors",
    "TransferError": "errors",
    "VersionError": "errors",
    "WireError": "errors",
    "HybridMember": "hybrid",
    "SleepingGate": "hybrid",
    "BucketReceiver": "interface",
    "BucketSender": "interface",
    "CanaryMember": "interface",
    "CommittingMember": "interface",
    "DeltaReceiver": "interface",
    "DeltaSender": "interface",
    "DeltaTransport": "interface",
    "Member": "interface",
    "PeerMember": "interface",
    "PickingReceiver": "interface",
    "SlicedMember": "interface",
    "SlicedSink": "interface",
    "Source": "interface",
    "SupervisedMember": "interface",
    "Transport": "interface",
    "WeightSink": "interface",
    "WeightSource": "interface",
    "Mailbox": "mailbox",
    "CheckpointEngineManager": "manager",
    "diff_manifests": "manifest",
    "make_manifest": "manifest",
    "manifest_of": "manifest",
    "ControlMember": "members",
    "GenerationGate": "members",
    "LocalMember": "members",
    "Membership": "membership",
    "StagedCopy": "peer",
    "agent_of": "peer",
    "plan_buckets": "plan",
    "Receiver": "receiver",
    "State": "receiver",
    "send_weights": "sender",
    "walk": "sender",
    "CastSource": "sinks",
    "DictSink": "sinks",
    "ModuleSink": "sinks",
    "ModuleSource": "sinks",
    "specs_of": "sinks",
    "LocalSource": "source",
    "Publisher": "source",
    "make_transport": "transports",
    "transport_names": "registry",
    "Bucket": "types",
    "Cut": "types",
    "Echo": "types",
    "Flip": "types",
    "Label": "types",
    "Manifest": "types",
    "Phase": "types",
    "Piece": "types",
    "Registration": "types",
    "Seat": "types",
    "Sent": "types",
    "Status": "types",
    "SyncOffer": "types",
    "SyncReport": "types",
    "TensorSpec": "types",
    "Worker": "worker",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = [
    "Agent",
    "Bucket",
    "BucketReceiver",
    "BucketSender",
    "CanaryMember",
    "CastSource",
    "CheckpointEngineManager",
    "CommittingMember",
    "ControlMember",
    "Cut",
    "DeltaReceiver",
    "DeltaSender",
    "DeltaTransport",
    "DictSink",
    "DigestError",
    "Echo",
    "Flip",
    "GenerationGate",
    "HybridMember",
    "Label",
    "LoadError",
    "LocalMember",
    "LocalSource",
    "Mailbox",
    "Manifest",
    "ManifestError",
    "Member",
    "Membership",
    "ModuleSink",
    "ModuleSource",
    "PeerMember",
    "Phase",
    "PhaseError",
    "PickingReceiver",
    "Piece",
    "PlanError",
    "Publisher",
    "Receiver",
    "Registration",
    "Seat",
    "Sent",
    "SleepingGate",
    "SlicedMember",
    "SlicedSink",
    "Source",
    "StagedCopy",
    "State",
    "Status",
    "SupervisedMember",
    "SyncConfig",
    "SyncError",
    "SyncFailed",
    "SyncOffer",
    "SyncReport",
    "TensorSpec",
    "TransferError",
    "Transport",
    "VersionError",
    "WeightSink",
    "WeightSource",
    "WireError",
    "Worker",
    "agent_of",
    "diff_manifests",
    "make_manifest",
    "make_transport",
    "manifest_of",
    "module_canary",
    "plan_buckets",
    "send_weights",
    "specs_of",
    "transport_names",
    "walk",
]
