"""The values the trainer hands out: what came of one prompt, in one turn or in several, and what is learned from written ones.

G = trajectories of one prompt, T = tokens after the prompt, O = tokens observed. A `Trajectory` is made of completions, each
token as it was sampled: no text is ever made into tokens a second time. Between them lies what an environment said, which was
made into tokens once, and which no weights made. Turns that follow one another are a `Row`, one sequence of a batch; a trajectory
has several where its history was edited.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np

from offbeat_rollout import Completion, Finish, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

_Number = TypeVar("_Number", np.int32, np.float32)
NO_VERSION = -1
"""The version of tokens that no policy sampled: of a prompt, of an environment, of padding."""
_NOTHING = np.zeros(0, np.int32)
_NOTHING.setflags(write=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question of a task. `uid` is stable over runs; `data` is what its reward needs (say, the answer).

    `held_out` names the validation set it is of where a task has several: each is measured by itself, too.
    """

    uid: str
    text: str
    token_ids: tuple[int, ...]
    data: Mapping[str, object] = field(default_factory=dict[str, object])
    held_out: str = ""


class Limit(StrEnum):
    """What ended a trajectory of several turns before its environment did."""

    TURNS = "turns"
    SECONDS = "seconds"


Ending: TypeAlias = Finish | Limit
"""Why a trajectory ended. STOP: of itself, or its environment said so. LENGTH: there was no room for more tokens."""


Spans: TypeAlias = tuple[tuple[int, int], ...]
"""The versions that made a trajectory's trained tokens, in order: (version, number of tokens)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """What the environment said, and what the policy answered. `reward` is what this turn alone earned.

    `observed` [O] int32 are tokens to be read, not to be learned: none, for the first turn of most. `context` [P] int32 begins a row:
    the turn was asked with these tokens in place of the prompt and all turns before (a history that was cut, summarised or forked).
    """

    completion: Completion
    observed: npt.NDArray[np.int32] = field(default_factory=lambda: _NOTHING)
    reward: float = 0.0
    context: npt.NDArray[np.int32] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens observed and sampled."""
        return len(self.observed) + self.completion.num_tokens

    def without_past(self) -> Turn:
        """Return a turn that follows others in its row with the experts of its own tokens alone, and of the one before them.

        Its completion's prompt is all of the turns before, whose experts they have as their tokens were sampled.
        """
        experts = self.completion.routed_experts
        if experts is None:
            return self
        own = experts[len(experts) - self.num_tokens :].copy()  # a view would keep the whole
        return replace(self, completion=replace(self.completion, routed_experts=own))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Turn):
            return NotImplemented
        contexts = [() if one.context is None else tuple(one.context.tolist()) for one in (self, other)]
        alike = np.array_equal(self.observed, other.observed) and self.reward == other.reward
        return alike and contexts[0] == contexts[1] and self.completion == other.completion

    def __hash__(self) -> int:
        return hash((self.completion, self.reward))


class _Turns:
    """Turns one after the other. The arrays speak of all T tokens of theirs.

    Those that a policy sampled are trained: `trained` marks them, `spans` names the weights that made them, and leaves gaps where
    the environment spoke; there `logprobs` are 0.
    """

    __slots__ = ()
    turns: tuple[Turn, ...]

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum([turn.num_tokens for turn in self.turns])

    @property
    def num_trained(self) -> int:
        """How many of its tokens a policy sampled."""
        return sum([len(turn.completion.token_ids) for turn in self.turns])

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """[T] int32."""
        return _end_to_end(
            [part for one in self.turns for part in (one.observed, one.completion.token_ids)], np.int32
        )

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """[T] float32, as the sampler saw them; 0 where nothing was sampled."""
        silent = [np.zeros(len(turn.observed), np.float32) for turn in self.turns]
        spoken = [turn.completion.logprobs for turn in self.turns]
        return _end_to_end([part for pair in zip(silent, spoken, strict=True) for part in pair], np.float32)

    @property
    def trained(self) -> npt.NDArray[np.bool_]:
        """[T] bool: the tokens that a policy sampled."""
        return self.policy_versions != NO_VERSION

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """The weights that made the trained tokens, in order; neighbours in different turns are never joined."""
        if len(self.turns) == 1 and not len(self.turns[0].observed):
            return self.turns[0].completion.spans
        runs = self.runs()
        ends = accumulate(count for _, count in runs)
        made = zip(runs, ends, strict=True)
        return tuple(VersionSpan(by, end - count, end) for (by, count), end in made if by != NO_VERSION)

    @property
    def policy_versions(self) -> npt.NDArray[np.int64]:
        """[T] int64: the version of the weights that made each token, `NO_VERSION` where none did."""
        return versions_of([self])

    def runs(self) -> list[tuple[int, int]]:
        """Return the versions that made its tokens, in order: (version, number of tokens), `NO_VERSION` for observed ones."""
        found: list[tuple[int, int]] = []
        for turn in self.turns:
            if len(turn.observed):
                found.append((NO_VERSION, len(turn.observed)))
            found += [(version, end - start) for version, start, end in turn.completion.spans]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(_Turns):
    """What is trained as one sequence: turns that follow one another after a prompt, which `context` is where it is not the group's."""

    turns: tuple[Turn, ...]

    @property
    def context(self) -> npt.NDArray[np.int32] | None:
        """[P] int32, the tokens before its turns; None: the prompt of its group."""
        return self.turns[0].context if self.turns else None

    @property
    def routed_experts(self) -> npt.NDArray[np.int16] | None:
        """[N, L, K] int16, where they were recorded: the experts of the first N tokens, those of the prompt included.

        Each token has those by which what follows it was sampled: its turn's, and a turn's last token those of the next. N is one
        less than all tokens, since nothing followed the last; a turn without tokens, which ends a trajectory, tells none.
        """
        found: list[npt.NDArray[np.int16]] = []
        for turn in self.turns:
            experts = turn.completion.routed_experts
            if experts is None:
                break
            found.append(experts[len(experts) - turn.num_tokens :] if found else experts)
        return None if not found else found[0] if len(found) == 1 else np.concatenate(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory(_Turns):
    """The turns that followed one prompt, and why there came no other. They lie in one or more rows."""

    turns: tuple[Turn, ...]
    finish: Ending

    @classmethod
    def of(cls, completion: Completion) -> Trajectory:
        """Return the trajectory of one turn that `completion` is."""
        return cls(turns=(Turn(completion=completion),), finish=completion.finish)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The sequences that it is trained as, at least one."""
        starts = [place for place, turn in enumerate(self.turns) if place and turn.context is not None]
        bounds = [0, *starts, len(self.turns)]
        return tuple([Row(turns=self.turns[begin:end]) for begin, end in pairwise(bounds)])

    @property
    def is_plain(self) -> bool:
        """Whether it is one completion and nothing else, as `of` makes it."""
        if len(self.turns) != 1:
            return False
        turn = self.turns[0]
        is_alone = not len(turn.observed) and turn.context is None and not turn.reward
        return is_alone and self.finish is turn.completion.finish

    @property
    def completion(self) -> Completion:
        """The completion that a plain trajectory is."""
        assert self.is_plain
        return self.turns[0].completion

    def rewards(self, total: float) -> npt.NDArray[np.float32]:
        """Return what each token earned [T] float32, where all of it together is `total`.

        The last token of a turn has the turn's reward; the last of all has, beside it, what no turn earned. The last token of a row
        that others follow has what was earned in those, too: it led to them.
        """
        rewards_T = np.zeros(self.num_tokens, np.float32)
        ends: list[int] = []  # the last sampled token of each row
        left, end = total, 0
        for row in self.rows:
            last = None
            for turn in row.turns:
                end += turn.num_tokens
                if turn.completion.num_tokens:
                    last = end - 1
                    rewards_T[last] += turn.reward
                    left -= turn.reward
            ends += [] if last is None else [last]
        if ends:
            rewards_T[ends[-1]] += left
        later = 0.0
        for begin, last in reversed(list(pairwise([-1, *ends]))):
            own = float(rewards_T[begin + 1 : last + 1].sum())
            rewards_T[last] += later
            later += own
        return rewards_T

    def cut(self, count: int, finish: Finish) -> Trajectory:
        """Return the first `count` tokens of a trajectory of one turn, as one that ended by `finish`."""
        return Trajectory.of(self.completion.cut(count, finish))

    def without_rewards(self) -> Trajectory:
        """Return it with 0 for the reward of every turn."""
        return replace(self, turns=tuple(replace(turn, reward=0.0) for turn in self.turns))


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one trajectory is worth. `correct` feeds accuracy and never enters a loss; None: nothing says what is right.

    `parts` are the rewards that it is the weighted sum of, by name, where there are several. Numbers of numpy, which sums over `token_ids` give, become Python's: files of JSON hold no others.
    """

    reward: float
    correct: bool | None = None
    parts: Mapping[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", float(self.reward))
        object.__setattr__(self, "correct", None if self.correct is None else bool(self.correct))


UNSCORED = Score(reward=math.nan)
"""The score of a trajectory whose reward failed: it is left out of training, and the others of its group stay."""


def is_correct(reward: float, correct_at: float | None) -> bool | None:
    """Return whether a trajectory of `reward` is right: from `correct_at` on.

    Where that is None, a reward of 1 is right, one of 0 is wrong, and any other is neither.
    """
    if correct_at is None:
        return bool(reward) if reward in (0.0, 1.0) else None
    return reward >= correct_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What came of one prompt, with the scores once they are known (then G of them).

    `baseline` are scores of completions that were drawn otherwise and are not trained; see `Algorithm.baseline`.
    """

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    scores: tuple[Score, ...] = ()
    baseline: tuple[Score, ...] = ()

    @property
    def scored(self) -> Group:
        """This group without the trajectories that are `UNSCORED`; what is trained."""
        places = [place for place, score in enumerate(self.scores) if not math.isnan(score.reward)]
        if len(places) == len(self.scores):
            return self
        return replace(
            self,
            trajectories=tuple(self.trajectories[place] for place in places),
            scores=tuple(self.scores[place] for place in places),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One supervised pair: the completion is trained, the prompt is context. `trained` marks what of it is; empty means all."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    trained: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled(Example):
    """A completion of a prompt, and whether it is desirable."""

    desirable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two completions of one prompt, of which one is preferred."""

    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]


def version_of(step: int) -> int:
    """Return the version of the weights that step `step` trains, and in sync mode samples from.

    Version 0 is whatever folder a replica was started from; the policy before its first update is version 1.
    """
    return step + 1


def due(step: int, every: int) -> bool:
    """Say whether something that happens `every` so many steps happens at `step`; 0 = never."""
    return every > 0 and step % every == 0


def spans_of(trajectory: Trajectory) -> Spans:
    """Return the versions that made `trajectory`, as the journal has them."""
    return tuple([(version, end - start) for version, start, end in trajectory.spans])


def oldest_version(trajectories: Iterable[Trajectory]) -> int | None:
    """Return the version of the oldest trained token in `trajectories`; None if there is none."""
    return min((span.version for one in trajectories for span in one.spans), default=None)


def versions_of(trajectories: Iterable[_Turns]) -> npt.NDArray[np.int64]:
    """Return the `policy_versions` of trajectories or rows, one after the other."""
    runs = [run for one in trajectories for run in one.runs()]
    versions = np.array([version for version, _ in runs], np.int64)
    return versions.repeat(np.array([count for _, count in runs], np.int64))


def _end_to_end(parts: Sequence[npt.NDArray[_Number]], dtype: type[_Number]) -> npt.NDArray[_Number]:
    """Return `parts` as one array; one that is alone is not copied."""
    full = [part for part in parts if len(part)]
    return full[0] if len(full) == 1 else np.concatenate(full) if full else np.zeros(0, dtype)
