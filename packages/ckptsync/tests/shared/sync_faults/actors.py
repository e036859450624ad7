# pyright: basic
"""Processes that can be hurt: a sender, receivers and a manager, each in one of its own, driven through a pipe.

A command is a JSON array, its answer a JSON value. `arm` plants a fault in the next sync: `killed` (SIGKILL), `hung`
(SIGSTOP) and `slow` strike in the middle of the phase where the process has work in it; `corrupting` spoils what it hands on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from offbeat_ckptsync.control.agent import Agent
from offbeat_ckptsync.control.channel import Connection as Line
from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.control.members import StagedCopy
from offbeat_ckptsync.control.membership import Membership
from offbeat_ckptsync.ends.receiver import Receiver
from offbeat_ckptsync.ends.sender import LocalSource, Sender
from offbeat_ckptsync.errors import SyncFailed
from offbeat_ckptsync.seams import NO_TRAFFIC
from offbeat_ckptsync.toolkit.config import SyncConfig
from offbeat_ckptsync.toolkit.store import Store
from offbeat_ckptsync.toolkit.threads import in_thread, use_device
from offbeat_ckptsync.toolkit.wire import decode
from offbeat_ckptsync.values import RankId
from sync_faults.hurt import (
    SLOW_S,
    Arms,
    HurtMember,
    HurtSender,
    HurtSource,
    HurtWeights,
    LiveSink,
    content_of,
    faulty_transport,
    weights_of,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from multiprocessing.connection import Connection


class AskingManager(CheckpointEngineManager):
    """A manager whose deadlines change from sync to sync."""

    def use(self, config: SyncConfig) -> None:
        """Take other deadlines."""
        self._config = config


Handlers = dict[str, "Callable[..., Awaitable[object]]"]


async def obey(pipe: Connection, handlers: Handlers) -> None:
    """Say that this process is there, and do as it is told until the pipe is closed."""
    pipe.send_bytes(json.dumps(os.getpid()).encode())
    while True:
        try:
            command, *arguments = json.loads(await in_thread(pipe.recv_bytes, name="commands"))
        except EOFError:
            return
        pipe.send_bytes(json.dumps(await handlers[command](*arguments)).encode())


async def receiver(pipe: Connection, store: tuple[str, int], config: SyncConfig, name: str) -> None:
    """Be a replica: commands `arm`, `kill_at` bytes seconds, `serving` -> [version, content, committed, state], `leave`."""
    arms = HurtMember.arms = Arms()
    sink = LiveSink(arms)
    taker = Receiver(RankId(member=name), sink)
    member = HurtMember(
        taker, faulty_transport(config, arms, sends=False), canary=sink.canary, gate=NO_TRAFFIC
    )
    source = LocalSource(Sender(StagedCopy(taker), config))
    agent = Agent(name, SECRET, member=member, source=source)

    async def arm(phase: str, kind: str) -> None:
        arms.arm(phase, kind)

    async def kill_at(num_bytes: int, delay_s: float) -> None:
        arms.kill_at = num_bytes, delay_s

    async def serving() -> list[object]:
        status = taker.status()
        return [status.version, content_of(sink.weights), status.committed, status.state]

    await agent.join(*store)
    await obey(pipe, {"arm": arm, "kill_at": kill_at, "serving": serving, "leave": agent.leave})


async def sender(pipe: Connection, store: tuple[str, int], config: SyncConfig, name: str) -> None:
    """Be a trainer: commands `arm`, `weights` seed, `kill_at` bytes seconds."""
    arms = Arms()
    weights = HurtWeights(arms)
    sender = HurtSender(weights, config, arms, transport=faulty_transport(config, arms, sends=True))
    agent = Agent(name, SECRET, source=HurtSource(sender))

    async def arm(phase: str, kind: str) -> None:
        arms.arm(phase, kind)

    async def take(seed: int) -> None:
        weights.weights = weights_of(seed)

    async def kill_at(num_bytes: int, delay_s: float) -> None:
        arms.kill_at = num_bytes, delay_s

    await agent.join(*store)
    await obey(pipe, {"arm": arm, "weights": take, "kill_at": kill_at})


async def manager(pipe: Connection, store: tuple[str, int], config: SyncConfig, name: str) -> None:
    """Be a manager: commands `arm`, `strike` phase kind pid, `wait` names, `sync` version deadlines, `state`."""
    arms = Arms()
    others: dict[str, tuple[str, int]] = {}
    _hurt_asking(arms, others)
    membership = Membership(Store.join(*store, config.begin_timeout_s), SECRET, config)
    boss = AskingManager(membership.source("sender"), config, on_fence=membership.fenced)
    await membership.start()
    membership.attach(boss)

    async def arm(phase: str, kind: str) -> None:
        arms.arm(phase, kind)

    async def strike_other(phase: str, kind: str, pid: int) -> None:
        others[phase] = kind, pid

    async def wait(names: list[str], timeout_s: float) -> str:
        try:
            await membership.wait_for(names, timeout_s)
        except Exception as error:  # noqa: BLE001 -- told to the test
            return str(error)
        return ""

    async def sync(version: int, deadlines: dict[str, float]) -> dict[str, object]:
        boss.use(dataclasses.replace(config, **deadlines))
        try:
            report = await boss.sync(version)
        except Exception as error:  # noqa: BLE001 -- told to the test
            served = error.served if isinstance(error, SyncFailed) else {}
            return {"error": str(error), "served": served, "fenced": boss.fenced}
        finally:
            boss.use(config)
        return {
            "version": report.version,
            "members": [*report.members],
            "fenced": report.fenced,
            "left": report.left,
        }

    async def armed() -> bool:
        return arms.peek()[0] != ""

    async def state() -> dict[str, object]:
        return {"version": boss.version, "members": boss.members, "refused": membership.refused}

    await obey(
        pipe, {"arm": arm, "armed": armed, "strike": strike_other, "wait": wait, "sync": sync, "state": state}
    )


_PHASE_OF = {"offer": "begin", "send": "transfer"}


def _hurt_asking(arms: Arms, others: dict[str, tuple[str, int]]) -> None:
    """Let faults strike when this process asks the second of two to do its part: the first was asked already."""
    call = Line.call

    async def hurt(self: Line, op: str, request: dict[str, object]) -> dict[str, object]:
        phase = _PHASE_OF.get(op, op)
        if phase in others:
            kind, pid = others.pop(phase)
            os.kill(pid, signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
            if kind == "slow":
                asyncio.get_running_loop().call_later(SLOW_S, os.kill, pid, signal.SIGCONT)
        if self.name.endswith("1") and arms.hit(phase):
            request = json.loads(bent(json.dumps(request)))
        return await call(self, op, request)

    Line.call = hurt


def bent(text: str) -> str:
    """Change one hex digit of every digest."""
    import re

    return re.sub(r'"([0-9a-f])([0-9a-f]{31})"', lambda m: f'"{int(m[1], 16) ^ 1:x}{m[2]}"', text)


ROLES = {"receiver": receiver, "sender": sender, "manager": manager}
SECRET = "of the tests only"


def act(pipe: Connection, role: str, store: tuple[str, int], config: dict[str, object], name: str) -> None:
    """Be `role` until the pipe is closed; the target of a process."""
    torch.set_num_threads(1)
    made = decode(SyncConfig, config)
    if made.device == "cuda" and role != "manager":
        # The sender the first GPU, receivers the others in turn: each its own where there are as many.
        others = torch.cuda.device_count() - 1
        use_device(f"cuda:{1 + int(name[1:]) % others}" if role == "receiver" and others else "cuda:0")
    own, _, function = role.partition(":")  # one of another module's: "module:function"
    be = getattr(import_module(own), function) if function else ROLES[role]
    asyncio.run(be(pipe, store, made, name))
