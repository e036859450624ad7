"""Fakes that satisfy the protocols, faults to plant, and awkward weights."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, cast

import torch

from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.control.members import LocalMember
from offbeat_ckptsync.ends.buckets import bytes_of
from offbeat_ckptsync.ends.digest import digest
from offbeat_ckptsync.ends.manifest import manifest_of
from offbeat_ckptsync.ends.receiver import Receiver
from offbeat_ckptsync.ends.sender import LocalSource, Sender
from offbeat_ckptsync.seams import (
    NO_TRAFFIC,
    BucketReceiver,
    BucketSender,
    Transport,
    WeightSink,
    WeightSource,
)
from offbeat_ckptsync.values import Bucket, Manifest, RankId, SyncOffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from offbeat_ckptsync.ends.sinks import DictSink
    from offbeat_ckptsync.toolkit.config import SyncConfig


class DictSource(WeightSource):
    """The tensors of a dictionary, which a test may change between syncs."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights
        self.walks = 0  # complete passes

    def manifest(self) -> Manifest:
        """Return what `tensors` will yield."""
        return manifest_of(self.weights.items())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the dictionary's tensors and count the pass when it is complete."""
        yield from self.weights.items()
        self.walks += 1


class Fault:
    """A fault to plant at one bucket: `corrupt` flips a bit, `die` raises, `hang` waits until `release`."""

    def __init__(self, kind: str, bucket: int, *, times: int = 1) -> None:
        self.kind = kind
        self.bucket = bucket
        self.left = times
        self.release = threading.Event()

    def strike(self, bucket: Bucket, payload: torch.Tensor) -> None:
        """Do the harm if this is the bucket and it was not done `times` times yet."""
        if bucket.index != self.bucket or self.left <= 0:
            return
        self.left -= 1
        if self.kind == "corrupt":
            payload[payload.numel() // 2] ^= 1
        elif self.kind == "die":
            raise OSError("planted: the line is cut")
        elif self.kind == "hang":
            self.release.wait(600.0)


class FaultyTransport(Transport):
    """Wraps a transport: plants one fault where buckets are sent, another where they arrive."""

    def __init__(
        self, inner: Transport, *, on_send: Fault | None = None, on_receive: Fault | None = None
    ) -> None:
        self._inner = inner
        self._on_send = on_send
        self._on_receive = on_receive
        self.device = inner.device

    def open(self, sync_id: str, members: list[str]) -> dict[str, str | int | float]:
        """As the wrapped transport."""
        return self._inner.open(sync_id, members)

    def lend(self, offer: SyncOffer, num_bytes: int) -> torch.Tensor | None:
        """As the wrapped transport."""
        lent = self._inner.lend(offer, num_bytes)
        self.chosen = self._inner.chosen  # it may have picked
        return lent

    def sender(self, offer: SyncOffer, members: list[str]) -> BucketSender:
        """As the wrapped transport, with the fault in `send`."""
        return _FaultySender(self._inner.sender(offer, members), self._on_send)

    def receiver(self, offer: SyncOffer, rank_id: RankId) -> BucketReceiver:
        """As the wrapped transport, with the fault after `receive`."""
        return _FaultyReceiver(self._inner.receiver(offer, rank_id), self._on_receive)

    def abort(self, sync_id: str) -> None:
        """As the wrapped transport."""
        self._inner.abort(sync_id)

    def close(self) -> None:
        """As the wrapped transport."""
        self._inner.close()


class _FaultySender(BucketSender):
    def __init__(self, inner: BucketSender, fault: Fault | None) -> None:
        self._inner = inner
        self._fault = fault

    def send(self, bucket: Bucket, payload: torch.Tensor) -> None:
        if self._fault is not None:
            self._fault.strike(bucket, payload)
        self._inner.send(bucket, payload)

    def vouch(self, bucket: Bucket, digest: str) -> None:
        self._inner.vouch(bucket, digest)

    @property
    def in_flight(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._inner.in_flight

    def start(self, bucket: Bucket, payload: torch.Tensor) -> Callable[[], None]:
        if self._fault is not None:
            self._fault.strike(bucket, payload)
        return self._inner.start(bucket, payload)

    def waits_for(self) -> str:
        return self._inner.waits_for()

    def close(self) -> None:
        self._inner.close()


class _FaultyReceiver(BucketReceiver):
    def __init__(self, inner: BucketReceiver, fault: Fault | None) -> None:
        self._inner = inner
        self._fault = fault

    def lend(self, num_bytes: int) -> torch.Tensor | None:
        return self._inner.lend(num_bytes)

    def receive(self, bucket: Bucket, into: torch.Tensor) -> None:
        self.start(bucket, into)()

    @property
    def in_flight(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._inner.in_flight

    def start(self, bucket: Bucket, into: torch.Tensor) -> Callable[[], None]:
        wait = self._inner.start(bucket, into)

        def arrive() -> None:
            wait()
            if self._fault is not None:
                self._fault.strike(bucket, into)

        return arrive

    @property
    def wire_bytes(self) -> int | None:
        return self._inner.wire_bytes

    def told(self, bucket: Bucket) -> str | None:
        return self._inner.told(bucket)

    def close(self) -> None:
        self._inner.close()


def prints_of(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return dtype, shape and a digest of the bits of each tensor."""
    return {
        name: f"{tensor.dtype} {tuple(tensor.shape)} {digest(bytes_of(tensor.cpu()))}"
        for name, tensor in weights.items()
    }


class LocalSync:
    """A source, a manager and members in this process over one transport: the smallest whole."""

    def __init__(
        self,
        source: DictSource,
        sinks: dict[str, WeightSink],
        config: SyncConfig,
        make: Callable[[], Transport],
    ) -> None:
        self.source = source
        self.sinks = sinks
        self.config = config
        self.make = make
        self.sender = Sender(source, config, transport=make())
        self.manager = CheckpointEngineManager(LocalSource(self.sender), config)
        self.receivers = {
            name: Receiver(RankId(member=name), sink, allow_cast=config.allow_cast)
            for name, sink in sinks.items()
        }
        self._transports = [make() for _ in self.receivers]
        for receiver, transport in zip(self.receivers.values(), self._transports, strict=True):
            self.manager.add(LocalMember(receiver, transport, gate=NO_TRAFFIC))

    async def serving(self) -> dict[str, tuple[int, dict[str, str]]]:
        """Return the version that each member serves, and `prints_of` its weights; for members with a `DictSink`."""
        return {
            name: (receiver.version, prints_of(cast("DictSink", self.sinks[name]).weights))
            for name, receiver in self.receivers.items()
        }

    def close(self) -> None:
        """Leave all connections."""
        for transport in self._transports:
            transport.close()
        self.sender.close()


def awkward_weights(seed: int) -> dict[str, torch.Tensor]:
    """Return tensors of every ordinary oddity: mixed dtypes, no elements, no dimensions, odd sizes, strides, ties."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    tied = normal(33, 7)
    return {
        "embed": tied,
        "empty": torch.empty(0, 5),
        "scalar": normal(1).reshape(()),
        "odd_bytes": torch.randint(0, 256, (1001,), generator=rng).to(torch.uint8),
        "half": normal(129).to(torch.bfloat16),
        "transposed": normal(40, 30).t(),
        "every_other": normal(2001)[::2],
        "mask": normal(17) > 0,
        "count": torch.randint(0, 1 << 40, (3,), generator=rng),
        "larger_than_a_bucket": normal(5000),
        "head": tied,
    }


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """Raise `AssertionError` unless both hold the same names, shapes, dtypes and bits."""
    assert got.keys() == want.keys(), f"names differ: {got.keys() ^ want.keys()}"
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, f"{name}: {got[name].dtype} for {tensor.dtype}"
        assert torch.equal(got[name], tensor), f"{name} differs"
