"""Rollouts and scorers of one's own, by the path of a class: "package.module:Name" or "folder/file.py:Name"."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from offbeat_trainer.data.loading import load_object
from offbeat_trainer.errors import LoadError, PlanRefused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from offbeat_trainer.config import RewardConfig
    from offbeat_trainer.data.interface import Generator, Rollout, Scorer, Task
    from offbeat_trainer.rollouts.environment import Observation
    from offbeat_trainer.watch.watchdog import Timeline, Watchdog


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSetup:
    """What a rollout is made with: the way to the replicas, what scores, the run's task, and what waits are told to.

    `encode(observation, last_token)` gives the tokens of what is not sampled: text, or messages as the model's chat template writes
    them after a turn that ended with `last_token` (None: after the prompt).
    """

    generator: Generator
    scorer: Scorer
    task: Task
    encode: Callable[[Observation, int | None], list[int]]
    timeline: Timeline
    watchdog: Watchdog


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerSetup:
    """What a scorer is made with: the run's task, the section `reward`, and a file for what it prints."""

    task: Task
    config: RewardConfig
    log: Path


def find_rollout(path: str) -> Callable[[RolloutSetup], Rollout]:
    """Return what makes the rollout named `path`; see `RolloutSetup`.

    Raises:
        PlanRefused: it cannot be imported, is not called with one argument, or lacks a method of `Rollout`.
    """
    return cast(
        "Callable[[RolloutSetup], Rollout]",
        _found(path, "a RolloutSetup", ("run", "run_all", "interrupt", "go_on", "close")),
    )


def find_scorer(path: str) -> Callable[[ScorerSetup], Scorer]:
    """Return what makes the scorer named `path`; see `ScorerSetup`.

    Raises:
        PlanRefused: it cannot be imported, is not called with one argument, or lacks a method of `Scorer`.
    """
    return cast("Callable[[ScorerSetup], Scorer]", _found(path, "a ScorerSetup", ("score", "close")))


def _found(path: str, setup: str, methods: tuple[str, ...]) -> type:
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
        inspect.signature(found).bind(object())
    except TypeError as error:
        raise PlanRefused(f"{path} must be called with {setup} alone: {error}") from error
    return found
