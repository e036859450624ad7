"""A member as a source: what it serves, from its staged copy, for a joiner while the trainer goes on training."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from offbeat_ckptsync.config import make_transport
from offbeat_ckptsync.control.members import LocalMember
from offbeat_ckptsync.network.agent import Agent
from offbeat_ckptsync.seams import WeightSource
from offbeat_ckptsync.source.publisher import LocalSource, Publisher

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from offbeat_ckptsync.config import SyncConfig
    from offbeat_ckptsync.control.members import AskCanary, GenerationGate
    from offbeat_ckptsync.member.receiver import Receiver
    from offbeat_ckptsync.values import Manifest


class StagedCopy(WeightSource):
    """The committed bytes that a receiver still has beside its live weights.

    Only transports that stage in the receiver's own memory leave such a copy (not `shm`, whose segment goes back to
    the source). Publish it with the bucket size of the sync that brought it: the label covers the bucket plan.
    """

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def manifest(self) -> Manifest:
        """Return what is served; raises `TransferError` where no copy is kept."""
        return self._receiver.copy()[0]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield views of the copy; raises `TransferError` where none is kept."""
        yield from self._receiver.copy()[1]


def agent_of(
    receiver: Receiver,
    config: SyncConfig,
    secret: str,
    *,
    gate: GenerationGate | None = None,
    canary: AskCanary | None = None,
) -> Agent:
    """Return an agent for a replica in this process: it takes weights, and hands its copy on to joiners."""
    member = LocalMember(receiver, make_transport(config.transport, config), gate=gate, canary=canary)
    # A copy goes to joiners, who hold nothing that a delta could stand on.
    source = LocalSource(Publisher(StagedCopy(receiver), dataclasses.replace(config, delta="off")))
    return Agent(receiver.seat.member, secret, member=member, source=source, host=config.host)
