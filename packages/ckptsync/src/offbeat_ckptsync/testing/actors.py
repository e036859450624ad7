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
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from offbeat_ckptsync.agent import Agent
from offbeat_ckptsync.config import SyncConfig
from offbeat_ckptsync.errors import SyncFailed
from offbeat_ckptsync.manager import CheckpointEngineManager
from offbeat_ckptsync.manifest import manifest_of
from offbeat_ckptsync.members import LocalMember
from offbeat_ckptsync.membership import Membership
from offbeat_ckptsync.peer import StagedCopy
from offbeat_ckptsync.plan import bytes_of
from offbeat_ckptsync.receiver import Receiver
from offbeat_ckptsync.remote import Peer
from offbeat_ckptsync.source import LocalSource, Publisher
from offbeat_ckptsync.store import Store
from offbeat_ckptsync.testing.fakes import DictSource, Fault, FaultyTransport
from offbeat_ckptsync.threads import in_thread
from offbeat_ckptsync.transports import make_transport
from offbeat_ckptsync.types import Seat
from offbeat_ckptsync.wire import decode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator
    from multiprocessing.connection import Connection

    from offbeat_ckptsync.types import Echo, Flip, Label, Manifest, Sent, SyncOffer

SLOW_S = 0.2


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    """Return 24 tensors, 0.4 MB, that differ for each seed."""
    rng = torch.Generator().manual_seed(seed)
    return {f"layer.{i}.weight": torch.randn(40 + i, 80, generator=rng) for i in range(24)}


def content_of(weights: dict[str, torch.Tensor]) -> str:
    """Return a digest of all bits."""
    state = xxhash.xxh3_128()
    for name, tensor in weights.items():
        state.update(name.encode())
        state.update(bytes_of(tensor).numpy().data)
    return state.hexdigest()


def strike(kind: str) -> None:
    """Be killed, stopped until somebody continues this process, or slow."""
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "hung":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "slow":
        time.sleep(SLOW_S)


class Arms:
    """At most one fault, used up when it strikes."""

    def __init__(self) -> None:
        self._phase = self._kind = ""

    def arm(self, phase: str, kind: str) -> None:
        """Plant a fault."""
        self._phase, self._kind = phase, kind

    def peek(self) -> tuple[str, str]:
        """Return phase and kind of what is planted."""
        return self._phase, self._kind

    def take(self, phase: str) -> str:
        """Return the fault planted for `phase`, or nothing, and forget it."""
        if phase != self._phase:
            return ""
        self._phase = ""
        return self._kind

    def hit(self, phase: str) -> bool:
        """Strike if a fault is planted for `phase`; say whether something is to be spoilt."""
        kind = self.take(phase)
        strike(kind)
        return kind == "corrupting"


class LiveSink:
    """Weights that are written in place, tensor by tensor: what is torn in the middle stays torn."""

    def __init__(self, arms: Arms) -> None:
        self.weights = weights_of(0)
        self._arms = arms

    def expected(self) -> Manifest:
        """Return the manifest of the weights."""
        return manifest_of(self.weights.items())

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copy all; a fault of the flip strikes when a third is written, or spoils a number when all is."""
        spoil = False
        for number, (name, tensor) in enumerate(tensors):
            if number == len(self.weights) // 3:
                spoil = self._arms.hit("flip")
            self.weights[name].copy_(tensor)
        if spoil:
            self.weights["layer.5.weight"][0, 0] += 1

    async def canary(self) -> list[float]:
        """Say the sum of each tensor."""
        return canary_of(self.weights)


def canary_of(weights: dict[str, torch.Tensor]) -> list[float]:
    """Return the sum of each tensor, float64."""
    return [float(tensor.double().sum()) for tensor in weights.values()]


class HurtMember(LocalMember):
    """Faults of a receiver."""

    arms = Arms()

    async def begin(self, offer: SyncOffer) -> None:
        """A spoilt offer has a tensor of another name."""
        await super().begin(_bent_offer(offer) if self.arms.hit("begin") else offer)

    async def transfer(self, offer: SyncOffer) -> list[Echo]:
        """The fault is in the transport, at a bucket in the middle."""
        return await super().transfer(offer)

    async def verify(self, offer: SyncOffer, sent: Sent) -> None:
        """A spoilt comparison has another digest."""
        await super().verify(offer, _bent_sent(sent) if self.arms.hit("verify") else sent)

    async def flip(self, offer: SyncOffer, sent: Sent) -> Flip:
        """The fault is in the sink."""
        return await super().flip(offer, sent)

    async def commit(self, label: Label) -> Label:
        """A spoilt answer has another content."""
        spoil = self.arms.hit("commit")
        stands = await super().commit(label)
        return dataclasses.replace(stands, content_digest="f" * 32) if spoil else stands


class HurtWeights(DictSource):
    """Faults of a sender while its tensors are gathered."""

    def __init__(self, arms: Arms) -> None:
        super().__init__(weights_of(0))
        self._arms = arms
        self.kill_at: tuple[int, float] | None = (
            None  # after so many bytes, and seconds, this process kills itself
        )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all; strike before the middle one, or where `kill_at` says."""
        num_bytes = 0
        for number, (name, tensor) in enumerate(super().tensors()):
            if number == len(self.weights) // 2 and self._arms.peek() != ("transfer", "corrupting"):
                strike(self._arms.take("transfer"))
            num_bytes += tensor.numel() * tensor.element_size()
            if self.kill_at is not None and num_bytes >= self.kill_at[0]:
                # From a thread: it strikes in the middle of whatever goes on then, packing and sending included.
                threading.Timer(self.kill_at[1], strike, args=("killed",)).start()
                self.kill_at = None
            yield name, tensor


class HurtSource(LocalSource):
    """Faults of a sender."""

    def __init__(self, publisher: Publisher, weights: HurtWeights, arms: Arms) -> None:
        super().__init__(publisher)
        self._weights = weights
        self._arms = arms
        self._answer: list[float] = []

    async def offer(self, version: int, members: list[str]) -> SyncOffer:
        """A spoilt offer has a tensor of another name."""
        spoil = self._arms.hit("begin")
        offer = await super().offer(version, members)
        return _bent_offer(offer) if spoil else offer

    async def send(self, offer: SyncOffer) -> Sent:
        """Spoilt after the transfer: a wrong digest, or weights that the trainer has changed meanwhile."""
        self._answer = canary_of(self._weights.weights)
        sent = await super().send(offer)
        if self._arms.hit("verify"):
            sent = _bent_sent(sent)
        if self._arms.hit("flip") or self._arms.hit("commit"):
            for tensor in self._weights.weights.values():
                tensor.zero_()
        return sent

    async def canary(self) -> list[float]:
        """Return the right answer for the weights that were sent last."""
        return self._answer


class AskingManager(CheckpointEngineManager):
    """A manager whose deadlines change from sync to sync."""

    def use(self, config: SyncConfig) -> None:
        """Take other deadlines."""
        self._config = config


def _bent_offer(offer: SyncOffer) -> SyncOffer:
    first, *rest = offer.manifest.specs
    specs = (dataclasses.replace(first, name=first.name + "?"), *rest)
    return dataclasses.replace(offer, manifest=dataclasses.replace(offer.manifest, specs=specs))


def _bent_sent(sent: Sent) -> Sent:
    digests = sent.bucket_digests
    return dataclasses.replace(sent, bucket_digests=(digests[0], "f" * 32, *digests[2:]))


Handlers = dict[str, "Callable[..., Awaitable[object]]"]


async def _obey(pipe: Connection, handlers: Handlers) -> None:
    pipe.send_bytes(json.dumps(os.getpid()).encode())
    while True:
        try:
            command, *arguments = json.loads(await in_thread(pipe.recv_bytes, name="commands"))
        except EOFError:
            return
        pipe.send_bytes(json.dumps(await handlers[command](*arguments)).encode())


def _faulty_transport(config: SyncConfig, arms: Arms, *, sends: bool) -> FaultyTransport:
    class Struck(Fault):
        def strike(self, bucket: Any, payload: torch.Tensor) -> None:  # noqa: ANN401 -- as `Fault`
            if bucket.index == self.bucket and (not sends or arms.peek() == ("transfer", "corrupting")):
                self.left = 1 if arms.hit("transfer") else 0
                super().strike(bucket, payload)

    fault = Struck("corrupt", 2, times=0)
    inner = make_transport(config.transport, config)
    return FaultyTransport(inner, **{"on_send" if sends else "on_receive": fault})


async def receiver(pipe: Connection, store: tuple[str, int], config: SyncConfig, name: str) -> None:
    """Be a replica: commands `arm`, `serving` -> [version, content, committed, state], `leave`."""
    arms = HurtMember.arms = Arms()
    sink = LiveSink(arms)
    taker = Receiver(Seat(member=name), sink)
    member = HurtMember(taker, _faulty_transport(config, arms, sends=False), canary=sink.canary)
    source = LocalSource(Publisher(StagedCopy(taker), config))
    agent = Agent(name, SECRET, member=member, source=source)

    async def arm(phase: str, kind: str) -> None:
        arms.arm(phase, kind)

    async def serving() -> list[object]:
        status = taker.status()
        return [status.version, content_of(sink.weights), status.committed, status.state]

    await agent.join(*store)
    await _obey(pipe, {"arm": arm, "serving": serving, "leave": agent.leave})


async def sender(pipe: Connection, store: tuple[str, int], config: SyncConfig, name: str) -> None:
    """Be a trainer: commands `arm`, `weights` seed, `kill_at` bytes seconds."""
    arms = Arms()
    weights = HurtWeights(arms)
    publisher = Publisher(weights, config, transport=_faulty_transport(config, arms, sends=True))
    agent = Agent(name, SECRET, source=HurtSource(publisher, weights, arms))

    async def arm(phase: str, kind: str) -> None:
        arms.arm(phase, kind)

    async def take(seed: int) -> None:
        weights.weights = weights_of(seed)

    async def kill_at(num_bytes: int, delay_s: float) -> None:
        weights.kill_at = num_bytes, delay_s

    await agent.join(*store)
    await _obey(pipe, {"arm": arm, "weights": take, "kill_at": kill_at})


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

    async def state() -> dict[str, object]:
        return {"version": boss.version, "members": boss.members, "refused": membership.refused}

    await _obey(pipe, {"arm": arm, "strike": strike_other, "wait": wait, "sync": sync, "state": state})


_PHASE_OF = {"offer": "begin", "send": "transfer"}


def _hurt_asking(arms: Arms, others: dict[str, tuple[str, int]]) -> None:
    """Let faults strike when this process asks the second of two to do its part: the first was asked already."""
    ask = Peer.ask

    async def hurt(self: Peer, op: str, request: dict[str, object] | None = None) -> dict[str, object]:
        phase = _PHASE_OF.get(op, op)
        if phase in others:
            kind, pid = others.pop(phase)
            os.kill(pid, signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
            if kind == "slow":
                asyncio.get_running_loop().call_later(SLOW_S, os.kill, pid, signal.SIGCONT)
        if self.name.endswith("1") and arms.hit(phase):
            request = json.loads(_bent(json.dumps(request)))
        return await ask(self, op, request)

    Peer.ask = hurt


def _bent(text: str) -> str:
    """Change one hex digit of every digest."""
    import re

    return re.sub(r'"([0-9a-f])([0-9a-f]{31})"', lambda m: f'"{int(m[1], 16) ^ 1:x}{m[2]}"', text)


ROLES = {"receiver": receiver, "sender": sender, "manager": manager}
SECRET = "of the tests only"


def act(pipe: Connection, role: str, store: tuple[str, int], config: dict[str, object], name: str) -> None:
    """Be `role` until the pipe is closed; the target of a process."""
    torch.set_num_threads(1)
    asyncio.run(ROLES[role](pipe, store, decode(SyncConfig, config), name))
