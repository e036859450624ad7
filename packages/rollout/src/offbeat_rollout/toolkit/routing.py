"""Which replica gets which request: a plan made of numbers, with nothing awaited and nothing read from a clock."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Sequence

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


_PLACES_REMEMBERED = 8192


def cost_tokens(request: GenerateRequest) -> int:
    """Return the tokens a request may take: its prompt and everything it is allowed to make."""
    return len(request.prompt_ids) + request.sampling.max_tokens


def stickiness(requests: Sequence[GenerateRequest]) -> list[str | int]:
    """Return what those that belong on one replica have in common: their session, else a digest of the prompt.

    Prompts with one digest by chance share a replica, which harms nobody.
    """
    # A tuple's hash is computed anew each time, and the samples of a prompt hold the same long tuple.
    prompts = {id(request.prompt_ids): request.prompt_ids for request in requests if request.session is None}
    digests = {key: hash(prompt) for key, prompt in prompts.items()}
    return [
        digests[id(request.prompt_ids)] if request.session is None else request.session
        for request in requests
    ]


class Router:
    """Spreads requests by outstanding tokens and keeps those of one session, or prompt, together while that is fair.

    A request goes where its session went before, unless that replica is more than `slack` ahead of the least loaded;
    then, and for a new session, it goes to the least loaded. Equally loaded replicas take turns, so that a lone request
    does not always meet the first one. `slack` is a share of the mean load: from equal loads, the loads after a batch
    differ by at most `slack * mean` plus one request. For a session that was named its prompt comes on top of the slack:
    so much is spared where the turns before it are in the cache.
    """

    def __init__(self, names: Iterable[str] = (), slack: float = 0.05) -> None:
        """Route among `names`."""
        self.loads = dict.fromkeys(names, 0)
        self._slack = slack
        self._homes: OrderedDict[str | int, str] = OrderedDict()
        self._turns = dict.fromkeys(self.loads, 0)
        self._turn = 0

    def add(self, name: str) -> None:
        """Route to `name` as well; if it is known, as to one that has nothing to do and no past."""
        self.drop(name)
        self.loads[name] = 0
        self._turns[name] = self._turn

    def drop(self, name: str) -> None:
        """Forget `name`, and what it had to do."""
        self.loads.pop(name, None)
        self._turns.pop(name, None)
        self.forget(name)

    def route(self, requests: Sequence[GenerateRequest], allowed: Iterable[str]) -> dict[str, list[int]]:
        """Return the indices of `requests` each of the `allowed` replicas gets, and count them as outstanding."""
        wanted = frozenset(allowed)
        open_names = [name for name in self.loads if name in wanted]
        assert open_names, "routing needs a replica"
        costs = [cost_tokens(request) for request in requests]
        sticky = stickiness(requests)
        total = sum(self.loads[name] for name in open_names) + sum(costs)
        slack = self._slack * total / len(open_names)
        # Requests of one session in a row, dear ones first: what is placed last should be small.
        first_of: dict[str | int, int] = {}
        for index, key in enumerate(sticky):
            first_of.setdefault(key, index)
        shares: dict[str, list[int]] = {}
        for index in sorted(range(len(requests)), key=lambda i: (-costs[i], first_of[sticky[i]])):
            named = requests[index].session is not None
            spared = len(requests[index].prompt_ids) if named else 0
            name = self._place(sticky[index], open_names, slack + spared)
            self.loads[name] += costs[index]
            shares.setdefault(name, []).append(index)
        return {name: sorted(indices) for name, indices in shares.items()}

    def release(self, name: str, request: GenerateRequest) -> None:
        """Count `request` as no longer outstanding at `name`."""
        self.loads[name] -= cost_tokens(request)
        assert self.loads[name] >= 0, "released more than was routed"

    def forget(self, name: str) -> None:
        """Send nothing to `name` for the sake of the past."""
        self._homes = OrderedDict((key, home) for key, home in self._homes.items() if home != name)

    def _place(self, key: str | int, names: Sequence[str], slack: float) -> str:
        least = min(self.loads[name] for name in names)
        home = self._homes.get(key)
        if home is None or home not in names or self.loads[home] - least > slack:
            home = min(
                (name for name in names if self.loads[name] == least), key=lambda name: self._turns[name]
            )
            self._turn += 1
            self._turns[home] = self._turn
        self._homes[key] = home
        self._homes.move_to_end(key)
        if len(self._homes) > _PLACES_REMEMBERED:
            self._homes.popitem(last=False)
        return home
