"""DPO and its kin: a policy learns from pairs which completion of a prompt is preferred, and no reward model is made.

B = sequences, T = tokens of the longest one, P = pairs.

A loss of a pair is a function of c and r, what the chosen and the rejected completion [P] score: log pi(y|x) - log pi_ref(y|x), or
log pi(y|x) where there is no reference, summed over the completion or taken per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

import torch
from torch.nn.functional import logsigmoid

from offbeat_engine import Field, LossOutput, LossScale, Predictions, Refusal, register_field
from offbeat_trainer.algorithms.grpo import REFERENCE
from offbeat_trainer.algorithms.interface import OfflineAlgorithm
from offbeat_trainer.algorithms.policy_loss import inside
from offbeat_trainer.algorithms.roles import POLICY, RoleSpec
from offbeat_trainer.algorithms.written.config import (
    CpoConfig,
    DpoConfig,
    DpoVariant,
    OrpoConfig,
    SimpoConfig,
)
from offbeat_trainer.config import AlgorithmConfig
from offbeat_trainer.data.assemble import assemble_examples
from offbeat_trainer.data.metrics import Mean, Metric
from offbeat_trainer.data.types import Example
from offbeat_trainer.errors import TrainerError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from offbeat_engine import TrainBatch
    from offbeat_trainer.algorithms.roles import Role
    from offbeat_trainer.data.types import Pair

C_co = TypeVar("C_co", bound=AlgorithmConfig, covariant=True)


class Variant(Protocol):
    """A loss of DPO's settings."""

    def __call__(self, c_P: Tensor, r_P: Tensor, beta: float, smooth: float) -> Tensor:
        """Return the loss [P] by c, r, beta and e, the label smoothing, which some have no use for."""
        ...


CHOSEN = register_field(
    Field(
        key="dpo/chosen",
        dims="B",
        dtype=torch.bool,
        meaning="the preferred completion of its pair; the pair is its `unit`",
    )
)


def sigmoid(c_P: Tensor, r_P: Tensor, beta: float, smooth: float) -> Tensor:
    """-(1 - e) log s(h) - e log s(-h), h = beta (c - r), s the sigmoid.

    DPO (arXiv 2305.18290, equation 7); e > 0 is Mitchell, "A note on DPO with noisy preferences", ericmitchell.ai/cdpo.pdf.
    """
    h_P = beta * (c_P - r_P)
    return -(1 - smooth) * logsigmoid(h_P) - smooth * logsigmoid(-h_P)


def robust(c_P: Tensor, r_P: Tensor, beta: float, smooth: float) -> Tensor:
    """(-(1 - e) log sigmoid(h) + e log sigmoid(-h)) / (1 - 2e): what the clean pairs' loss is on average (arXiv 2403.00409)."""
    h_P = beta * (c_P - r_P)
    return (smooth * logsigmoid(-h_P) - (1 - smooth) * logsigmoid(h_P)) / (1 - 2 * smooth)


def hinge(c_P: Tensor, r_P: Tensor, beta: float, smooth: float) -> Tensor:
    """max(0, 1 - beta (c - r)): SLiC-HF (arXiv 2305.10425) on log-ratios, as arXiv 2309.06657 has it."""
    return (1 - beta * (c_P - r_P)).relu()


def ipo(c_P: Tensor, r_P: Tensor, beta: float, smooth: float) -> Tensor:
    """(c - r - 1 / (2 beta))^2 with c and r per token (IPO, arXiv 2310.12036, equation 17, which has sums)."""
    return (c_P - r_P - 1 / (2 * beta)) ** 2


def exo(c_P: Tensor, r_P: Tensor, beta: float, smooth: float) -> Tensor:
    """KL(q || p) with q = (sigmoid(h), sigmoid(-h)) and p = (1 - e, e) (EXO, arXiv 2402.00856, equation 16)."""
    h_P = beta * (c_P - r_P)
    won_P = h_P.sigmoid() * (logsigmoid(h_P) - math.log1p(-smooth))
    return won_P + (-h_P).sigmoid() * (logsigmoid(-h_P) - math.log(smooth))


def nca(c_P: Tensor, r_P: Tensor, beta: float, smooth: float) -> Tensor:
    """-log sigmoid(beta c) - (log sigmoid(-beta c) + log sigmoid(-beta r)) / 2 (NCA, arXiv 2402.05369)."""
    return -logsigmoid(beta * c_P) - 0.5 * (logsigmoid(-beta * c_P) + logsigmoid(-beta * r_P))


def bco(c_P: Tensor, r_P: Tensor, beta: float, smooth: float) -> Tensor:
    """-log sigmoid(beta c) - log sigmoid(-beta r): BCO (arXiv 2404.04656) without its shift of rewards."""
    return -logsigmoid(beta * c_P) - logsigmoid(-beta * r_P)


def sppo(c_P: Tensor, r_P: Tensor, beta: float, smooth: float) -> Tensor:
    """(c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2: SPPO (arXiv 2405.00675) where the chosen one always wins."""
    return (c_P - 1 / (2 * beta)) ** 2 + (r_P + 1 / (2 * beta)) ** 2


def apo_zero(c_P: Tensor, r_P: Tensor, beta: float, smooth: float) -> Tensor:
    """1 - sigmoid(beta c) + sigmoid(beta r): raises chosen ones and lowers rejected ones (APO, arXiv 2408.06266)."""
    return 1 - (beta * c_P).sigmoid() + (beta * r_P).sigmoid()


def apo_down(c_P: Tensor, r_P: Tensor, beta: float, smooth: float) -> Tensor:
    """sigmoid(beta c) + 1 - sigmoid(beta (c - r)): lowers both, rejected ones more (APO, arXiv 2408.06266)."""
    return (beta * c_P).sigmoid() + 1 - (beta * (c_P - r_P)).sigmoid()


VARIANTS: dict[DpoVariant, Variant] = {
    DpoVariant.SIGMOID: sigmoid,
    DpoVariant.SIGMOID_NORM: sigmoid,
    DpoVariant.HINGE: hinge,
    DpoVariant.IPO: ipo,
    DpoVariant.ROBUST: robust,
    DpoVariant.EXO: exo,
    DpoVariant.NCA: nca,
    DpoVariant.BCO: bco,
    DpoVariant.SPPO: sppo,
    DpoVariant.APO_ZERO: apo_zero,
    DpoVariant.APO_DOWN: apo_down,
}
PER_TOKEN = {DpoVariant.SIGMOID_NORM, DpoVariant.IPO}
SMOOTHED = {DpoVariant.SIGMOID, DpoVariant.SIGMOID_NORM, DpoVariant.ROBUST, DpoVariant.EXO}


def simpo(c_P: Tensor, r_P: Tensor, beta: float, gamma: float) -> Tensor:
    """-log sigmoid(beta (c - r) - gamma), c and r log-probs per token (SimPO, arXiv 2405.14734, equation 6)."""
    return -logsigmoid(beta * (c_P - r_P) - gamma)


def odds_ratio(c_P: Tensor, r_P: Tensor, odds_coef: float) -> Tensor:
    """-k log sigmoid(log odds(c) - log odds(r)), odds(z) = e^z / (1 - e^z), z per token (ORPO, arXiv 2403.07691, equation 7)."""
    log_odds_P = [z_P - torch.log(-torch.expm1(z_P.clamp(max=-1e-6))) for z_P in (c_P, r_P)]
    return -odds_coef * logsigmoid(log_odds_P[0] - log_odds_P[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLoss:
    """A loss of pairs as an `offbeat_engine.LossFn`, additive over micro-batches, a mean over pairs.

    `variant` gives it by c and r. `sft_coef` times -log pi(y|x) / |y| of the chosen y is added. `beta` scales the implicit rewards
    of the metrics. Needs `unit`, `dpo/chosen` and, where it is `referenced`, `ref_logprobs`.

    Raises:
        TrainerError: a pair is not whole in this micro-batch, or is no pair (when called).
    """

    variant: Callable[[Tensor, Tensor], Tensor]
    beta: float = 1.0
    per_token: bool = False
    referenced: bool = True
    sft_coef: float = 0.0

    def __call__(self, predictions: Predictions, batch: TrainBatch, scale: LossScale) -> LossOutput:
        """Return this micro-batch's share of the loss, and of means over pairs."""
        mask_BT = batch["loss_mask"]
        num_tokens_B = mask_BT.sum(-1).clamp(min=1)
        logp_BT = inside(predictions["logprobs"], mask_BT)
        score_BT = logp_BT - inside(batch["ref_logprobs"], mask_BT) if self.referenced else logp_BT
        score_B = score_BT.sum(-1) / num_tokens_B if self.per_token else score_BT.sum(-1)
        c_P, r_P = paired(score_B, batch)
        loss_P = self.variant(c_P, r_P)
        if self.sft_coef:
            loss_P = loss_P - self.sft_coef * paired(logp_BT.sum(-1) / num_tokens_B, batch)[0]
        return over_pairs(loss_P, c_P, r_P, scale, self.beta)


def over_pairs(loss_P: Tensor, c_P: Tensor, r_P: Tensor, scale: LossScale, beta: float = 1.0) -> LossOutput:
    """Return the share of the mean of `loss_P` over all pairs, and of the metrics of scores c and r, whose rewards `beta` scales."""
    means = {
        "dpo/reward_chosen": beta * c_P,
        "dpo/reward_rejected": beta * r_P,
        "dpo/reward_margin": beta * (c_P - r_P),
        "accuracy/train": (c_P > r_P).float(),
    }
    return LossOutput(
        loss=loss_P.sum() / scale.num_units,
        sums={key: value.detach().sum() / scale.num_units for key, value in means.items()},
    )


def paired(values_B: Tensor, batch: TrainBatch) -> tuple[Tensor, Tensor]:
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


def assemble_pairs(rows: Sequence[Pair]) -> TrainBatch:
    """Return the batch of pairs, chosen and rejected in turn. A pair is a `group` too: its prompt is computed once where an engine can."""
    both = [(pair.prompt_ids, ids) for pair in rows for ids in (pair.chosen_ids, pair.rejected_ids)]
    batch = assemble_examples([Example(prompt_ids=prompt, completion_ids=ids) for prompt, ids in both])
    batch["unit"] = torch.arange(len(rows)).repeat_interleave(2)
    batch["group"] = batch["unit"].clone()
    batch[CHOSEN.key] = torch.tensor([True, False]).repeat(len(rows))
    return batch


def whole_scale(batch: TrainBatch) -> LossScale:
    """Return the counts of a whole batch of pairs."""
    num_sequences = batch.batch_size[0]
    return LossScale(
        num_tokens=int(batch["loss_mask"].sum()), num_sequences=num_sequences, num_units=num_sequences // 2
    )


def held_out(output: LossOutput) -> list[Metric]:
    """Return the loss of held-out rows and what it says beside, under the names of those."""
    means = {"validation/loss": output.loss} | {
        "accuracy/validation" if key == "accuracy/train" else f"validation/{key.partition('/')[2]}": value
        for key, value in output.sums.items()
    }
    return [Metric(key, Mean(float(value))) for key, value in means.items()]


class PairAlgorithm(OfflineAlgorithm[C_co]):
    """One that learns by a `PairLoss`; the reference is loaded where that needs it."""

    reads = "pairs"

    def loss_fn(self) -> PairLoss:
        """Return the loss."""
        raise NotImplementedError

    def roles(self) -> Mapping[str, RoleSpec]:
        """See `Algorithm.roles`."""
        judge = {REFERENCE: RoleSpec(trained=False)} if self.loss_fn().referenced else {}
        return {POLICY: RoleSpec(trained=True), **judge}

    def batch(self, rows: Sequence[Pair]) -> TrainBatch:
        """See `OfflineAlgorithm.batch`."""
        return assemble_pairs(rows)

    def learn(self, roles: Mapping[str, Role], batch: TrainBatch) -> list[Metric]:
        """See `Algorithm.learn`; each of `updates_per_step` runs of pairs is one optimizer step."""
        policy = roles[POLICY]
        shares = policy.shares(batch, self.step.updates_per_step)
        if REFERENCE in roles:
            roles[REFERENCE].judge(shares, "ref_logprobs")
        return policy.train(shares, self.loss_fn())

    def evaluate(self, roles: Mapping[str, Role], batch: TrainBatch) -> list[Metric]:
        """See `OfflineAlgorithm.evaluate`. Accuracy is the share of pairs whose chosen completion has the larger reward."""
        batch = batch.copy()
        if REFERENCE in roles:
            batch["ref_logprobs"] = roles[REFERENCE].whole_logprobs(batch)
        answers = Predictions({"logprobs": roles[POLICY].whole_logprobs(batch)}, batch_size=batch.batch_size)
        return held_out(self.loss_fn()(answers, batch, whole_scale(batch)))


class Dpo(PairAlgorithm[DpoConfig]):
    """DPO (arXiv 2305.18290): a policy learns preferences from pairs, held to the model that it starts from, with no reward model.

    loss = -log sigmoid(beta (c - r)), a mean over pairs, with c and r the sum of log pi(y|x) - log pi_ref(y|x) over the chosen and the
    rejected completion y of a prompt x. pi_ref is the model at the start, under adapters the base below them. `loss` names another
    function of c and r, `label_smoothing` is the chance that a pair is the wrong way round, and `sft_coef` adds
    -log pi(y|x) / |y| of the chosen y.

    Use it when you have pairs of completions and a policy that could have written them, and not when a reward can be computed for
    new completions, or when completions have single verdicts (KTO).
    """

    Config: ClassVar[type[AlgorithmConfig]] = DpoConfig

    def loss_fn(self) -> PairLoss:
        """Return the loss that the settings name."""
        config = self.config
        variant = partial(VARIANTS[config.loss], beta=config.beta, smooth=config.label_smoothing)
        return PairLoss(
            variant=variant,
            beta=config.beta,
            per_token=config.loss in PER_TOKEN,
            sft_coef=config.sft_coef,
        )

    def check(self) -> list[Refusal]:
        """See `Algorithm.check`."""
        name, smooth = self.config.loss, self.config.label_smoothing
        remedy, setting = "", "algorithm.label_smoothing"
        if smooth and name not in SMOOTHED:
            remedy = f"0, or algorithm.loss={', '.join(sorted(SMOOTHED))}"
            return [Refusal(setting, f"{smooth:g}, and the loss {name} has no use for it", remedy)]
        if name is DpoVariant.EXO and not smooth:
            return [Refusal(setting, "0, and exo divides by it", "algorithm.label_smoothing=0.001")]
        if name is DpoVariant.ROBUST and smooth >= 0.5:
            return [Refusal(setting, "0.5: robust divides by 1 - 2 * label_smoothing", "give less than 0.5")]
        return []


class Simpo(PairAlgorithm[SimpoConfig]):
    """SimPO (arXiv 2405.14734): preferences from pairs by log-probs per token and a margin, without a reference model.

    loss = -log sigmoid(beta (log pi(y+|x) / |y+| - log pi(y-|x) / |y-|) - gamma), a mean over pairs; y+ and y- are the chosen and the
    rejected completion of a prompt x, |y| counts tokens. `sft_coef` adds -log pi(y+|x) / |y+|.

    Use it when memory for a reference is short, or when DPO makes completions longer and longer, and not without a small learning
    rate: nothing holds the policy to where it began.
    """

    Config: ClassVar[type[AlgorithmConfig]] = SimpoConfig

    def loss_fn(self) -> PairLoss:
        """Return the loss."""
        config = self.config
        variant = partial(simpo, beta=config.beta, gamma=config.gamma)
        return PairLoss(
            variant=variant, beta=config.beta, per_token=True, referenced=False, sft_coef=config.sft_coef
        )


class Orpo(PairAlgorithm[OrpoConfig]):
    """ORPO (arXiv 2403.07691): supervised training on chosen completions, and an odds ratio against rejected ones, in one loss.

    loss = -z+ - odds_coef log sigmoid(log odds(z+) - log odds(z-)), a mean over pairs, with z = log pi(y|x) / |y| of the chosen (+) and
    the rejected (-) completion y of a prompt x, and odds(z) = e^z / (1 - e^z).

    Use it when a base model is to learn a format and preferences at once, without a reference, and not when the policy was
    tuned on such completions already: most of the gradient is that of supervised training.
    """

    Config: ClassVar[type[AlgorithmConfig]] = OrpoConfig

    def loss_fn(self) -> PairLoss:
        """Return the loss."""
        variant = partial(odds_ratio, odds_coef=self.config.odds_coef)
        return PairLoss(variant=variant, per_token=True, referenced=False, sft_coef=1.0)


class Cpo(PairAlgorithm[CpoConfig]):
    """CPO (arXiv 2401.08417): DPO against a uniform reference, beside the likelihood of the chosen completion.

    loss = -log sigmoid(beta (log pi(y+|x) - log pi(y-|x))) - sft_coef log pi(y+|x) / |y+|, a mean over pairs; y+ and y- are the chosen
    and the rejected completion of a prompt x, sums over their tokens.

    Use it when pairs are translations or other completions of like length, and memory for a reference is short, and not when lengths
    differ much: sums of log-probs favour the shorter one.
    """

    Config: ClassVar[type[AlgorithmConfig]] = CpoConfig

    def loss_fn(self) -> PairLoss:
        """Return the loss."""
        variant = partial(sigmoid, beta=self.config.beta, smooth=0.0)
        return PairLoss(
            variant=variant, beta=self.config.beta, referenced=False, sft_coef=self.config.sft_coef
        )
