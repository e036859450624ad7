"""Real syncs between processes, timed from begin to commit."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from timed_weights import Replica, Weights, loaded_context

from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.control.members import ControlMember
from offbeat_ckptsync.control.ranks import Mailbox
from offbeat_ckptsync.ends.sender import LocalSource, Sender
from offbeat_ckptsync.ends.sinks import ModuleSource
from offbeat_ckptsync.errors import DigestError, TransferError
from offbeat_ckptsync.seams import NO_TRAFFIC
from offbeat_ckptsync.toolkit.wire import decode, encode
from offbeat_ckptsync.values import SyncReport

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from offbeat_ckptsync.toolkit.config import SyncConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is synced, how often, and to how many processes. `num_threads` load in each of them.

    Weights are on `device` on all sides. With `adopts` they serve weights from where they lie, where the transport lets
    them. `prepare`, a function of a module, is called first in each process, say to leave out what is to be measured.
    """

    num_bytes: int
    num_tensors: int
    num_receivers: int
    num_syncs: int
    num_threads: int = 1
    adopts: bool = False
    device: str = "cpu"
    prepare: Callable[[], None] | None = None


def measure(load: Load, config: SyncConfig) -> list[SyncReport]:
    """Start receiving processes, sync changed weights `num_syncs` times after a first one, and return the reports.

    The first sync, which makes connections and touches fresh memory, leads the list. For a process of its own where
    `prepare` changes something.

    Raises:
        DigestError: a process does not serve what was sent.
    """
    if load.prepare is not None:
        load.prepare()
    return asyncio.run(_measure(load, config))


def measure_apart(load: Load, config: SyncConfig) -> list[SyncReport]:
    """`measure` in a process of its own, so that measurements share neither memory nor settings.

    Raises:
        TransferError: it failed, or took longer than ten minutes; the message says how it failed.
    """
    context = loaded_context()
    near, far = context.Pipe()
    process = context.Process(target=_measure_into, args=(far, load, config))
    process.start()
    far.close()
    try:
        if not near.poll(_LIMIT_S):
            raise TransferError(f"syncs over {config.transport} took longer than {_LIMIT_S:g} s")
        answer = json.loads(near.recv_bytes())
    except EOFError as error:
        raise TransferError(f"the process measuring {config.transport} died; see its output") from error
    finally:
        near.close()
        process.join(_END_S)
        if process.is_alive():
            process.kill()
    if isinstance(answer, str):
        raise TransferError(f"syncs over {config.transport}: {answer}")
    return [decode(SyncReport, report) for report in answer]


_LIMIT_S = 600.0
_END_S = 30.0


def _measure_into(pipe: Connection, load: Load, config: SyncConfig) -> None:
    try:
        answer: object = [encode(report) for report in measure(load, config)]
    except Exception as error:  # noqa: BLE001 -- becomes the other side's exception
        answer = repr(error)
    pipe.send_bytes(json.dumps(answer).encode())


async def _measure(load: Load, config: SyncConfig) -> list[SyncReport]:
    threads = torch.get_num_threads()
    torch.set_num_threads(load.num_threads)
    replicas = [
        Replica(
            load.num_bytes,
            load.num_tensors,
            load.num_threads,
            adopts=load.adopts,
            device=load.device,
            prepare=load.prepare,
        )
        for _ in range(load.num_receivers)
    ]
    weights = Weights(load.num_bytes, load.num_tensors, load.device)
    sender = Sender(ModuleSource(weights), config)
    manager = CheckpointEngineManager(LocalSource(sender), config)
    mailbox = Mailbox()
    try:
        for index, replica in enumerate(replicas):
            replica.wait_ready()
            manager.add(
                ControlMember(
                    f"replica-{index}", replica.control, mailbox=mailbox, config=config, gate=NO_TRAFFIC
                )
            )
        reports: list[SyncReport] = []
        for version in range(1, load.num_syncs + 2):
            weights.change()
            reports.append(await manager.sync(version))
        for index, replica in enumerate(replicas):
            if await replica.fingerprint() != weights.fingerprint():
                raise DigestError(f"replica-{index} does not serve what was sent over {config.transport}")
        return reports
    finally:
        torch.set_num_threads(threads)
        for replica in replicas:
            replica.close()
        sender.close()
