"""Which receiving rank meets which sender, and who is missing. Pure."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from offbeat_ckptsync.errors import TransferError
from offbeat_ckptsync.values import Seat, SyncOffer

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


def key_of(member: str, rank: int) -> str:
    """Return how `SyncOffer.endpoints` calls a rank."""
    return f"{member}/{rank}"


def missing_ranks(seats: Collection[Seat], members: Sequence[str]) -> list[str]:
    """Return in words which ranks of `members` are not among `seats`: of a member nobody of whom is there, the first."""
    here = {(seat.member, seat.rank) for seat in seats}
    ranks = {seat.member: seat.num_ranks for seat in seats}
    seats_of = (Seat(member=member, rank=rank) for member in members for rank in range(ranks.get(member, 1)))
    return [str(seat) for seat in seats_of if (seat.member, seat.rank) not in here]


def met_by(offer: SyncOffer, seat: Seat) -> tuple[SyncOffer, Seat]:
    """Return the offer and the seat as the transport of a receiving rank sees them.

    Where each rank meets a sender of its own, the rank is a member of its own there, called as in `endpoints`.

    Raises:
        TransferError: the others have senders of their own, and this rank has none.
    """
    if not offer.endpoints:
        return offer, seat
    name = key_of(seat.member, seat.rank)
    if name not in offer.endpoints:
        raise TransferError(f"{seat} has no sender: those of this sync are for {', '.join(offer.endpoints)}")
    return met_at(offer, offer.endpoints[name]), Seat(member=name)


def met_at(offer: SyncOffer, endpoint: dict[str, str | int | float]) -> SyncOffer:
    """Return the offer as it is for those that meet at this one of several senders' endpoints."""
    return dataclasses.replace(offer, endpoint=endpoint, endpoints={})
