"""The roll call of transports that meet at a store: every receiving rank writes a word, the source reads them all."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from offbeat_ckptsync.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat_ckptsync.store import Store
    from offbeat_ckptsync.values import Seat

Word = dict[str, Any]
"""What a rank says: "num_ranks" of its member, and what the transport wants to know."""


def answer(store: Store, prefix: str, seat: Seat, word: Word) -> None:
    """Say, as `seat`, that it is here."""
    store.set(f"{prefix}{seat.member}/{seat.rank}", json.dumps({"num_ranks": seat.num_ranks, **word}))


def call_roll(
    store: Store, prefix: str, members: list[str], timeout_s: float, stop: Callable[[], bool]
) -> dict[str, list[Word]]:
    """Wait for the word of every rank of every member; in rank order, by member.

    Raises:
        TransferError: not all answered within `timeout_s`, or `stop()` said so; names who is missing.
    """
    deadline = time.monotonic() + timeout_s

    def wait(keys: list[str]) -> None:
        missing = store.wait(keys, deadline - time.monotonic(), stop)
        if missing:
            names = ", ".join(
                "rank {1} of {0}".format(*key.removeprefix(prefix).rsplit("/", 1)) for key in missing
            )
            cause = "aborted" if stop() else f"no answer within {timeout_s:g} s"
            raise TransferError(f"{cause} at the roll call; missing: {names}")

    def read(member: str, rank: int) -> Word:
        return json.loads(store.get(f"{prefix}{member}/{rank}") or "{}")

    wait([f"{prefix}{member}/0" for member in members])
    sizes = {member: int(read(member, 0)["num_ranks"]) for member in members}
    wait([f"{prefix}{member}/{rank}" for member in members for rank in range(sizes[member])])
    return {member: [read(member, rank) for rank in range(sizes[member])] for member in members}


def forget(store: Store, prefix: str, seats: list[tuple[str, int]]) -> None:
    """Take the words of these (member, rank) out of the store."""
    for member, rank in seats:
        store.delete(f"{prefix}{member}/{rank}")
