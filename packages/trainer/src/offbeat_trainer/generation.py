"""From prompts to groups: one request per completion, each with a seed of its own, sent as one batch."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from offbeat_rollout import Completion, GenerateRequest, SamplingParams
from offbeat_trainer.seeds import derive_seed
from offbeat_trainer.types import Group, Prompt

GenerateMany = Callable[[Sequence[GenerateRequest]], Awaitable[list[Completion]]]
"""Makes the completions of a batch of requests, in their order; a replica pool's or an engine's own method."""


class GroupGenerator:
    """Satisfies `Generator` with whatever can complete a batch of requests."""

    def __init__(self, generate_many: GenerateMany) -> None:
        """Send batches to `generate_many`."""
        self._generate_many = generate_many
        self._calls = itertools.count()

    async def collect(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, group_size: int
    ) -> list[Group]:
        """Return one unscored group per prompt.

        With `sampling.seed`, the seed of a completion depends on that, on the prompt's uid and on its place in the
        group, and on nothing else: neither on the batch nor on the replica.
        """
        call = next(self._calls)
        requests = [
            GenerateRequest(
                request_id=f"{call}/{index}/{prompt.uid}",
                prompt_ids=prompt.token_ids,
                sampling=_own_seed(sampling, prompt, index),
            )
            for prompt in prompts
            for index in range(group_size)
        ]
        completions = await self._generate_many(requests)
        assert len(completions) == len(requests)
        return [
            Group(
                prompt=prompt, completions=tuple(completions[place * group_size : (place + 1) * group_size])
            )
            for place, prompt in enumerate(prompts)
        ]


def _own_seed(sampling: SamplingParams, prompt: Prompt, index: int) -> SamplingParams:
    if sampling.seed is None:
        return sampling
    return replace(sampling, seed=derive_seed(sampling.seed, prompt.uid, index))
