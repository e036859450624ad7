"""A reward model of pairs: one number for a prompt with a completion, read where its last token was read.

P = pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch.nn.functional import logsigmoid

from offbeat_engine import Predictions
from offbeat_trainer.algorithms.interface import OfflineAlgorithm
from offbeat_trainer.algorithms.roles import POLICY, RoleSpec, after_the_last, predict_values
from offbeat_trainer.algorithms.written.config import RewardModelConfig
from offbeat_trainer.algorithms.written.pairs import (
    assemble_pairs,
    held_out,
    over_pairs,
    paired,
    whole_scale,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat_engine import LossOutput, LossScale, TrainBatch
    from offbeat_trainer.algorithms.roles import Role
    from offbeat_trainer.config import AlgorithmConfig
    from offbeat_trainer.data.metrics import Metric
    from offbeat_trainer.data.types import Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelLoss:
    """The loss of `RewardModelTraining`, additive over micro-batches, a mean over pairs. Needs `unit` and `dpo/chosen`.

    Raises:
        TrainerError: a pair is not whole in this micro-batch, or is no pair (when called).
    """

    config: RewardModelConfig

    def __call__(self, predictions: Predictions, batch: TrainBatch, scale: LossScale) -> LossOutput:
        """Return this micro-batch's share of the loss, and of means over pairs."""
        c_P, r_P = paired(predictions["values"].sum(-1), batch)  # zero but at the place that is asked for
        loss_P = self.config.centre_coef * (c_P + r_P) ** 2 - logsigmoid(c_P - r_P - self.config.margin)
        return over_pairs(loss_P, c_P, r_P, scale)


class RewardModelTraining(OfflineAlgorithm[RewardModelConfig]):
    """Bradley-Terry reward model (arXiv 1706.03741, 2203.02155): a model with a value head learns which completion is preferred.

    loss = -log sigmoid(c - r - margin) + centre_coef (c + r)^2, a mean over pairs; c and r are the scores of a prompt with the chosen
    and with the rejected completion, read at the last token. The second term (arXiv 2312.09244) keeps scores near 0, which the first
    leaves free.

    Use it when a run is to have a reward that only preferences describe (`reward.model` reads what it saves), and not when a
    function can tell right from wrong, or when pairs can train the policy at once (DPO).
    """

    Config: ClassVar[type[AlgorithmConfig]] = RewardModelConfig
    reads = "pairs"

    def roles(self) -> Mapping[str, RoleSpec]:
        """See `Algorithm.roles`: what is trained has a value head, and generates nothing."""
        return {POLICY: RoleSpec(trained=True, head="value")}

    def batch(self, rows: Sequence[Pair]) -> TrainBatch:
        """See `OfflineAlgorithm.batch`; the place after each completion is asked for, as `RewardModel` does."""
        batch = assemble_pairs(rows)
        judged = after_the_last(batch)
        for key in ("unit", "group", "dpo/chosen"):
            judged[key] = batch[key]
        return judged

    def learn(self, roles: Mapping[str, Role], batch: TrainBatch) -> list[Metric]:
        """See `Algorithm.learn`; each of `updates_per_step` runs of pairs is one optimizer step."""
        policy = roles[POLICY]
        return policy.train(
            policy.shares(batch, self.step.updates_per_step), RewardModelLoss(config=self.config)
        )

    def evaluate(self, roles: Mapping[str, Role], batch: TrainBatch) -> list[Metric]:
        """See `OfflineAlgorithm.evaluate`. Accuracy is the share of pairs whose chosen completion scores more."""
        answers = Predictions(
            {"values": predict_values(roles[POLICY].engine, batch)}, batch_size=batch.batch_size
        )
        return held_out(RewardModelLoss(config=self.config)(answers, batch, whole_scale(batch)))
