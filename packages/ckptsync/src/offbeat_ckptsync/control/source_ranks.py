"""The ranks of a source as one: rank 0 sends to all, or each rank to the receiving ranks beside it, on its own GPU say.

Gathering is a collective, after which every rank that sends holds whole tensors. Where one sends, the others take part. Where
each sends, nothing crosses from GPU to GPU: all pack and digest the same bytes, and a rank whose digests differ fails the
sync before anybody changes over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from offbeat_ckptsync.ends.buckets import bucket_starts, buckets_of, key_of, tensors_in
from offbeat_ckptsync.errors import DigestError
from offbeat_ckptsync.seams import Source
from offbeat_ckptsync.toolkit.ops import SENDER_OPS, answer_in, request_of, value_of
from offbeat_ckptsync.toolkit.threads import in_thread
from offbeat_ckptsync.toolkit.wire import Json

if TYPE_CHECKING:
    from offbeat_ckptsync.values import Sent, SyncOffer

AskRanks = Callable[[str, Mapping[int, Json]], Awaitable[Mapping[int, Json]]]
"""Carries an operation with a request for each of some ranks, by rank, waits for all of them, and brings the outcomes back.

The operations are `SENDER_OPS`, but that "gather", or "send" without it, comes together with "walk", as `PASS`. A "send" by
itself only waits until what was gathered has left: the rank may compute meanwhile.
"""

PASS = "pass"
"""A pass over the weights: every rank gets {"op": "gather", "send" or "walk", "request": ..}."""


class SourceRanks(Source):
    """Satisfies `Source` by ranks that each have a `Sender`."""

    def __init__(
        self, ask: AskRanks, num_ranks: int, beside: Callable[[str], Sequence[int]] | None = None
    ) -> None:
        """Ask ranks 0 to `num_ranks` - 1 by `ask`.

        `beside` says for each rank of a member, by the member's name, which rank sends to it; without it rank 0 sends to all.
        """
        self._ask = ask
        self._num_ranks = num_ranks
        self._beside = beside
        self._open: dict[str, Mapping[int, list[str]]] = {}  # by sync: to whom each sending rank sends
        self._gathered = ""  # the sync that is

    async def offer(self, version: int, members: list[str]) -> SyncOffer:
        """Prepare to send the current weights as `version` to these members."""
        shares = self._shares(members)
        first, *others = shares
        offer: SyncOffer = await self._one("offer", first, version, shares[first])
        self._open = {offer.sync_id: shares}
        if self._beside is None:
            return offer
        endpoints = await self._opened(offer, {rank: shares[rank] for rank in others})
        endpoints[first] = offer.endpoint
        free = [int(endpoint["free_bytes"]) for endpoint in endpoints.values() if "free_bytes" in endpoint]
        if free:  # what one picks by the room on its GPU, all are to pick: the kind of digest goes with it
            buckets = await in_thread(lambda: buckets_of(offer), name=f"plan {version}")
            if min(free) < bucket_starts(buckets)[1]:
                shares = _by_machine(shares, endpoints)
                self._open = {offer.sync_id: shares}
                endpoints = await self._opened(offer, shares)
            endpoints = {rank: {**endpoint, "room_bytes": min(free)} for rank, endpoint in endpoints.items()}
        return dataclasses.replace(
            offer,
            endpoints={rank_id: endpoints[rank] for rank, rank_ids in shares.items() for rank_id in rank_ids},
        )

    async def gather(self, offer: SyncOffer) -> bool:
        """See `Source.gather`."""
        await self._pass("gather", offer)
        self._gathered = offer.sync_id
        return True

    async def send(self, offer: SyncOffer) -> Sent:
        """Send every bucket to every member.

        Raises:
            DigestError: the ranks sent different bytes; names the first bucket.
        """
        shares = self._shares_of(offer)
        if self._gathered == offer.sync_id:
            request = request_of(SENDER_OPS, "send", (offer, [*shares]))
            sent: dict[int, Sent] = await self._each("send", dict.fromkeys(shares, request))
        else:
            answers = await self._pass("send", offer)
            sent = {rank: value_of(SENDER_OPS, "send", answers[rank]) for rank in shares}
        return sent[0] if self._beside is None else _together(sent, offer, shares)

    def _shares_of(self, offer: SyncOffer) -> Mapping[int, list[str]]:
        return self._open.get(offer.sync_id, {0: []})

    async def _pass(self, op: str, offer: SyncOffer) -> dict[int, Json]:
        """Let the ranks that send do `op`, and the others take part."""
        senders = list(self._shares_of(offer))
        send: Json = {"op": op, "request": request_of(SENDER_OPS, op, (offer, senders))}
        walk: Json = {"op": "walk", "request": request_of(SENDER_OPS, "walk", (senders,))}
        outcomes = await self._ask(
            PASS, {rank: send if rank in senders else walk for rank in range(self._num_ranks)}
        )
        return {rank: answer_in(outcome, where=self._where(op, rank)) for rank, outcome in outcomes.items()}

    async def abort(self, sync_id: str) -> None:
        """Give up a sync; safe at any moment."""
        request = request_of(SENDER_OPS, "abort_send", (sync_id,))
        await self._each("abort_send", dict.fromkeys(self._open.get(sync_id, [0]), request))

    async def _opened(
        self, offer: SyncOffer, shares: Mapping[int, list[str]]
    ) -> dict[int, dict[str, str | int | float]]:
        return await self._each(
            "open",
            {
                rank: request_of(SENDER_OPS, "open", (offer.sync_id, rank_ids))
                for rank, rank_ids in shares.items()
            },
        )

    def _shares(self, members: list[str]) -> dict[int, list[str]]:
        """Return to whom each sending rank sends, in rank order: to members, or to single ranks of theirs."""
        if self._beside is None:
            return {0: members}
        rank_ids = [
            (sender, key_of(member, rank))
            for member in members
            for rank, sender in enumerate(self._beside(member))
        ]
        return {
            sender: [rank_id for other, rank_id in rank_ids if other == sender]
            for sender in sorted({sender for sender, _ in rank_ids})
        }

    async def _one(self, op: str, rank: int, *values: object) -> Any:  # noqa: ANN401 -- as the table says
        return (await self._each(op, {rank: request_of(SENDER_OPS, op, values)}))[rank]

    async def _each(self, op: str, requests: Mapping[int, Json]) -> dict[int, Any]:
        outcomes: Mapping[int, Json] = await self._ask(op, requests) if requests else {}
        return {
            rank: value_of(SENDER_OPS, op, answer_in(outcome, where=self._where(op, rank)))
            for rank, outcome in outcomes.items()
        }

    def _where(self, op: str, rank: int) -> str:
        return op if self._beside is None else f"{op}: rank {rank} of the source"


def _by_machine(
    shares: Mapping[int, list[str]], endpoints: Mapping[int, Mapping[str, object]]
) -> dict[int, list[str]]:
    """Return shares in which one rank per machine sends: in host memory one copy of the weights does for all."""
    joined: dict[int, list[str]] = {}
    leaders: dict[object, int] = {}
    for rank, rank_ids in shares.items():
        leader = leaders.setdefault(endpoints[rank]["machine"], rank)
        joined.setdefault(leader, []).extend(rank_ids)
    return joined


def _together(sent: Mapping[int, Sent], offer: SyncOffer, shares: Mapping[int, list[str]]) -> Sent:
    """Return what all ranks sent as one, once they have sent the same."""
    first, *others = sent
    for rank in others:
        _require_same(sent[first], sent[rank], f"ranks {first} and {rank} of the source", offer)
    times = ("gather_s", "pack_s", "wire_s", "digest_s", "send_s")
    slowest = {name: max(getattr(each, name) for each in sent.values()) for name in times}
    whom = "; ".join(f"rank {rank} to {', '.join(rank_ids)}" for rank, rank_ids in shares.items())
    return dataclasses.replace(
        sent[first], **slowest, why=f"each rank hands what it gathered to its neighbours: {whom}"
    )


def _require_same(one: Sent, other: Sent, who: str, offer: SyncOffer) -> None:
    if one.transport != other.transport:
        raise DigestError(
            f"{who} picked {one.transport} ({one.why}) and {other.transport} ({other.why}), which digest differently: set "
            "`transport` to one that suits both"
        )
    if one.manifest_digest != other.manifest_digest:
        raise DigestError(f"{who} sent other tensors: {one.manifest_digest} and {other.manifest_digest}")
    buckets = buckets_of(offer)
    for bucket, its, others in zip(buckets, one.bucket_digests, other.bucket_digests, strict=True):
        if its != others:
            raise DigestError(
                f"{who} hold different weights: bucket {bucket.index} has digests {its} and {others}; it holds "
                f"{tensors_in(offer.manifest, bucket)}"
            )
