"""Which replica gets which request: a plan made of numbers, with nothing awaited and nothing read from a clock."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from offbeat_rollout.types import GenerateRequest

_PROMPTS_REMEMBERED = 8192


def cost_tokens(request: GenerateRequest) -> int:
    """Return the tokens a request may take: its prompt and everything it is allowed to make."""
    return len(request.prompt_ids) + request.sampling.max_tokens


class Router:
    """Spreads requests by outstanding tokens and keeps those of one prompt together while that is fair.

    A request goes where its prompt went before, unless that replica is more than `slack` ahead of the least loaded;
    then, and for a new prompt, it goes to the least loaded. Equally loaded replicas take turns, so that a lone request
    does not always meet the first one. `slack` is a share of the mean load: from equal loads, the loads after a batch
    differ by at most `slack * mean` plus one request.
    """

    def __init__(self, names: Sequence[str], slack: float = 0.05) -> None:
        """Route among `names`."""
        self.loads = dict.fromkeys(names, 0)
        self._slack = slack
        self._homes: OrderedDict[tuple[int, ...], str] = OrderedDict()
        self._turns = dict.fromkeys(names, 0)
        self._turn = 0

    def route(self, requests: Sequence[GenerateRequest], allowed: Iterable[str]) -> dict[str, list[int]]:
        """Return the indices of `requests` each of the `allowed` replicas gets, and count them as outstanding."""
        open_names = [name for name in self.loads if name in frozenset(allowed)]
        assert open_names, "routing needs a replica"
        total = sum(self.loads[name] for name in open_names) + sum(map(cost_tokens, requests))
        slack = self._slack * total / len(open_names)
        shares: dict[str, list[int]] = {}
        # Requests of one prompt in a row, dear ones first: what is placed last should be small.
        order = sorted(
            range(len(requests)), key=lambda i: (-cost_tokens(requests[i]), requests[i].prompt_ids)
        )
        for index in order:
            name = self._place(requests[index].prompt_ids, open_names, slack)
            self.loads[name] += cost_tokens(requests[index])
            shares.setdefault(name, []).append(index)
        return {name: sorted(indices) for name, indices in shares.items()}

    def release(self, name: str, requests: Iterable[GenerateRequest]) -> None:
        """Count `requests` as no longer outstanding at `name`."""
        self.loads[name] -= sum(map(cost_tokens, requests))
        assert self.loads[name] >= 0, "released more than was routed"

    def forget(self, name: str) -> None:
        """Send no prompt to `name` for the sake of the past."""
        self._homes = OrderedDict((prompt, home) for prompt, home in self._homes.items() if home != name)

    def _place(self, prompt: tuple[int, ...], names: Sequence[str], slack: float) -> str:
        least = min(self.loads[name] for name in names)
        home = self._homes.get(prompt)
        if home is None or home not in names or self.loads[home] - least > slack:
            home = min(
                (name for name in names if self.loads[name] == least), key=lambda name: self._turns[name]
            )
            self._turn += 1
            self._turns[home] = self._turn
        self._homes[prompt] = home
        self._homes.move_to_end(prompt)
        if len(self._homes) > _PROMPTS_REMEMBERED:
            self._homes.popitem(last=False)
        return home
