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

    async def read(self, key: str, *, who: str, timeout_s: float) -> list[Json]:
        """Return the answers of every rank under `key`, in rank order; the first tells how many ranks there are.

        Raises:
            TransferError: not every rank answered in time; names those that did not.
        """
        deadline = time.monotonic() + timeout_s
        answers: list[Json] = []
        num_ranks = 1
        while len(answers) < num_ranks:
            text = await self._one(f"{key}/{len(answers)}", deadline)
            if text is None:
                raise TransferError(f"rank {len(answers)} of {who} did not answer within {timeout_s:g} s")
            answers.append(_object(text))
            num_ranks = int(cast("int", answers[0].get("num_ranks", 1)))
        return answers

    async def has(self, key: str) -> bool:
        """Say whether something lies under `key`, after giving it a moment to arrive."""
        deadline = time.monotonic() + _ARRIVES_S
        while self._store.get(key) is None:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_POLL_MAX_S)
        return True

    async def _one(self, key: str, deadline: float) -> str | None:
        pause_s = _POLL_S
        while (
            text := self._store.get(key)
        ) is None:  # a request to a store of this process: some 50 microseconds
            if time.monotonic() > deadline:
                return None
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _POLL_MAX_S)
        self._store.delete(key)
        return text


def _object(text: str) -> Json:
    data: object = json.loads(text)
    if not isinstance(data, dict):
        raise WireError(f"mailbox: expected an object, got {text!r}")
    return cast("Json", data)
