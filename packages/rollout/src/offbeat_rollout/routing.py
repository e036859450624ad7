"""Which replica gets which request: a plan made of numbers, with nothing awaited and nothing read from a clock."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from offbeat_rollout.types import GenerateRequest

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
