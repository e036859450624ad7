# pyright: basic
"""Faults to plant in a receiver or a sender, in the phase where it has work to do."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from offbeat_ckptsync.control.members import LocalMember
from offbeat_ckptsync.ends.buckets import bytes_of
from offbeat_ckptsync.ends.manifest import manifest_of
from offbeat_ckptsync.ends.pipeline import FIRST
from offbeat_ckptsync.ends.sender import LocalSource, Sender
from offbeat_ckptsync.seams import WeightSink
from offbeat_ckptsync.testing.fakes import DictSource, Fault, FaultyTransport
from offbeat_ckptsync.toolkit.config import make_transport

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from offbeat_ckptsync.seams import Transport
    from offbeat_ckptsync.toolkit.config import SyncConfig
    from offbeat_ckptsync.values import Label, Manifest, Sent, SyncOffer

SLOW_S = 0.2


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    """Return 24 tensors, 0.4 MB; for each seed every one of them differs, in 2 % of its elements."""
    rng = torch.Generator().manual_seed(0)
    weights = {f"layer.{i}.weight": torch.randn(40 + i, 80, generator=rng) for i in range(24)}
    for tensor in weights.values():
        tensor.view(-1)[seed % 50 :: 50] = seed
    return weights


def content_of(weights: dict[str, torch.Tensor]) -> str:
    """Return a digest of all bits."""
    state = xxhash.xxh3_128()
    for name, tensor in weights.items():
        state.update(name.encode())
        state.update(bytes_of(tensor).numpy().data)
    return state.hexdigest()


class MadeUp:
    """Weights of versions, as who compares them asks for them: those of `weights_of`."""

    num_bytes = sum(tensor.nbytes for tensor in weights_of(0).values())

    def content(self, version: int) -> str:
        """Return the digest of all bits of the weights of `version`."""
        return content_of(weights_of(version))


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
        self.kill_at: tuple[int, float] | None = (
            None  # bytes in a sync, and seconds after them: then it is killed
        )

    def passed(self, num_bytes: int) -> None:
        """Let this process kill itself where so many bytes of a sync are enough."""
        if self.kill_at is not None and num_bytes >= self.kill_at[0]:
            # From a thread: it strikes in the middle of whatever goes on then.
            threading.Timer(self.kill_at[1], strike, args=("killed",)).start()
            self.kill_at = None

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


class LiveSink(WeightSink):
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
    """Faults of a receiver; those of the transfer are in its transport, those of the flip in its sink."""

    arms = Arms()

    async def begin(self, offer: SyncOffer) -> None:
        """A spoilt offer has a tensor of another name."""
        await super().begin(_bent_offer(offer) if self.arms.hit("begin") else offer)

    async def verify(self, sync_id: str, sent: Sent) -> None:
        """A spoilt comparison has another digest."""
        await super().verify(sync_id, _bent_sent(sent) if self.arms.hit("verify") else sent)

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

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all; strike before the middle one, or where `Arms.kill_at` says."""
        num_bytes = 0
        for number, (name, tensor) in enumerate(super().tensors()):
            if number == len(self.weights) // 2 and self._arms.peek() != ("transfer", "corrupting"):
                strike(self._arms.take("transfer"))
            num_bytes += tensor.numel() * tensor.element_size()
            self._arms.passed(num_bytes)
            yield name, tensor


class HurtSender(Sender):
    """Faults of a sender."""

    def __init__(
        self, weights: HurtWeights, config: SyncConfig, arms: Arms, *, transport: Transport | None = None
    ) -> None:
        super().__init__(weights, config, transport=transport)
        self._weights = weights
        self._arms = arms
        self.answer: list[float] = []  # to the canary, for the weights that were sent last

    def offer(self, version: int, members: list[str]) -> SyncOffer:
        """A spoilt offer has a tensor of another name."""
        spoil = self._arms.hit("begin")
        offer = super().offer(version, members)
        return _bent_offer(offer) if spoil else offer

    def send(self, offer: SyncOffer, senders: Collection[int] = FIRST) -> Sent:
        """Spoilt after the transfer: a wrong digest, or weights that the trainer has changed meanwhile."""
        self.answer = canary_of(self._weights.weights)
        sent = super().send(offer, senders)
        if self._arms.hit("verify"):
            sent = _bent_sent(sent)
        if self._arms.hit("flip") or self._arms.hit("commit"):
            for tensor in self._weights.weights.values():
                tensor.zero_()
        return sent


class HurtSource(LocalSource):
    """A hurt sender that knows the answer to the canary."""

    def __init__(self, sender: HurtSender) -> None:
        super().__init__(sender)
        self._hurt = sender

    async def reference(self) -> list[float]:
        """Return the right answer for the weights that were sent last."""
        return self._hurt.answer


def _bent_offer(offer: SyncOffer) -> SyncOffer:
    first, *rest = offer.manifest.specs
    specs = (first._replace(name=first.name + "?"), *rest)
    return dataclasses.replace(offer, manifest=dataclasses.replace(offer.manifest, specs=specs))


def _bent_sent(sent: Sent) -> Sent:
    digests = sent.bucket_digests
    return dataclasses.replace(sent, bucket_digests=(digests[0], "f" * 32, *digests[2:]))


def faulty_transport(config: SyncConfig, arms: Arms, *, sends: bool) -> FaultyTransport:
    """Return the configured transport with the faults of a transfer in it, at the third bucket."""

    class Struck(Fault):
        seen = 0  # bytes of the sync that is received

        def strike(self, bucket: Any, payload: torch.Tensor) -> None:
            if not sends:
                self.seen = bucket.num_bytes + (self.seen if bucket.index else 0)
                arms.passed(self.seen)
            if bucket.index == self.bucket and (not sends or arms.peek() == ("transfer", "corrupting")):
                self.left = 1 if arms.hit("transfer") else 0
                super().strike(bucket, payload)

    fault = Struck("corrupt", 2, times=0)
    inner = make_transport(config.transport, config)
    return FaultyTransport(inner, **{"on_send" if sends else "on_receive": fault})
