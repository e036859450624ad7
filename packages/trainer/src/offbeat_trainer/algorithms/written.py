"""Supervised training: the negative log-likelihood of written completions.

DPO (arXiv 2305.18290): a policy learns from pairs which completion of a prompt is preferred, and no reward model is made.

B = sequences, T = tokens of the longest one, P = pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn.functional import logsigmoid

from offbeat_engine import Field, LossOutput, LossScale, Predictions, SftLoss, register_field
from offbeat_trainer.algorithms.grpo import REFERENCE
from offbeat_trainer.algorithms.interface import OfflineAlgorithm
from offbeat_trainer.algorithms.policy_loss import inside
from offbeat_trainer.algorithms.roles import POLICY, RoleSpec
from offbeat_trainer.config import DpoConfig, SftConfig
from offbeat_trainer.data.assemble import assemble_examples
from offbeat_trainer.data.metrics import Mean, Metric
from offbeat_trainer.data.types import Example
from offbeat_trainer.errors import TrainerError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat_engine import TrainBatch
    from offbeat_trainer.algorithms.roles import Role
    from offbeat_trainer.config import AlgorithmConfig
    from offbeat_trainer.data.types import Pair


@dataclass(frozen=True, slots=True)
class SupervisedLoss:
    """`SftLoss`, nats per trained token; its `sums` are means over the step's tokens."""

    def __call__(self, predictions: Predictions, batch: TrainBatch, scale: LossScale) -> LossOutput:
        """Return this micro-batch's share."""
        output = SftLoss()(predictions, batch, scale)
        entropy = output.sums["entropy"] / scale.num_tokens
        return LossOutput(loss=output.loss, sums={"policy/entropy_nats": entropy})


class Sft(OfflineAlgorithm[SftConfig]):
    """One model that learns the completions of examples, each token alike."""

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


CHOSEN = register_field(
    Field(
        key="dpo/chosen",
        dims="B",
        dtype=torch.bool,
        meaning="the preferred completion of its pair; the pair is its `unit`",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoLoss:
    """The loss of DPO (equation 7) as an `offbeat_engine.LossFn`, additive over micro-batches, a mean over pairs.

    With r(y) = beta (log pi(y|x) - log pi_ref(y|x)), sums over the completion, and h = r(chosen) - r(rejected), it is
    -(1 - e) log sigmoid(h) - e log sigmoid(-h): e = `label_smoothing` is the chance that a pair is the wrong way round (Mitchell,
    "A note on DPO with noisy preferences", ericmitchell.ai/cdpo.pdf; 0 is DPO). Needs `unit`, `dpo/chosen` and `ref_logprobs`.

    Raises:
        TrainerError: a pair is not whole in this micro-batch, or is no pair (when called).
    """

    beta: float
    label_smoothing: float = 0.0

    def __call__(self, predictions: Predictions, batch: TrainBatch, scale: LossScale) -> LossOutput:
        """Return this micro-batch's share of the loss, and of means over pairs."""
        ratio_BT = inside(predictions["logprobs"] - batch["ref_logprobs"], batch["loss_mask"])
        chosen_P, rejected_P = paired(self.beta * ratio_BT.sum(-1), batch)
        margin_P = chosen_P - rejected_P
        smooth = self.label_smoothing
        loss_P = -(1 - smooth) * logsigmoid(margin_P) - smooth * logsigmoid(-margin_P)
        means = {
            "dpo/reward_chosen": chosen_P,
            "dpo/reward_rejected": rejected_P,
            "dpo/reward_margin": margin_P,
            "accuracy/train": (margin_P > 0).float(),
        }
        return LossOutput(
            loss=loss_P.sum() / scale.num_units,
            sums={key: value.detach().sum() / scale.num_units for key, value in means.items()},
        )


def paired(values_B: torch.Tensor, batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of the chosen and of the rejected sequences, [P] each, in the order of their units.

    Raises:
        TrainerError: a unit is not one chosen and one rejected sequence.
    """
    unit_B, chosen_B = batch["unit"], batch[CHOSEN.key]
    of_chosen_P, by_chosen_P = unit_B[chosen_B].sort()
    of_rejected_P, by_rejected_P = unit_B[~chosen_B].sort()
    whole = torch.equal(of_chosen_P, of_rejected_P) and bool((of_chosen_P[1:] != of_chosen_P[:-1]).all())
    if not whole:
        raise TrainerError(
            f"pairs are torn: of {len(unit_B)} sequences, units {of_chosen_P.tolist()} are chosen and {of_rejected_P.tolist()} "
            "rejected; an engine keeps sequences of one `unit` on one rank and in one micro-batch"
        )
    return values_B[chosen_B][by_chosen_P], values_B[~chosen_B][by_rejected_P]


class Dpo(OfflineAlgorithm[DpoConfig]):
    """A policy, and the model that it starts from as the reference: under adapters the base below them."""

    Config: ClassVar[type[AlgorithmConfig]] = DpoConfig
    reads = "pairs"

    def roles(self) -> Mapping[str, RoleSpec]:
        """See `Algorithm.roles`."""
        return {POLICY: RoleSpec(trained=True), REFERENCE: RoleSpec(trained=False)}

    def batch(self, rows: Sequence[Pair]) -> TrainBatch:
        """See `OfflineAlgorithm.batch`. A pair is a `group` too: its prompt is computed once where an engine can."""
        both = [(pair.prompt_ids, ids) for pair in rows for ids in (pair.chosen_ids, pair.rejected_ids)]
        batch = assemble_examples([Example(prompt_ids=prompt, completion_ids=ids) for prompt, ids in both])
        batch["unit"] = torch.arange(len(rows)).repeat_interleave(2)
        batch["group"] = batch["unit"].clone()
        batch[CHOSEN.key] = torch.tensor([True, False]).repeat(len(rows))
        return batch

    def learn(self, roles: Mapping[str, Role], batch: TrainBatch) -> list[Metric]:
        """See `Algorithm.learn`; each of `updates_per_step` runs of pairs is one optimizer step."""
        policy = roles[POLICY]
        shares = policy.shares(batch, self.step.updates_per_step)
        roles[REFERENCE].judge(shares, "ref_logprobs")
        return policy.train(shares, self._loss_fn())

    def evaluate(self, roles: Mapping[str, Role], batch: TrainBatch) -> list[Metric]:
        """See `OfflineAlgorithm.evaluate`. Accuracy is the share of pairs whose chosen completion has the larger reward."""
        batch = batch.copy()
        batch["ref_logprobs"] = roles[REFERENCE].whole_logprobs(batch)
        logprobs_BT = roles[POLICY].whole_logprobs(batch)
        num_sequences = batch.batch_size[0]
        scale = LossScale(
            num_tokens=int(batch["loss_mask"].sum()),
            num_sequences=num_sequences,
            num_units=num_sequences // 2,
        )
        found = self._loss_fn()(
            Predictions({"logprobs": logprobs_BT}, batch_size=[num_sequences]), batch, scale
        )
        means = {"validation/loss": found.loss} | {_HELD_OUT[key]: value for key, value in found.sums.items()}
        return [Metric(key, Mean(float(value))) for key, value in means.items()]

    def _loss_fn(self) -> DpoLoss:
        return DpoLoss(beta=self.config.beta, label_smoothing=self.config.label_smoothing)


_HELD_OUT = {
    "dpo/reward_chosen": "validation/reward_chosen",
    "dpo/reward_rejected": "validation/reward_rejected",
    "dpo/reward_margin": "validation/reward_margin",
    "accuracy/train": "accuracy/validation",
}
