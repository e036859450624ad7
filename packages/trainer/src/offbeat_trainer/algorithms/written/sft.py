"""Supervised training: the negative log-likelihood of written completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from offbeat_engine import LossOutput, LossScale, Predictions, SftLoss
from offbeat_trainer.algorithms.interface import OfflineAlgorithm
from offbeat_trainer.algorithms.roles import POLICY, RoleSpec
from offbeat_trainer.algorithms.written.config import SftConfig
from offbeat_trainer.data.assemble import assemble_examples
from offbeat_trainer.data.metrics import Mean, Metric

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat_engine import TrainBatch
    from offbeat_trainer.algorithms.roles import Role
    from offbeat_trainer.config import AlgorithmConfig
    from offbeat_trainer.data.types import Example


@dataclass(frozen=True, slots=True)
class SupervisedLoss:
    """`SftLoss`, nats per trained token; its `sums` are means over the step's tokens."""

    def __call__(self, predictions: Predictions, batch: TrainBatch, scale: LossScale) -> LossOutput:
        """Return this micro-batch's share."""
        output = SftLoss()(predictions, batch, scale)
        entropy = output.sums["entropy"] / scale.num_tokens
        return LossOutput(loss=output.loss, sums={"policy/entropy_nats": entropy})


class Sft(OfflineAlgorithm[SftConfig]):
    """SFT: one model learns written completions token by token, by maximum likelihood.

    loss = -(1/N) sum_t log pi(y_t | x, y_<t), over the N completion tokens of a step; x is the prompt, which is not learned, and y
    the completion.

    Use it when rows show the answers that you want, and not when they only say which of two answers is better, or when a reward can
    be computed: imitation stops at the quality of the rows.
    """

    Config: ClassVar[type[AlgorithmConfig]] = SftConfig
    reads = "examples"

    def roles(self) -> Mapping[str, RoleSpec]:
        """See `Algorithm.roles`."""
        return {POLICY: RoleSpec(trained=True)}

    def batch(self, rows: Sequence[Example]) -> TrainBatch:
        """See `OfflineAlgorithm.batch`."""
        return assemble_examples(rows)

    def learn(self, roles: Mapping[str, Role], batch: TrainBatch) -> list[Metric]:
        """See `Algorithm.learn`."""
        policy = roles[POLICY]
        return policy.train(policy.shares(batch, self.step.updates_per_step), SupervisedLoss())

    def evaluate(self, roles: Mapping[str, Role], batch: TrainBatch) -> list[Metric]:
        """See `OfflineAlgorithm.evaluate`."""
        logprobs_BT = roles[POLICY].whole_logprobs(batch)
        mask_BT = batch["loss_mask"]
        nll = -float(logprobs_BT[mask_BT].double().sum()) / max(1, int(mask_BT.sum()))
        return [Metric("validation/loss", Mean(nll))]
