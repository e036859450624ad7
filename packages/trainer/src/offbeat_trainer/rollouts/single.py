"""One turn, from a prompt to a scored group: one request per completion, each with a seed of its own, and what a scorer says.

Every random choice of a run is a pure function of the run's seed and of where it is made. That is what makes a resumed run
repeat the undisturbed one: nothing random is carried along.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from offbeat_rollout import Completion, Finish, GenerateRequest, SamplingParams
from offbeat_trainer.data.types import Group, Prompt, Trajectory
from offbeat_trainer.errors import GroupFailed, PlanRefused, together
from offbeat_trainer.watch.watchdog import Timeline

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat_trainer.config import SamplingConfig
    from offbeat_trainer.data.interface import Generator, Rollout, Scorer, Task

log = logging.getLogger(__name__)

GenerateMany = Callable[[Sequence[GenerateRequest]], Awaitable[list[Completion]]]
"""Makes the completions of a batch of requests, in their order; a replica pool's or an engine's own method."""

Abort = Callable[[Collection[str]], Awaitable[None]]
"""Ends requests by their ids, wherever they are; they return with what they have."""

Keep = Callable[[tuple[Trajectory, ...]], None]
"""Takes what an interrupted group has so far: trajectories that ended, and unfinished ones (`Finish.ABORT`)."""


class SingleTurn:
    """Satisfies `Rollout` with completions as they come, and a scorer. `generator` and `scorer` are for who needs one alone."""

    def __init__(self, generator: Generator, scorer: Scorer, timeline: Timeline | None = None) -> None:
        """Draw on `timeline` when groups are generated."""
        self.generator = generator
        self.scorer = scorer
        self._timeline = Timeline() if timeline is None else timeline
        self._numbers = itertools.count()

    async def run(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        n: int,
        begun: tuple[Trajectory, ...] = (),
        keep: Keep | None = None,
    ) -> Group:
        """See `Rollout.run`."""
        with self._timeline.generating(f"{next(self._numbers)}"):
            group = await self.generator.complete(prompt, sampling, n, begun=begun, keep=keep)
        return await self.score(group)

    async def score(self, group: Group) -> Group:
        """Return `group` with the scores that the scorer gives it."""
        with self._timeline.scoring():
            return await self.scorer.score(group)

    async def interrupt(self) -> None:
        """See `Rollout.interrupt`."""
        await self.generator.interrupt()

    def go_on(self) -> None:
        """See `Rollout.go_on`."""
        self.generator.go_on()

    async def close(self) -> None:
        """See `Rollout.close`."""
        await self.scorer.close()


class WithBaseline:
    """A `Rollout` that also has one completion of each prompt drawn otherwise, whose score is the group's `baseline`."""

    def __init__(self, inner: Rollout, changes: Mapping[str, Any]) -> None:
        """Draw it by the sampling parameters of the others with `changes`; see `Algorithm.baseline`."""
        self._inner = inner
        self._changes = dict(changes)
        self.interrupt, self.go_on, self.close = inner.interrupt, inner.go_on, inner.close

    async def run(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        n: int,
        begun: tuple[Trajectory, ...] = (),
        keep: Keep | None = None,
    ) -> Group:
        """See `Rollout.run`. One whose baseline has no score is left out."""
        found = await together(
            {
                f"{prompt.uid}": self._inner.run(prompt, sampling, n, begun, keep),
                f"{prompt.uid} baseline": self._inner.run(prompt, replace(sampling, **self._changes), 1),
            }
        )
        group, baseline = found[0], found[1].scored
        if not baseline.scores:
            raise GroupFailed("without baseline", f"the baseline of prompt {prompt.uid!r} has no score")
        return replace(group, baseline=baseline.scores)


async def run_all(
    rollout: Rollout,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    n: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[Group]:
    """Return the groups of `prompts`, in order, without those that could not be made or scored; why is in the log.

    `progress` hears after each prompt how many of how many are done.

    Raises:
        GroupFailed: none could; its text counts the reasons and has the first failure.
    """
    done = itertools.count(1)

    async def run(prompt: Prompt) -> Group:
        try:
            return (await rollout.run(prompt, sampling, n)).scored
        finally:
            if progress is not None:
                progress(next(done), len(prompts))

    found = await asyncio.gather(*map(run, prompts), return_exceptions=True)
    groups = [one for one in found if not isinstance(one, BaseException)]
    failures: list[GroupFailed] = []
    for one in found:
        if isinstance(one, GroupFailed):
            failures.append(one)
        elif isinstance(one, BaseException):
            raise one
    if failures:
        counts = Counter(one.counted_as for one in failures)
        reasons = ", ".join(f"{reason}: {count}" for reason, count in counts.most_common())
        told = f"{len(failures)} of {len(found)} groups have no score ({reasons}); the first: {failures[0]}"
        if not groups:
            raise GroupFailed(failures[0].reason, told) from failures[0]
        log.warning("%s", told)
    return groups


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

    async def complete(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        group_size: int,
        begun: tuple[Trajectory, ...] = (),
        keep: Keep | None = None,
    ) -> Group:
        """Return the group of `prompt`, whole, however often `interrupt` came in between.

        Unfinished completions are continued from their tokens, with log-probs and versions as they were; the sampling
        seed of a continuation is derived from the first one's and the number of tokens, so no random number is used
        twice. With `sampling.seed`, the seed of a completion depends on that, on the prompt's uid and on its place in the group,
        and on nothing else: neither on the batch nor on the replica. `keep` hears of every interruption.
        """
        made = await self._whole(
            _requests(prompt, sampling, group_size), [one.completion for one in begun], keep
        )
        return Group(prompt=prompt, trajectories=tuple(map(Trajectory.of, made)))

    async def turn(self, request: GenerateRequest) -> Completion:
        """Return one whole completion, however often `interrupt` came in between; continued as those of `complete` are."""
        (made,) = await self._whole([request], (), None)
        return made

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

    async def _whole(
        self, requests: Sequence[GenerateRequest], begun: Sequence[Completion], keep: Keep | None
    ) -> list[Completion]:
        have: list[Completion | None] = list(begun) if begun else [None] * len(requests)
        assert len(have) == len(requests)
        while places := [
            place for place, one in enumerate(have) if one is None or one.finish is Finish.ABORT
        ]:
            # `interrupt` and `go_on` are the two ends of one weight sync, which has deadlines.
            await self._going.wait()
            call = next(self._calls)
            asked = [_numbered(call, requests[place], have[place]) for place in places]
            ids = [request.request_id for request in asked]
            self._running.update(ids)
            try:
                made = await self._generate_many(asked)
            finally:
                self._running.difference_update(ids)
            for place, more in zip(places, made, strict=True):
                have[place] = _joined(have[place], more, requests[place].sampling)
            if keep is not None and any(one.finish is Finish.ABORT for one in _known(have)):
                keep(tuple(map(Trajectory.of, _known(have))))
        return _known(have)


def _requests(prompt: Prompt, sampling: SamplingParams, group_size: int) -> list[GenerateRequest]:
    """Return what is asked for the group of `prompt`, each with a seed of its own."""
    return [
        GenerateRequest(
            request_id=f"{place}/{prompt.uid}", prompt_ids=prompt.token_ids, sampling=own, session=prompt.uid
        )
        for place, own in enumerate(_own_seeds(sampling, prompt, range(group_size)))
    ]


def _own_seeds(sampling: SamplingParams, prompt: Prompt, places: Sequence[int]) -> list[SamplingParams]:
    """Return `sampling` for each of `places` in the group of `prompt`, with a seed of its own."""
    if sampling.seed is None:
        return [sampling] * len(places)
    # `replace` reads every field anew for each completion, of which there are thousands a second.
    shared: dict[str, Any] = {one.name: getattr(sampling, one.name) for one in fields(sampling)}
    del shared["seed"]
    seeds = derive_seeds(sampling.seed, prompt.uid, places=places)
    return [SamplingParams(**shared, seed=seed) for seed in seeds]


def _numbered(call: int, first: GenerateRequest, begun: Completion | None) -> GenerateRequest:
    """Return `first` under a name of its own in call `call`; of what was begun the rest, where its prompt has been computed."""
    name = f"{call}/{first.request_id}"
    if begun is None or not begun.num_tokens:
        return GenerateRequest(
            request_id=name, prompt_ids=first.prompt_ids, sampling=first.sampling, session=first.session
        )
    done, sampling = begun.num_tokens, first.sampling
    rest = replace(
        sampling,
        max_tokens=sampling.max_tokens - done,
        seed=None if sampling.seed is None else derive_seed(sampling.seed, "continued", done),
    )
    prompt_ids = (*first.prompt_ids, *begun.token_ids.tolist())
    return GenerateRequest(request_id=name, prompt_ids=prompt_ids, sampling=rest, session=first.session)


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


def _known(have: Sequence[Completion | None]) -> list[Completion]:
    assert all(one is not None for one in have)
    return [one for one in have if one is not None]


def sampling_params(config: SamplingConfig, task: Task, seed: int, *places: int) -> SamplingParams:
    """Return how completions are sampled in a run of `seed`, at a step: the seed in it is the base of one per completion."""
    return SamplingParams(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        stop_token_ids=task.stop_token_ids(),
        stop=config.stop,
        seed=derive_seed(seed, "sample", *places),
    )


def derive_seed(*parts: int | str) -> int:
    """Return a seed in 0 .. 2**63 - 1 that depends on every part and on their order."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def derive_seeds(*parts: int | str, places: Iterable[int]) -> list[int]:
    """Return `derive_seed(*parts, place)` for each of `places`; what they share is hashed once."""
    text = "".join(f"{part}/" for part in parts)
    shared = hashlib.blake2b(text.encode(), digest_size=8)
    seeds: list[int] = []
    for place in places:
        own = shared.copy()
        own.update(str(place).encode())
        seeds.append(int.from_bytes(own.digest(), "big") >> 1)
    return seeds
