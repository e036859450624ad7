"""The seams of ckptsync: who gives weights, who takes them, how bytes travel, how generation stops, and how a manager speaks to members.

Base classes: what has a default is optional.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    import torch

    from offbeat_ckptsync.values import (
        Bucket,
        Echo,
        Flip,
        Label,
        Manifest,
        RankId,
        Sent,
        Status,
        SyncOffer,
    )


class WeightSource(ABC):
    """Where weights come from. Every rank of a sharded source holds one and iterates it to the end."""

    tensors_stay: bool = False
    """Whether the tensors stay as they are, and can be read, until the pass is over and its last tensor is copied.

    They are then packed by several threads while the pass goes on.
    """

    collective: bool = False
    """Whether gathering needs all ranks of the source at once. A joiner, which may come at any moment, is then given weights by other
    members or with the next sync, unless the caller says otherwise."""

    def writes(self) -> dict[str, int]:
        """Return for each tensor a number that grows with every write into it; of what nobody counts nothing.

        A sync during which one of them grew fails: what was sent is a mixture of two versions.
        """
        return {}

    @abstractmethod
    def manifest(self) -> Manifest:
        """Return what `tensors` will yield, moving nothing."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full tensors in manifest order; a fresh pass at each call.

        Each is read until the next one is asked for, and not afterwards (but see `tensors_stay`).
        """

    def tensors_on(self, senders: Collection[int]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """As `tensors`, for those ranks of the source alone that send: the others take part, and get None for each.

        Every rank is given the same `senders`. A source that holds shards spares the others the full tensors; here,
        for those that know no better, they come to every rank.
        """
        return self.tensors()


class WeightSink(ABC):
    """Where weights go, once they are whole and verified."""

    @abstractmethod
    def expected(self) -> Manifest | None:
        """Return the tensors this sink must be given (order free), or None if it takes any."""

    def prepare(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:  # noqa: B027 -- optional
        """Do beforehand what `load` of these staged tensors needs and what changes nothing, within the deadline of `transfer`.

        They are not verified yet, and may never be loaded. Any exception fails the sync; the old weights are whole.
        """

    @abstractmethod
    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copy verified tensors into live weights and serve them as `version`.

        A `SyncError` raised here means: refused before anything was written, the old weights are whole. Any other
        exception means that the weights are torn; the member is then fenced off.
        """

    adopts_private = True
    """Whether `adopt` is asked for memory of this rank alone, too. Two such memories then take turns, and no copy of what is
    served stays for joiners; where it is False, what is not the transport's is copied."""

    def adopt(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> bool:
        """Serve tensors in host memory from where they lie, and say so; False leaves them to `load`.

        They stay as they are while they live. A flip then moves no bytes, and where the memory is the transport's
        (`BucketReceiver.lend`) every replica of a machine serves from the same pages.
        """
        return False


def _done() -> None:
    """Wait for nothing."""


class BucketSender(ABC):
    """The sending end of a transport, for one sync."""

    in_flight: int = 1
    """How many buckets may be under way at once, between `start` and the end of what it returns."""

    @abstractmethod
    def send(self, bucket: Bucket, payload: torch.Tensor) -> None:
        """Send the uint8 `payload` [bucket.num_bytes]; the caller may reuse it when `send` returns.

        A payload that lies in memory that `Transport.lend` gave is left as it is until the sync is over.
        """

    def start(self, bucket: Bucket, payload: torch.Tensor) -> Callable[[], None]:
        """Begin to send, as `send`; return a call that waits until the caller may reuse `payload`."""
        self.send(bucket, payload)
        return _done

    def vouch(self, bucket: Bucket, digest: str) -> None:  # noqa: B027 -- optional
        """Hear the digest that the source took of a bucket, before its `start`.

        Where receivers read the same memory it does for all but one of them: that one takes it by itself, and nobody
        changes over unless its echo fits, too.
        """

    def waits_for(self) -> str:
        """Say whom it waits for just now, in words; "" where for nobody, or where nobody can tell. Called in any thread."""
        return ""

    @abstractmethod
    def close(self) -> None:
        """Finish: everything sent has left, or an error is raised."""


class BucketReceiver(ABC):
    """The receiving end of a transport, for one sync."""

    in_flight: int = 1
    """How many buckets may be under way at once, between `start` and the end of what it returns."""

    def lend(self, num_bytes: int) -> torch.Tensor | None:
        """Return the memory in which buckets appear, end to end as `bucket_starts` says, or None if there is none.

        uint8 [num_bytes]. `receive` is then called with slices of it and copies nothing. What was received stays as
        it is for as long as any tensor over this memory lives, whatever the source does meanwhile.
        """
        return None

    @abstractmethod
    def receive(self, bucket: Bucket, into: torch.Tensor) -> None:
        """Fill the uint8 `into` [bucket.num_bytes] with the bucket's bytes; called in bucket order."""

    def start(self, bucket: Bucket, into: torch.Tensor) -> Callable[[], None]:
        """Begin to receive, as `receive`; return a call that waits until `into` holds the bucket's bytes."""
        self.receive(bucket, into)
        return _done

    def told(self, bucket: Bucket) -> str | None:
        """Return the digest of a bucket that was received, where another rank takes it of the very memory that was lent.

        None: take it here.
        """
        return None

    @property
    def wire_bytes(self) -> int | None:
        """Bytes that came over a wire for this rank and its neighbours; None: as many as it takes."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Release what this sync held; called once, after the staged bytes were loaded or dropped."""


class Transport(ABC):
    """How buckets travel. One object per process and side; it may keep connections from sync to sync."""

    device: str
    """The torch device of the payloads that `send` and `receive` take: "cpu", or a GPU with its index, "cuda:1"."""

    spare_bytes: int = 0
    """Receiving side: bytes on `device` that this rank holds already and stages in again; set before `receiver`."""

    chosen: tuple[str, str] = ("", "")
    """Of one that picks another transport for each sync: which it picked last, and the reason in one sentence."""

    @abstractmethod
    def open(self, sync_id: str, members: list[str]) -> dict[str, str | int | float]:
        """Source side: prepare for these members and return the rendezvous data; waits for nobody."""

    def lend(self, offer: SyncOffer, num_bytes: int) -> torch.Tensor | None:
        """Source side: return memory to pack this sync's buckets into, end to end, or None: the caller then has its own.

        uint8 [num_bytes]; called once per sync, between `open` and `sender`. Spares a copy where receivers can see
        the source's memory.
        """
        return None

    @abstractmethod
    def sender(self, offer: SyncOffer, members: list[str]) -> BucketSender:
        """Source side: meet every rank of `members` within `rendezvous_s`, or raise, naming who is missing."""

    @abstractmethod
    def receiver(self, offer: SyncOffer, rank_id: RankId) -> BucketReceiver:
        """Receiving side: meet the source within `rendezvous_s`."""

    @abstractmethod
    def abort(self, sync_id: str) -> None:
        """Either side: give up a sync; waits of this process for it end soon. Safe at any moment, from any thread."""

    def trim(self) -> None:  # noqa: B027 -- optional
        """Source side: let go of memory of syncs that are over and that nobody holds; the next sync makes some again."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; the object is not used again."""


WEIGHTS, CACHE = "weights", "kv_cache"
"""What `GenerationGate.wake` wakes: the words of vLLM's sleep mode."""


class GenerationGate:
    """What a member closes around its flip: generation, and where trainer and replica share a device, the engine's memory.

    As it is here it closes nothing (`NO_TRAFFIC`). A server whose requests run in threads or tasks of the member's process
    has `LockGate`.

    What happens to requests in flight and to cached keys and values is the gate's business: a sync does not touch
    keys and values computed under the old weights.
    """

    shares_device: bool = False
    """Whether trainer and replica are on one device (hybrid mode).

    The gate is then closed from `begin` on and the engine sleeps while bytes arrive: the weights of both versions and the
    cache are never on the device together. A failure before the flip wakes the replica as it was.
    """

    async def pause(self) -> None:
        """Stop generating; return when no forward pass runs."""

    async def resume(self) -> None:
        """Go on generating."""

    async def tokens(self) -> int | None:
        """Return how many tokens were made so far, at once; None where no request is under way, or nobody can tell."""
        return None

    async def sleep(self) -> None:
        """Free the device memory of cache and weights, where the engine can; called while closed.

        The weights must come back with `wake`: until the flip they are the only copy of the old version (vLLM: level 1;
        level 2 would throw them away).
        """

    async def wake(self, tags: list[str]) -> None:
        """Take back the memory of `tags`, "weights" or "kv_cache"; what has none to take back does nothing."""


NO_TRAFFIC = GenerationGate()
"""Says that nothing computes with the weights while a member flips: a request that did would see layers of two versions."""


class Member(ABC):
    """A replica as the manager sees it; how it is reached is its own business."""

    @property
    @abstractmethod
    def name(self) -> str:
        """A name for messages, unique among the members."""

    @abstractmethod
    async def begin(self, offer: SyncOffer) -> None:
        """Agree to `offer`, or raise `ManifestError` or `VersionError` naming what does not fit."""

    @abstractmethod
    async def transfer(self, sync_id: str) -> list[Echo]:
        """Stage everything beside the live weights while generation goes on; one echo per rank."""

    async def verify(self, sync_id: str, sent: Sent) -> None:  # noqa: B027 -- optional
        """Make sure that what is staged is what `sent` says, while generation goes on; raise what differs.

        One that does nothing here does so in `flip` alone, before it writes.
        """

    @abstractmethod
    async def flip(self, sync_id: str, sent: Sent) -> Flip:
        """Serve the staged weights from now on; refuse if they are not what `sent` says."""

    @abstractmethod
    async def commit(self, label: Label) -> Label:
        """Let `label` stand for what is served and return what stands; raise `VersionError` where it is not so."""

    @abstractmethod
    async def abort(self, sync_id: str) -> int:
        """Drop what was staged and return the version served; safe at any moment, also when nothing was."""

    @abstractmethod
    async def status(self) -> Status:
        """Return what is served now."""

    async def fence(self, reason: str) -> None:  # noqa: B027 -- optional
        """Let no label stand until the next commit; what is loaded is not to be trusted any more."""

    async def canary(self) -> list[float]:
        """Return the answer to a fixed question (say, the log-probs of a fixed prompt); empty when there is none."""
        return []

    def peer(self) -> Source | None:
        """Return it as a source of the version it serves, for joiners, or None; its `offer` raises where it kept no copy."""
        return None


class Source(ABC):
    """The sending side as the manager sees it."""

    collective: bool = False
    """As `WeightSource.collective`."""

    @abstractmethod
    async def offer(self, version: int, members: list[str]) -> SyncOffer:
        """Prepare to send the current weights as `version` to these members."""

    async def gather(self, offer: SyncOffer) -> bool:
        """Copy out what `send` is to send, and return True: the weights may then change while it is on its way.

        False leaves that to `send`, and the weights must stay as they are until it has returned.
        """
        return False

    @abstractmethod
    async def send(self, offer: SyncOffer) -> Sent:
        """Send every bucket to every member, gathered before or not."""

    @abstractmethod
    async def abort(self, sync_id: str) -> None:
        """Give up a sync; safe at any moment."""

    async def trim(self) -> None:  # noqa: B027 -- optional
        """Let go of memory that is kept for the next sync."""

    async def reference(self) -> list[float]:
        """Return the right answer to the members' canary for the weights sent last; empty where it has none."""
        return []
