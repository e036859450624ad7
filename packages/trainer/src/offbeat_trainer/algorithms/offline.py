"""Algorithms that learn from what is written down: nothing is generated, and no replica runs.

B = sequences, T = tokens of the longest one.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from offbeat_trainer.algorithms.interface import Algorithm, C_co

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from offbeat_engine import TrainBatch
    from offbeat_trainer.data.types import Group
    from offbeat_trainer.metrics import Metric
    from offbeat_trainer.roles.role import Role


class OfflineAlgorithm(Algorithm[C_co]):
    """One that learns from rows of a task. Its `Config` says how many sequences a row is (`written_rows`, 1 or more).

    `reads` names what of a task it reads: its `examples` and `validation_examples`, or its `pairs` and `validation_pairs`.
    """

    reads: ClassVar[Literal["examples", "pairs"]]

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
