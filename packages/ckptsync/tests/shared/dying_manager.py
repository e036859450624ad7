# pyright: basic
"""A source and its manager in a process of its own, which drive an engine of the process that started it, and kill themselves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import TYPE_CHECKING

import torch

from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.control.members import ControlMember
from offbeat_ckptsync.control.ranks import Mailbox
from offbeat_ckptsync.ends.sender import LocalSource, Sender
from offbeat_ckptsync.ends.sinks import ModuleSource
from offbeat_ckptsync.seams import GenerationGate
from offbeat_ckptsync.testing import Fault, FaultyTransport
from offbeat_ckptsync.toolkit.config import SyncConfig, make_transport
from offbeat_ckptsync.toolkit.threads import in_thread
from offbeat_ckptsync.toolkit.wire import decode

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from offbeat_ckptsync.values import Bucket

MOMENTS = ("session", "begin", "transfer", "flip")
"""When it dies: its session is open; it has asked to begin, and no rank has heard it yet; buckets are on the way; the ranks have
changed over, and it has closed and resumed nothing."""


def manage(pipe: Connection, folder: str, settings: str, version: int, moment: str) -> None:
    """Sync other weights than those in `folder` as `version`, asking for what an engine does over `pipe`, and die at `moment`."""
    torch.set_num_threads(1)
    asyncio.run(_manage(pipe, folder, decode(SyncConfig, json.loads(settings)), version, moment))


async def _manage(pipe: Connection, folder: str, config: SyncConfig, version: int, moment: str) -> None:
    from transformers import Qwen2ForCausalLM

    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    transport = make_transport(config.transport, config)
    if moment == "transfer":
        transport = FaultyTransport(transport, on_send=_Death("die", 2))
    engine = _Engine(pipe, moment)
    sender = Sender(ModuleSource(model), config, transport=transport)
    manager = CheckpointEngineManager(LocalSource(sender), config)
    manager.add(ControlMember("vllm-0", engine.control, mailbox=Mailbox(), config=config, gate=engine))
    await manager.sync(version)


class _Death(Fault):
    def strike(self, bucket: Bucket, payload: torch.Tensor) -> None:
        if bucket.index == self.bucket:
            _die()


class _Engine(GenerationGate):
    def __init__(self, pipe: Connection, moment: str) -> None:
        self._pipe = pipe
        self._moment = moment

    async def control(self, op: str, payload: dict[str, object]) -> None:
        asked = payload.get("op", op)
        await self._ask("control", op, payload, dies=(self._moment, asked) == ("begin", "begin"))
        if (self._moment, asked) in (("session", "start"), ("flip", "flip")):
            _die()

    async def pause(self) -> None:
        await self._ask("pause")

    async def resume(self) -> None:
        await self._ask("resume")

    async def _ask(self, *words: object, dies: bool = False) -> None:
        self._pipe.send_bytes(json.dumps(words).encode())
        if dies:
            _die()
        failure = json.loads(await in_thread(self._pipe.recv_bytes, name="answer"))
        if failure:
            raise RuntimeError(failure)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
