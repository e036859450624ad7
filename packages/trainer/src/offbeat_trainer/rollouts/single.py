"""One turn: a prompt, its completions, and what a scorer says of them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import TYPE_CHECKING

from offbeat_trainer.errors import GroupFailed
from offbeat_trainer.watch.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Sequence

    from offbeat_rollout import SamplingParams
    from offbeat_trainer.data.generation import Keep
    from offbeat_trainer.data.trajectory import Trajectory
    from offbeat_trainer.data.types import Group, Prompt
    from offbeat_trainer.interface import Generator, Scorer

log = logging.getLogger(__name__)


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
        return await self.scorer.score(group)

    async def run_all(self, prompts: Sequence[Prompt], sampling: SamplingParams, n: int) -> list[Group]:
        """See `Rollout.run_all`; all completions are asked for in one batch."""
        groups = await self.generator.collect(prompts, sampling, n)
        return await those_that_came(self.scorer.score(group) for group in groups)

    async def interrupt(self) -> None:
        """See `Rollout.interrupt`."""
        await self.generator.interrupt()

    def go_on(self) -> None:
        """See `Rollout.go_on`."""
        self.generator.go_on()

    async def close(self) -> None:
        """See `Rollout.close`."""
        await self.scorer.close()


async def those_that_came(work: Iterable[Awaitable[Group]]) -> list[Group]:
    """Return those groups of `work` that could be made and scored; why others could not is in the log.

    Raises:
        GroupFailed: none could.
    """
    found = await asyncio.gather(*work, return_exceptions=True)
    failures = [one for one in found if isinstance(one, BaseException)]
    groups = [one for one in found if not isinstance(one, BaseException)]
    for failure in failures:
        if not isinstance(failure, GroupFailed) or not groups:
            raise failure
    if failures:
        log.warning("%d of %d groups have no score; the first: %s", len(failures), len(found), failures[0])
    return groups
