"""Verified, transactional weight sync between a trainer and its generation replicas."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat_ckptsync.config import SyncConfig, make_transport
    from offbeat_ckptsync.control.manager import CheckpointEngineManager
    from offbeat_ckptsync.control.members import ControlMember, LocalMember, LockGate
    from offbeat_ckptsync.control.ranks import Mailbox
    from offbeat_ckptsync.errors import SyncError, SyncFailed
    from offbeat_ckptsync.member.receiver import Receiver
    from offbeat_ckptsync.member.sinks import ModuleSink, ModuleSource
    from offbeat_ckptsync.network.agent import Agent, agent_of
    from offbeat_ckptsync.network.membership import Membership
    from offbeat_ckptsync.seams import NO_TRAFFIC, GenerationGate, Transport, WeightSink, WeightSource
    from offbeat_ckptsync.source.sender import LocalSource, Sender
    from offbeat_ckptsync.values import Manifest, Seat, SyncReport

_FOLDERS = {
    "config": ("SyncConfig", "make_transport"),
    "control.manager": ("CheckpointEngineManager",),
    "control.members": ("ControlMember", "LocalMember", "LockGate"),
    "control.ranks": ("Mailbox",),
    "errors": ("SyncError", "SyncFailed"),
    "member.receiver": ("Receiver",),
    "member.sinks": ("ModuleSink", "ModuleSource"),
    "network.agent": ("Agent", "agent_of"),
    "network.membership": ("Membership",),
    "seams": ("NO_TRAFFIC", "GenerationGate", "Transport", "WeightSink", "WeightSource"),
    "source.sender": ("LocalSource", "Sender"),
    "values": ("Manifest", "Seat", "SyncReport"),
}
"""Where public names live: importing the package stays cheap, torch comes with the first use."""


def __getattr__(name: str) -> object:
    for module, names in _FOLDERS.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}; most names are in its folders, see its README"
    )


__all__ = [
    "NO_TRAFFIC",
    "Agent",
    "CheckpointEngineManager",
    "ControlMember",
    "GenerationGate",
    "LocalMember",
    "LocalSource",
    "LockGate",
    "Mailbox",
    "Manifest",
    "Membership",
    "ModuleSink",
    "ModuleSource",
    "Receiver",
    "Seat",
    "Sender",
    "SyncConfig",
    "SyncError",
    "SyncFailed",
    "SyncReport",
    "Transport",
    "WeightSink",
    "WeightSource",
    "agent_of",
    "make_transport",
]
