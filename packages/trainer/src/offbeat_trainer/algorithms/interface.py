"""The seam of algorithms: which models, what is learned from scored groups, and how the ranks learn it.

B = completions of a step, in the order of groups and of the completions in them; C = places of the longest completion.

An `OfflineAlgorithm` learns from what is written down: nothing is generated, and no replica runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, cast

from offbeat_trainer.config import AlgorithmConfig
from offbeat_trainer.data.loading import load_object, place_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

    import torch

    from offbeat_engine import Refusal, TrainBatch
    from offbeat_trainer.algorithms.roles import Role, RoleSpec
    from offbeat_trainer.data.metrics import Metric
    from offbeat_trainer.data.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What a step of the run is made of; see `LoopConfig` and `SamplingConfig`, whose settings these are."""

    group_size: int = 16
    updates_per_step: int = 1
    max_completion_tokens: int = 32


C_co = TypeVar("C_co", bound=AlgorithmConfig, covariant=True)


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC, Generic[C_co]):
    """What is learned, and by which models: a frozen value that travels to every rank.

    `Config` is the class of its settings: a frozen dataclass with a default for every field, which the recipes read
    `algorithm.*` by. What it holds of its own is a function of `config`, `step` and `state`. A batch key of its own is registered
    where its module is imported (`offbeat_engine.register_field`).

    `state` are a few numbers that change from step to step, say a coefficient that follows the KL: what `next_state` returned after
    the step before, the same on the driver and on all ranks, saved and resumed with the run; empty in the first step.
    """

    Config: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig

    config: C_co
    step: StepShape = field(default_factory=StepShape)
    state: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)

    @abstractmethod
    def roles(self) -> Mapping[str, RoleSpec]:
        """Return the models it works with, by name. "policy", which generates, is one of them: trained, with head "lm"."""

    def keeps(self, group: Group) -> str:
        """Return why a scored `group` is left out of training, in a word or two, or nothing to train it. A pure function.

        Another prompt takes its place. It is counted apart from what failed, under its reason.
        """
        del group
        return ""

    def baseline(self) -> Mapping[str, Any]:
        """Return how one completion more of each prompt is drawn: fields of `SamplingParams`, `temperature` 0, say; {} draws none.

        It is scored and not trained: `Group.baseline` has its score.
        """
        return {}

    def next_state(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Return the `state` of the step after one that came to `metrics` (docs/metrics.md). A pure function.

        Not asked of one that learns from written rows.
        """
        del metrics
        return self.state

    def after(self, metrics: Mapping[str, float]) -> Self:
        """Return the algorithm of the step after one that came to `metrics`."""
        return self.at(self.next_state(metrics))

    def at(self, state: Mapping[str, float]) -> Self:
        """Return the algorithm with `state`; itself where that is its own."""
        return self if state == self.state else replace(self, state=dict(state))

    @abstractmethod
    def targets(self, groups: Sequence[Group]) -> Mapping[str, torch.Tensor]:
        """Return what scored `groups` say is to be learned, as keys of a batch. On the driver; a pure function.

        Each is [B], one number per trajectory (of a key per token, every token of the trajectory gets it), or [B, C], one per
        token after the prompt, an environment's included. C is the longest trajectory's; padding on the right is not read.
        `loss_mask` leaves tokens out that would be trained: 1 where a token stays in, 0 where not.
        """

    @abstractmethod
    def learn(self, roles: Mapping[str, Role], batch: TrainBatch) -> list[Metric]:
        """Learn one step from `batch`, the same on every rank, and return its metrics, the same on every rank. A collective."""

    def check(self) -> list[Refusal]:
        """Return the settings that cannot be, of `config` or of the run; empty means that it can run."""
        return []

    def __reduce__(self) -> str | tuple[object, ...]:
        """Pickle an algorithm of a file with the name of the file: the process that reads it has not imported it yet."""
        place = place_of(type(self))
        plain = super().__reduce__()
        if place is None:
            return plain
        return _revived, (
            place,
            {item.name: getattr(self.config, item.name) for item in fields(self.config)},
            self.step,
            dict(self.state),
        )


def _revived(
    place: str, settings: dict[str, Any], step: StepShape, state: dict[str, float]
) -> Algorithm[AlgorithmConfig]:
    cls = cast("type[Algorithm[AlgorithmConfig]]", load_object(place))
    return cls(config=cls.Config(**settings), step=step, state=state)


class OfflineAlgorithm(Algorithm[C_co]):
    """One that learns from rows of a task. Its `Config` says how many sequences a row is (`written_rows`, 1 or more).

    `reads` names what of a task it reads: its `examples` and `validation_examples`, or its `pairs` and `validation_pairs`, ...
    """

    reads: ClassVar[Literal["examples", "pairs", "labelled"]]

    @abstractmethod
    def batch(self, rows: Sequence[Any]) -> TrainBatch:
        """Return the batch of `rows`, as `reads` names them. On the driver; a pure function."""

    @abstractmethod
    def evaluate(self, roles: Mapping[str, Role], batch: TrainBatch) -> list[Metric]:
        """Return what the models say of held-out rows, the same on every rank; nothing is trained. A collective.

        `validation/loss` is one of them, and `accuracy/validation` where there is something to be right about.
        """

    def targets(self, groups: Sequence[Group]) -> Mapping[str, torch.Tensor]:
        """Return nothing: there are no groups."""
        del groups
        return {}
