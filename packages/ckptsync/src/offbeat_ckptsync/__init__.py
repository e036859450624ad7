"""Verified, transactional weight sync between a trainer and its generation replicas."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat_ckptsync.config import SyncConfig, make_transport
    from offbeat_ckptsync.control.manager import CheckpointEngineManager
    from offbeat_ckptsync.control.members import ControlMember, LocalMember
    from offbeat_ckptsync.control.ranks import Mailbox
    from offbeat_ckptsync.errors import SyncError, SyncFailed
    from offbeat_ckptsync.member.receiver import Receiver
    from offbeat_ckptsync.member.sinks import ModuleSink, ModuleSource
    from offbeat_ckptsync.network.agent import Agent, agent_of
    from offbeat_ckptsync.network.membership import Membership
    from offbeat_ckptsync.seams import Transport, WeightSink, WeightSource
    from offbeat_ckptsync.source.sender import LocalSource, Sender
    from offbeat_ckptsync.values import Manifest, Seat, SyncReport

# Where each public name lives: importing the package stays cheap, torch comes with the first use.
_HOMES = {
    "Agent": "network.agent",
    "CheckpointEngineManager": "control.manager",
    "ControlMember": "control.members",
    "LocalMember": "control.members",
    "LocalSource": "source.sender",
    "Mailbox": "control.ranks",
    "Manifest": "values",
    "Membership": "network.membership",
    "ModuleSink": "member.sinks",
    "ModuleSource": "member.sinks",
    "Receiver": "member.receiver",
    "Seat": "values",
    "Sender": "source.sender",
    "SyncConfig": "config",
    "SyncError": "errors",
    "SyncFailed": "errors",
    "SyncReport": "values",
    "Transport": "seams",
    "WeightSink": "seams",
    "WeightSource": "seams",
    "agent_of": "network.agent",
    "make_transport": "config",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; most names are in its folders, see its README"
        )
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = [
    "Agent",
    "CheckpointEngineManager",
    "ControlMember",
    "LocalMember",
    "LocalSource",
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
