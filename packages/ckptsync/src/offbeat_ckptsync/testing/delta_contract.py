"""The contract's part on deltas: what must hold with them switched on, over a transport that carries them or not."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from offbeat_ckptsync.control.members import LocalMember
from offbeat_ckptsync.errors import SyncFailed
from offbeat_ckptsync.member.receiver import Receiver
from offbeat_ckptsync.member.sinks import DictSink
from offbeat_ckptsync.plan.manifest import manifest_of
from offbeat_ckptsync.seams import NO_TRAFFIC
from offbeat_ckptsync.testing.fakes import DictSource, Fault, FaultyTransport, LocalSync, assert_same
from offbeat_ckptsync.values import Seat, SyncReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat_ckptsync.config import SyncConfig
    from offbeat_ckptsync.seams import Transport

    Tensors = dict[str, torch.Tensor]


async def check_deltas(make: Callable[[], Transport], config: SyncConfig, *, num_receivers: int) -> None:
    """Sync weights of which a part changed, with joiners, aborted syncs and spoilt bytes in between.

    What arrives is what was sent, bit for bit, every time. Over a transport that carries deltas, what changed little
    goes as deltas whenever every member holds the base, and whole, with the reason, where one does not.

    Raises:
        AssertionError: it does not hold.
    """
    town = _Town(make, dataclasses.replace(config, delta="auto"), num_receivers)
    try:
        await town.sync(0.0, deltas=False, why="was sent before")
        for fraction in (0.01, 0.0, 1.0, 0.01):
            report = await town.sync(fraction, deltas=fraction < 1)
            if town.carries:
                assert report.delta_fraction is not None
                assert (report.delta_fraction == 0) == (fraction == 0)
                assert abs(report.delta_fraction - fraction) < 0.02
        await _joiners(town)
        await _failures(town)
    finally:
        town.close()


async def _joiners(town: _Town) -> None:
    """One that comes with nothing makes the next sync whole; one that has caught up does not."""
    town.local.manager.enlist(town.member("late"))
    await town.sync(0.01, deltas=False, why="late kept no copy")
    await town.sync(0.01, deltas=True)
    await town.local.manager.catch_up(town.member("later"))
    await town.sync(0.01, deltas=True)


async def _failures(town: _Town) -> None:
    """A sync that breaks off leaves base and weights; one that found wrong bytes is followed by a whole one."""
    await town.refuse(Fault("die", 2, times=0), on_send=True)
    await town.sync(0.01, deltas=True)
    for on_send in (True, False):
        await town.refuse(Fault("corrupt", 1, times=0), on_send=on_send)
        await town.sync(0.01, deltas=False, why="found bytes that were not what was sent")
        await town.sync(0.01, deltas=True)


class _Town:
    """A local with deltas switched on, whose weights change by parts."""

    def __init__(self, make: Callable[[], Transport], config: SyncConfig, num_receivers: int) -> None:
        self._make = make
        self._on_send, self._on_receive = Fault("die", 0, times=0), Fault("die", 0, times=0)
        self._rng = torch.Generator().manual_seed(1)
        self._weights = _weights()
        self._expected = manifest_of(self._weights.items())
        self._sinks = {f"replica-{i}": DictSink(self._expected) for i in range(num_receivers)}
        self._version = 0
        self._transports: list[Transport] = []
        self.local = LocalSync(DictSource(self._weights), dict(self._sinks), config, self._transport)

    @property
    def carries(self) -> bool:
        """Say whether the transport of the source does, once a sync has gone over it."""
        return self._transports[0].carries_deltas

    def member(self, name: str) -> LocalMember:
        """Return a member that holds nothing yet."""
        self._sinks[name] = DictSink(self._expected)
        return LocalMember(Receiver(Seat(member=name), self._sinks[name]), self._transport(), gate=NO_TRAFFIC)

    async def sync(self, fraction: float, *, deltas: bool, why: str = "") -> SyncReport:
        """Change a fraction of the elements, sync, and look at what arrived and how."""
        self._change(fraction)
        self._version += 1
        report = await self.local.manager.sync(self._version)
        for sink in self._sinks.values():
            assert_same(_bits(sink.weights), _bits(self._weights))
        if not self.carries:
            assert report.num_deltas == 0
            assert report.wire_bytes == report.num_bytes
            assert "does not carry deltas" in report.delta_why, report.delta_why
        else:
            assert report.num_deltas == (report.num_buckets if deltas else 0), f"{report}"
            assert (report.wire_bytes < report.num_bytes / 2) == deltas, f"{report}"
            assert why in report.delta_why, report.delta_why
            assert bool(why) == bool(report.delta_why), report.delta_why
        return report

    async def refuse(self, fault: Fault, *, on_send: bool) -> None:
        """Try a sync with a fault planted in this process's ends; what is served stays."""
        before = {name: dict(sink.weights) for name, sink in self._sinks.items()}
        kept = self._weights
        self._change(0.01)
        planted = self._on_send if on_send else self._on_receive
        planted.kind, planted.bucket, planted.left = fault.kind, fault.bucket, 1
        told = ""
        try:
            await self.local.manager.sync(self._version + 1)
        except SyncFailed as error:
            told = str(error)
        planted.left = 0
        assert "bucket" in told, (
            f"a spoilt sync was to be refused, naming the bucket; said: {told or 'nothing'}"
        )
        for name, sink in self._sinks.items():
            assert_same(_bits(sink.weights), _bits(before[name]))
        self._weights = kept

    def close(self) -> None:
        """Leave all connections."""
        self.local.close()
        for transport in self._transports:
            transport.close()

    def _transport(self) -> Transport:
        self._transports.append(
            FaultyTransport(self._make(), on_send=self._on_send, on_receive=self._on_receive)
        )
        return self._transports[-1]

    def _change(self, fraction: float) -> None:
        """Flip one bit of about `fraction` of the elements of every tensor, and the sign of a zero."""
        fresh: Tensors = {}
        for name, tensor in self._weights.items():
            changed = tensor.clone()
            words = changed.view(_INTS[tensor.element_size()]).view(-1)
            words ^= (torch.rand(words.shape, generator=self._rng) < fraction).to(words.dtype)
            fresh[name] = changed
        self._weights = self.local.source.weights = fresh


_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _weights() -> Tensors:
    """Return weights of every size of element, several buckets of each, NaN and both zeros among them."""
    rng = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    odd = normal(2001).bfloat16()
    odd[:3] = torch.tensor([float("nan"), -0.0, 0.0])
    return {
        "bytes": normal(9001).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 7),
        "halves": odd,
        "words": normal(61, 71),
        "doubles": normal(700).double(),
        "halves again": normal(5099).bfloat16(),
    }


def _bits(weights: Tensors) -> Tensors:
    return {name: tensor.view(_INTS[tensor.element_size()]) for name, tensor in weights.items()}
