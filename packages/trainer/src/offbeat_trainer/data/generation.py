"""From prompts to groups: one request per completion, each with a seed of its own, sent as one batch."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import fields, replace
from typing import Any

from offbeat_rollout import Completion, Finish, GenerateRequest, SamplingParams
from offbeat_trainer.data.seeds import derive_seed, derive_seeds
from offbeat_trainer.data.types import Group, Prompt
from offbeat_trainer.errors import PlanRefused

GenerateMany = Callable[[Sequence[GenerateRequest]], Awaitable[list[Completion]]]
"""Makes the completions of a batch of requests, in their order; a replica pool's or an engine's own method."""

Abort = Callable[[Collection[str]], Awaitable[None]]
"""Ends requests by their ids, wherever they are; they return with what they have."""

Keep = Callable[[tuple[Completion, ...]], None]
"""Takes what an interrupted group has so far: completions that ended, and unfinished ones (`Finish.ABORT`)."""


class GroupGenerator:
    """Satisfies `Generator` with whatever can complete a batch of requests."""

    def __init__(self, generate_many: GenerateMany, abort: Abort | None = None) -> None:
        """Send batches to `generate_many`; without `abort`, groups cannot be interrupted."""
        self._generate_many = generate_many
        self._abort = abort
        self._calls = itertools.count()
        self._running: set[str] = set()
        self._going = asyncio.Event()
        self._going.set()

    async def collect(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, group_size: int
    ) -> list[Group]:
        """Return one unscored group per prompt.

        With `sampling.seed`, the seed of a completion depends on that, on the prompt's uid and on its place in the
        group, and on nothing else: neither on the batch nor on the replica.
        """
        call = next(self._calls)
        requests = [
            _request(f"{call}/{index}/{prompt.uid}", prompt, own, None)
            for prompt in prompts
            for index, own in enumerate(_own_seeds(sampling, prompt, range(group_size)))
        ]
        completions = await self._generate_many(requests)
        assert len(completions) == len(requests)
        return [
            Group(
                prompt=prompt, completions=tuple(completions[place * group_size : (place + 1) * group_size])
            )
            for place, prompt in enumerate(prompts)
        ]

    async def complete(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        group_size: int,
        begun: tuple[Completion, ...] = (),
        keep: Keep | None = None,
    ) -> Group:
        """Return the group of `prompt`, whole, however often `interrupt` came in between.

        Unfinished completions are continued from their tokens, with log-probs and versions as they were; the sampling
        seed of a continuation is derived from the first one's and the number of tokens, so no random number is used
        twice. Seeds of what is never interrupted are those of `collect`. `keep` hears of every interruption.
        """
        have: list[Completion | None] = list(begun) if begun else [None] * group_size
        assert len(have) == group_size
        while places := [
            place for place, one in enumerate(have) if one is None or one.finish is Finish.ABORT
        ]:
            await (
                self._going.wait()
            )  # `interrupt` and `go_on` are the two ends of one weight sync, which has deadlines
            call = next(self._calls)
            requests = [
                _request(f"{call}/{place}/{prompt.uid}", prompt, own, have[place])
                for place, own in zip(places, _own_seeds(sampling, prompt, places), strict=True)
            ]
            ids = [request.request_id for request in requests]
            self._running.update(ids)
            try:
                made = await self._generate_many(requests)
            finally:
                self._running.difference_update(ids)
            for place, more in zip(places, made, strict=True):
                have[place] = _joined(have[place], more, sampling)
            if keep is not None and any(one.finish is Finish.ABORT for one in _known(have)):
                keep(_known(have))
        return Group(prompt=prompt, completions=_known(have))

    async def interrupt(self) -> None:
        """End what `complete` has under way, with its tokens so far; it waits for `go_on` and is continued then.

        Raises:
            PlanRefused: there is no way to abort requests.
        """
        if self._abort is None:
            raise PlanRefused("this generator cannot abort requests; use `partial: keep` or `partial: wait`")
        self._going.clear()
        if self._running:
            await self._abort(frozenset(self._running))

    def go_on(self) -> None:
        """Let interrupted groups go on. Harmless when nothing was interrupted."""
        self._going.set()


def _own_seeds(sampling: SamplingParams, prompt: Prompt, places: Sequence[int]) -> list[SamplingParams]:
    """Return `sampling` for each of `places` in the group of `prompt`, with a seed of its own."""
    if sampling.seed is None:
        return [sampling] * len(places)
    # `replace` reads every field anew for each completion, of which there are thousands a second.
    shared: dict[str, Any] = {one.name: getattr(sampling, one.name) for one in fields(sampling)}
    del shared["seed"]
    seeds = derive_seeds(sampling.seed, prompt.uid, places=places)
    return [SamplingParams(**shared, seed=seed) for seed in seeds]


def _request(
    name: str, prompt: Prompt, sampling: SamplingParams, begun: Completion | None
) -> GenerateRequest:
    """Return the request for a completion, or for the rest of one that was begun, where its prompt has been computed."""
    if begun is None or not begun.num_tokens:
        return GenerateRequest(
            request_id=name, prompt_ids=prompt.token_ids, sampling=sampling, session=prompt.uid
        )
    done = begun.num_tokens
    rest = replace(
        sampling,
        max_tokens=sampling.max_tokens - done,
        seed=None if sampling.seed is None else derive_seed(sampling.seed, "continued", done),
    )
    prompt_ids = (*prompt.token_ids, *begun.token_ids.tolist())
    return GenerateRequest(request_id=name, prompt_ids=prompt_ids, sampling=rest, session=prompt.uid)


def _joined(begun: Completion | None, more: Completion, sampling: SamplingParams) -> Completion:
    """Return `begun` with its continuation. An abort that came after the last token changes nothing."""
    whole = more if begun is None else begun.followed_by(more)
    if whole.finish is not Finish.ABORT or not whole.num_tokens:
        return whole
    if whole.token_ids[-1] in sampling.stop_token_ids:
        return replace(whole, finish=Finish.STOP)
    if whole.num_tokens >= sampling.max_tokens:
        return replace(whole, finish=Finish.LENGTH)
    return whole


def _known(have: Sequence[Completion | None]) -> tuple[Completion, ...]:
    assert all(one is not None for one in have)
    return tuple(one for one in have if one is not None)
