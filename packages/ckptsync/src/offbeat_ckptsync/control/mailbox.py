"""Answers from worker processes whose engine's own calls return nothing: JSON on a small store, with deadlines."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, cast

from offbeat_ckptsync.errors import TransferError, WireError
from offbeat_ckptsync.store import Store

if TYPE_CHECKING:
    from offbeat_ckptsync.wire import Json

_POLL_S = 0.0005
_POLL_MAX_S = 0.005
_ARRIVES_S = 1.0  # a rank mails its refusal before its engine's call fails; the mail may still be on its way


class Mailbox:
    """Hosted beside the manager; workers write one key each per answer. Keys are deleted as they are read."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """Listen on `host`, loopback unless told otherwise."""
        self._store = Store.serve(host)

    @property
    def address(self) -> Json:
        """Where workers find it."""
        return {"host": self._store.host, "port": self._store.port}

    async def read(
        self, key: str, *, who: str, timeout_s: float, num_ranks: int = 1, hear_all: bool = False
    ) -> list[Json]:
        """Return the answers of every rank under `key`, in rank order; an answer tells how many ranks there are.

        `num_ranks` is how many there are at least. Once a rank has failed, those who say nothing within a moment are
        left out, unless `hear_all`.

        Raises:
            TransferError: not every rank answered in time; names those that did not.
        """
        deadline = time.monotonic() + timeout_s
        answers: dict[int, Json] = {}
        pause_s, has_failed = _POLL_S, False
        while True:
            for rank in range(num_ranks):
                if rank not in answers and (text := self._store.get(f"{key}/{rank}")) is not None:
                    self._store.delete(f"{key}/{rank}")
                    answers[rank] = _object(text)
                    num_ranks = max(num_ranks, int(cast("int", answers[rank].get("num_ranks", 1))))
                    if "error" in answers[rank] and not has_failed:
                        has_failed = True
                        deadline = deadline if hear_all else min(deadline, time.monotonic() + _ARRIVES_S)
            silent = [str(rank) for rank in range(num_ranks) if rank not in answers]
            is_late = time.monotonic() > deadline
            if not silent or (is_late and has_failed and not hear_all):
                return [answers[rank] for rank in sorted(answers)]
            if is_late:
                ranks = f"rank{'s' if len(silent) > 1 else ''} {', '.join(silent)}"
                raise TransferError(f"{ranks} of {who} did not answer within {timeout_s:g} s")
            await asyncio.sleep(pause_s)  # a request to a store of this process takes some 50 microseconds
            pause_s = min(pause_s * 1.5, _POLL_MAX_S)

    async def has(self, key: str, num_ranks: int = 1) -> bool:
        """Say whether an answer of any rank lies under `key`, after giving it a moment to arrive."""
        deadline = time.monotonic() + _ARRIVES_S
        while all(self._store.get(f"{key}/{rank}") is None for rank in range(num_ranks)):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_POLL_MAX_S)
        return True


def _object(text: str) -> Json:
    data: object = json.loads(text)
    if not isinstance(data, dict):
        raise WireError(f"mailbox: expected an object, got {text!r}")
    return cast("Json", data)
