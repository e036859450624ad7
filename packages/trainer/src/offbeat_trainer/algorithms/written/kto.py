"""KTO: a policy learns from completions that are each called desirable or not.

B = sequences, T = tokens of the longest one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from offbeat_engine import Field, LossOutput, LossScale, Predictions, Refusal, register_field
from offbeat_trainer.algorithms.grpo import REFERENCE
from offbeat_trainer.algorithms.interface import OfflineAlgorithm
from offbeat_trainer.algorithms.policy_loss import inside
from offbeat_trainer.algorithms.roles import POLICY, RoleSpec, split_evenly
from offbeat_trainer.algorithms.written.config import KtoConfig
from offbeat_trainer.algorithms.written.pairs import held_out, whole_scale
from offbeat_trainer.data.assemble import assemble_examples
from offbeat_trainer.data.metrics import Mean, Metric
from offbeat_trainer.data.types import Example

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat_engine import TrainBatch
    from offbeat_trainer.algorithms.roles import Role
    from offbeat_trainer.config import AlgorithmConfig
    from offbeat_trainer.data.types import Labelled

DESIRABLE = register_field(
    Field(key="kto/desirable", dims="B", dtype=torch.bool, meaning="whether the completion is desirable")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KtoLoss:
    """The loss of KTO (equation 8), additive over micro-batches, a mean over sequences.

    `kl` is z0 of the whole mini-batch. Needs `kto/desirable` and `ref_logprobs`.
    """

    config: KtoConfig
    kl: float

    def __call__(self, predictions: Predictions, batch: TrainBatch, scale: LossScale) -> LossOutput:
        """Return this micro-batch's share of the loss, and of means over sequences."""
        config, desirable_B = self.config, batch[DESIRABLE.key]
        lead_B = inside(predictions["logprobs"] - batch["ref_logprobs"], batch["loss_mask"]).sum(-1) - self.kl
        gain_B = config.beta * torch.where(desirable_B, lead_B, -lead_B)
        weight_B = torch.where(desirable_B, config.desirable_weight, config.undesirable_weight)
        loss_B = weight_B * (1 - gain_B.sigmoid())
        means = {"accuracy/train": (gain_B > 0).float(), "kto/gain": gain_B}
        return LossOutput(
            loss=loss_B.sum() / scale.num_sequences,
            sums={key: value.detach().sum() / scale.num_sequences for key, value in means.items()},
        )


def mismatched(batch: TrainBatch) -> TrainBatch:
    """Return each prompt of `batch` with the completion of the next row; the last one has the first's."""
    rows = zip(
        batch["input_ids"].tolist(), batch["loss_mask"].tolist(), batch["lengths"].tolist(), strict=True
    )
    cut = [(ids[:length], mask.index(True) if any(mask) else length) for ids, mask, length in rows]
    following = [*cut[1:], *cut[:1]]
    return assemble_examples(
        [
            Example(prompt_ids=tuple(ids[:start]), completion_ids=tuple(other[begin:]))
            for (ids, start), (other, begin) in zip(cut, following, strict=True)
        ]
    )


def reference_point(roles: Mapping[str, Role], batch: TrainBatch) -> float:
    """Return z0 = max(0, mean over rows of log pi - log pi_ref, summed over a mismatched completion), of the whole `batch`. A collective."""
    apart = mismatched(batch)
    policy_BT, reference_BT = (roles[name].whole_logprobs(apart) for name in (POLICY, REFERENCE))
    return max(0.0, float((policy_BT - reference_BT).double().sum()) / len(apart["lengths"]))


class Kto(OfflineAlgorithm[KtoConfig]):
    """KTO (arXiv 2402.01306): a policy learns from completions with single verdicts, by a value function of gains and losses.

    loss = w (1 - sigmoid(s beta (log pi(y|x) - log pi_ref(y|x) - z0))), a mean over completions y of prompts x: s = 1 and
    w = `desirable_weight` where y is desirable, s = -1 and w = `undesirable_weight` where not. z0, without a gradient, estimates
    KL(pi || pi_ref): the mean of log pi - log pi_ref over prompts with the completion of the row after, of the whole mini-batch on
    all ranks, and 0 where it is negative.

    Use it when completions have verdicts (thumbs up or down) and no partners, or classes of unequal size, and not when you have
    clean pairs (DPO), or steps of a few rows: z0 is then a guess.
    """

    Config: ClassVar[type[AlgorithmConfig]] = KtoConfig
    reads = "labelled"

    def roles(self) -> Mapping[str, RoleSpec]:
        """See `Algorithm.roles`."""
        return {POLICY: RoleSpec(trained=True), REFERENCE: RoleSpec(trained=False)}

    def batch(self, rows: Sequence[Labelled]) -> TrainBatch:
        """See `OfflineAlgorithm.batch`."""
        batch = assemble_examples(rows)
        batch[DESIRABLE.key] = torch.tensor([row.desirable for row in rows])
        return batch

    def learn(self, roles: Mapping[str, Role], batch: TrainBatch) -> list[Metric]:
        """See `Algorithm.learn`; z0 is that of each mini-batch before its step."""
        policy, metrics = roles[POLICY], list[Metric]()
        for mini in split_evenly(batch, self.step.updates_per_step):
            kl = reference_point(roles, mini)
            shares = policy.shares(mini)
            roles[REFERENCE].judge(shares, "ref_logprobs")
            metrics += [*policy.train(shares, self._loss_fn(kl)), Metric("kto/kl_nats", Mean(kl))]
        return metrics

    def evaluate(self, roles: Mapping[str, Role], batch: TrainBatch) -> list[Metric]:
        """See `OfflineAlgorithm.evaluate`. Accuracy is the share of rows on the right side of z0."""
        batch = batch.copy()
        batch["ref_logprobs"] = roles[REFERENCE].whole_logprobs(batch)
        answers = Predictions({"logprobs": roles[POLICY].whole_logprobs(batch)}, batch_size=batch.batch_size)
        loss_fn = self._loss_fn(reference_point(roles, batch))
        return held_out(loss_fn(answers, batch, whole_scale(batch)))

    def check(self) -> list[Refusal]:
        """See `Algorithm.check`."""
        if self.config.desirable_weight or self.config.undesirable_weight:
            return []
        return [
            Refusal(
                "algorithm.desirable_weight", "both weights are 0: nothing is learned", "give one more than 0"
            )
        ]

    def _loss_fn(self, kl: float) -> KtoLoss:
        return KtoLoss(config=self.config, kl=kl)
