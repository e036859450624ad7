"""Rollouts and scorers of one's own, by the path of a class: "package.module:Name" or "folder/file.py:Name"."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from offbeat_trainer.data.loading import load_object
from offbeat_trainer.errors import LoadError, PlanRefused, RewardFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from offbeat_trainer.config import RewardConfig
    from offbeat_trainer.data.interface import Generator, Rollout, Scorer, Task
    from offbeat_trainer.data.types import Group
    from offbeat_trainer.rollouts.environment import Observation
    from offbeat_trainer.watch.watchdog import Timeline, Watchdog


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSetup:
    """What a rollout is made with: the way to the replicas, what scores, the run's task, and what waits are told to.

    `encode(observation, last_token)` gives the tokens of what is not sampled: text, or messages as the model's chat template writes
    them after a turn that ended with `last_token` (None: after the prompt). `log` is a file for what processes of its own print.
    """

    generator: Generator
    scorer: Scorer
    task: Task
    encode: Callable[[Observation, int | None], list[int]]
    timeline: Timeline
    watchdog: Watchdog
    log: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerSetup:
    """What a scorer is made with: the run's task, the section `reward`, and a file for what it prints."""

    task: Task
    config: RewardConfig
    log: Path


def find_rollout(path: str, args: Mapping[str, Any] | None = None) -> Callable[[RolloutSetup], Rollout]:
    """Return what makes the rollout named `path` with `args`; see `RolloutSetup`.

    Raises:
        PlanRefused: it cannot be imported, is not called with a setup and `args`, or lacks a method of `Rollout`.
    """
    methods = ("run", "interrupt", "go_on", "close")
    return partial(_found(path, "a RolloutSetup", methods, args or {}), **(args or {}))


def scores_itself(path: str) -> bool:
    """Whether the rollout named `path` says that it scores every group (`scores_itself = True`): the task needs no reward then."""
    try:
        return bool(path) and bool(getattr(load_object(path), "scores_itself", False))
    except LoadError:  # which `find_rollout` tells
        return False


class NoScorer:
    """Satisfies `Scorer` where a rollout scores itself: whatever it leaves to the task is left out of training."""

    async def score(self, group: Group) -> Group:
        """See `Scorer.score`."""
        raise RewardFailed(
            "none applies", f"the rollout did not score {group.prompt.uid}, as it said it would"
        )

    async def close(self) -> None:
        """See `Scorer.close`."""


def find_scorer(path: str) -> Callable[[ScorerSetup], Scorer]:
    """Return what makes the scorer named `path`; see `ScorerSetup`.

    Raises:
        PlanRefused: it cannot be imported, is not called with one argument, or lacks a method of `Scorer`.
    """
    return cast("Callable[[ScorerSetup], Scorer]", _found(path, "a ScorerSetup", ("score", "close"), {}))


def _found(path: str, setup: str, methods: tuple[str, ...], args: Mapping[str, Any]) -> type:
    try:
        found = load_object(path)
    except LoadError as error:
        raise PlanRefused(str(error)) from error
    if not inspect.isclass(found):
        raise PlanRefused(f"{path} is no class but {found!r:.80}")
    missing = [f"`{name}`" for name in methods if not callable(getattr(found, name, None))]
    if missing:
        raise PlanRefused(f"{path} lacks {', '.join(missing)}")
    try:
        inspect.signature(found).bind(object(), **args)
    except TypeError as error:
        more = f"and environment.args {', '.join(args)}" if args else "alone"
        raise PlanRefused(f"{path} must be called with {setup} {more}: {error}") from error
    return found
