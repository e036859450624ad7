"""How many requests a pool has under way at once; the rest wait where they can still go to anybody."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Sequence

    from offbeat_rollout.types import GenerateRequest

_PIECES = 8  # the room is given away in eighths at least: a call for every single request would cost more than it gains


class Place:
    """Requests of one call that wait in the queue."""

    def __init__(self, requests: Sequence[GenerateRequest], aborted: Callable[[str], None]) -> None:
        """Keep `requests`; `aborted` is told of those that are ended here."""
        self.rest = {request.request_id: request for request in requests}
        self.aborted = aborted
        self.look = asyncio.Event()


class Gate:
    """Lets requests through while there is room, first come, first served."""

    def __init__(self, room: Callable[[], int | None]) -> None:
        """Let `room()` requests be inside; None is no limit, and where there is none at all everybody may see for himself."""
        self._room = room
        self._inside = 0
        self._queue: list[Place] = []

    @contextmanager
    def line_up(
        self, requests: Sequence[GenerateRequest], aborted: Callable[[str], None]
    ) -> Generator[Place]:
        """Keep `requests` in the queue until the body ends."""
        place = Place(requests, aborted)
        self._queue.append(place)
        try:
            yield place
        finally:
            self._queue.remove(place)
            self.look_again()

    async def enter(self, place: Place) -> list[GenerateRequest]:
        """Wait for a turn and return who may go in; nobody once nobody is left."""
        while place.rest:
            count = self._open(len(place.rest)) if self._queue[0] is place else 0
            if count:
                self._inside += count
                return [place.rest.pop(request_id) for request_id in [*islice(place.rest, count)]]
            place.look.clear()
            await place.look.wait()  # someone inside ends, by the deadlines of requests and replicas
        return []

    def leave(self, count: int = 1) -> None:
        """So many have gone."""
        self._inside -= count
        assert self._inside >= 0, "more left than had entered"
        self.look_again()

    def abort(self, request_ids: Collection[str]) -> None:
        """End those of `request_ids` that wait."""
        wanted = frozenset(request_ids)
        for place in self._queue:
            for request_id in place.rest.keys() & wanted:
                del place.rest[request_id]
                place.aborted(request_id)
            place.look.set()

    def look_again(self) -> None:
        """Let whose turn it is see whether there is room."""
        if self._queue:
            self._queue[0].look.set()

    def _open(self, wanted: int) -> int:
        room = self._room()
        if not room:
            return wanted
        free = room - self._inside
        return min(wanted, free) if free >= min(wanted, max(1, room // _PIECES)) else 0
