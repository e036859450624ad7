"""What the source keeps for deltas: the packed bytes of its last two contents, and what one sync compares with which."""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from offbeat_ckptsync.plan.buckets import bucket_starts, buckets_of
from offbeat_ckptsync.plan.deltas import find_delta, runs_of
from offbeat_ckptsync.plan.digest import label_of
from offbeat_ckptsync.source.pipeline import SendSession

if TYPE_CHECKING:
    from offbeat_ckptsync.config import SyncConfig
    from offbeat_ckptsync.seams import Transport
    from offbeat_ckptsync.values import Bucket, Manifest, Sent, SyncOffer


_Plan = tuple[str, int]  # manifest digest and bucket size: contents of another plan cannot be compared


@dataclass(slots=True)
class _Content:
    memory: torch.Tensor  # uint8, buckets end to end
    plan: _Plan
    sync_id: str
    digest: str = ""  # the content digest of its label, while members may hold it


class Bases:
    """The last two contents that were packed, whichever of them was committed.

    A source is not told of a commit. It need not be: members say at `begin` which content they hold, and they hold only
    what was committed to them. So one of two is the base, whatever became of the syncs between, and the other gives its
    memory to the next content. The memory is twice the packed weights.
    """

    def __init__(self) -> None:
        """Keep nothing yet."""
        self._kept: list[_Content] = []  # the older one first; at most two

    def digests(self, manifest: Manifest, bucket_bytes: int) -> tuple[str, ...]:
        """Return the contents that a sync of these tensors, in buckets of this size, can be compared with."""
        plan = (manifest.digest, bucket_bytes)
        return tuple(dict.fromkeys(each.digest for each in self._kept if each.digest and each.plan == plan))

    def base(self, digest: str) -> torch.Tensor | None:
        """Return the bytes of this content, or None where it is not kept."""
        return next((each.memory for each in self._kept if digest and each.digest == digest), None)

    def room(self, offer: SyncOffer, num_bytes: int, device: str) -> torch.Tensor:
        """Return memory for the content of `offer`, uint8 [num_bytes].

        Its base is not overwritten, nor, where it has none, the last content that may have been committed.
        """
        whole = [each for each in self._kept if each.digest]
        stays = [each for each in whole if each.digest == offer.base][:1] or whole[-1:]
        spare = next((each.memory for each in self._kept if all(each is not one for one in stays)), None)
        if spare is None or spare.numel() != num_bytes or spare.device.type != torch.device(device).type:
            spare = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._kept = [*stays, _Content(spare, (offer.manifest.digest, offer.bucket_bytes), offer.sync_id)]
        return spare

    def is_whole(self, digest: str) -> None:
        """Remember that what was packed last is complete, and its content digest."""
        self._kept[-1].digest = digest

    def drop(self) -> None:
        """Forget what was packed last: it is not complete, and threads may still write to its memory."""
        self._kept = self._kept[:-1]

    def aborted(self, sync_id: str) -> None:
        """Remember that nobody holds what this sync brought."""
        for each in self._kept:
            if each.sync_id == sync_id:
                each.digest = ""


class DeltaSession(SendSession):
    """One sync of a source with deltas switched on: lends the memory to pack into, finds what changed, counts."""

    def __init__(self, bases: Bases, transport: Transport, offer: SyncOffer, config: SyncConfig) -> None:
        """Compare what `offer` sends with its `base`; `bases` keeps it for the next sync."""
        super().__init__(lambda num_bytes: transport.lend(offer, num_bytes))
        self._transport = transport
        self._offer = offer
        self._bases = bases
        self._max_fraction = config.delta_max_fraction
        self._starts, _ = bucket_starts(buckets_of(offer))
        self._base: torch.Tensor | None = None
        self._keeps = False
        self._lock = threading.Lock()
        self._num_changed = self._num_words = self._num_deltas = 0

    def lend(self, num_bytes: int) -> torch.Tensor | None:
        """Return memory to pack into: the transport's own where it lends some, else that of the next content."""
        lent = super().lend(num_bytes)
        if lent is not None or not self._transport.carries_deltas:
            self._why = f"{type(self._transport).__name__} does not carry deltas" + (
                ": receivers read the source's own memory" if lent is not None else ""
            )
            return lent
        self._base = self._bases.base(self._offer.base)
        self._keeps = True
        if self._base is None:
            self._why = "no content to compare with" + (
                " that all members hold" if self._offer.bases else " was sent before"
            )
        return self._bases.room(self._offer, num_bytes, self._transport.device)

    def delta(self, bucket: Bucket, payload: torch.Tensor) -> torch.Tensor | None:
        """Return what changed in `bucket` since the base, or None where it is to go whole. Called in any thread."""
        if self._base is None:
            return None
        start = self._starts[bucket.index]
        base = self._base[start : start + bucket.num_bytes]
        found = find_delta(
            runs_of(self._offer.manifest, bucket), base, payload, max_fraction=self._max_fraction
        )
        with self._lock:
            self._num_changed += found.num_changed
            self._num_words += found.num_words
            self._num_deltas += found.payload is not None
        return found.payload

    def end(self, sent: Sent | None) -> None:
        """See `SendSession.end`."""
        if not self._keeps:
            return
        if sent is None:
            self._bases.drop()
        else:
            self._bases.is_whole(label_of(sent, self._offer.bucket_bytes).content_digest)

    def explained(self, sent: Sent) -> Sent:
        """See `SendSession.explained`."""
        fraction = None if self._base is None else self._num_changed / max(self._num_words, 1)
        return dataclasses.replace(
            sent, num_deltas=self._num_deltas, delta_fraction=fraction, delta_why=self._why
        )
