"""The values the trainer hands out. G = trajectories of one prompt, T = tokens of one of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat_trainer.data.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question of a task. `uid` is stable over runs; `data` is what its reward needs (say, the answer)."""

    uid: str
    text: str
    token_ids: tuple[int, ...]
    data: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one trajectory is worth. `correct` feeds accuracy; it never enters a loss.

    `parts` are the rewards that it is the weighted sum of, by name, where there are several. Numbers of numpy, which sums over `token_ids` give, become Python's: files of JSON hold no others.
    """

    reward: float
    correct: bool
    parts: Mapping[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", float(self.reward))
        object.__setattr__(self, "correct", bool(self.correct))


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What came of one prompt, with the scores once they are known (then G of them)."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    scores: tuple[Score, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One supervised pair: the completion is trained, the prompt is context. `trained` marks what of it is; empty means all."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    trained: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two completions of one prompt, of which one is preferred."""

    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
