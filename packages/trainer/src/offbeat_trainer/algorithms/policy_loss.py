"""The policy loss: clipped surrogate, weighed for off-policy tokens, KL to a reference, entropy bonus.

How losses of tokens become one number is here, too. B = sequences of a micro-batch, T = tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, assert_never, cast

import torch

from offbeat_engine import LossOutput, LossScale
from offbeat_trainer.config import Aggregation, Correction, KlEstimator, Proximal
from offbeat_trainer.errors import PlanRefused, TrainerError
from offbeat_trainer.ratios import (
    MAX_LOG_RATIO,
    RATIO_MEAN,
    RATIO_SQUARE_MEAN,
    correct,
    derived,
    importance_ratios,
    inside,
    k3,
    kl_estimate,
    peak,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from offbeat_engine import Predictions, TrainBatch
    from offbeat_trainer.config import PolicyLossConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """A surrogate per token, to be minimized, and where which bound cut the gradient (bool), if it has such bounds."""

    loss: torch.Tensor
    clipped_low: torch.Tensor | None = None
    clipped_high: torch.Tensor | None = None
    clipped_dual: torch.Tensor | None = None


class SurrogateFn(Protocol):
    """What is minimised, of each token; see `Grpo.surrogate`. It travels to the ranks."""

    def __call__(self, ratio: torch.Tensor, advantages: torch.Tensor) -> Surrogate:
        """Return it for `ratio` and `advantages`, both [B, T]."""
        ...


def importance_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    """Return exp(logprobs - old_logprobs), the log capped to +-20 so that float32 holds the ratio.

    Beyond the cap the gradient is zero: such a token says nothing about the policy that sampled it.
    """
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> Surrogate:
    """Return the pessimistic bound -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) per token, any shape.

    PPO's clip (arXiv 1707.06347, equation 7) with separate bounds (DAPO's clip-higher, arXiv 2503.14476, equation 10).
    Where A < 0, `dual_clip` = c > 1 stops the loss at -c A (dual-clip PPO, arXiv 1912.09729, equation 5), since
    there the clip leaves it unbounded; 0 = off.
    """
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-ratio * advantages, -clipped * advantages)
    clipped_dual = torch.zeros_like(ratio, dtype=torch.bool)
    if dual_clip:
        clipped_dual = (advantages < 0) & (ratio > dual_clip)
        loss = torch.where(clipped_dual, -dual_clip * advantages, loss)
    return Surrogate(
        loss=loss,
        clipped_low=(advantages < 0) & (ratio < 1 - clip_low),
        clipped_high=(advantages > 0) & (ratio > 1 + clip_high),
        clipped_dual=clipped_dual,
    )


def policy_loss_bounds(config: PolicyLossConfig) -> Iterator[tuple[str, str]]:
    """Yield the name of each setting that is out of its bounds, and what was expected and came."""
    low, high, dual = config.clip_low, config.clip_high, config.dual_clip
    for name, value, ok, wanted in (
        ("clip_low", low, 0 <= low < 1, "in 0..1 (1 excluded)"),
        ("clip_high", high, high >= 0, ">= 0"),
        ("dual_clip", dual, dual == 0 or dual > 1, "> 1, or 0 for off"),
        ("kl_coef", config.kl_coef, config.kl_coef >= 0, ">= 0"),
        ("correction_low", config.correction_low, 0 < config.correction_low <= 1, "in 0..1 (0 excluded)"),
        ("correction_high", config.correction_high, config.correction_high >= 1, ">= 1"),
    ):
        if not ok:
            yield name, f"{wanted}, got {value:g}"


def aggregate(
    kind: Aggregation,
    values_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    scale: LossScale,
    max_completion_tokens: int,
) -> torch.Tensor:
    """Return the share of `values_BT` under `mask_BT` in the step's aggregate, a scalar.

    Each mode is a sum over sequences divided by counts of the *whole* optimizer step (`LossScale`): the parts of any split of a
    batch into micro-batches or ranks add up to the same loss.

    - `token_mean`: every token weighs the same (DAPO, arXiv 2503.14476, section 3.3).
    - `seq_mean_token_sum`: every token weighs the same, divided by sequences.
    - `seq_mean_token_mean`: every sequence weighs the same, however long (GRPO, arXiv 2402.03300).
    - `seq_mean_token_sum_norm`: as `seq_mean_token_sum`, divided by the constant `max_completion_tokens`, so that a
      batch's length does not change the step (Dr. GRPO, arXiv 2503.20783).

    Values outside the mask count as zero, NaN and infinity included. Sequences without a masked token add nothing;
    whether they count in `scale.num_sequences` is the engine's affair.
    """
    sum_B = inside(values_BT, mask_BT).sum(-1)
    num_tokens = max(scale.num_tokens, 1)  # nothing to train on anywhere: zero, not 0 / 0
    num_sequences = max(scale.num_sequences, 1)
    match kind:
        case Aggregation.TOKEN_MEAN:
            return sum_B.sum() / num_tokens
        case Aggregation.SEQ_MEAN_TOKEN_SUM:
            return sum_B.sum() / num_sequences
        case Aggregation.SEQ_MEAN_TOKEN_MEAN:
            return (sum_B / mask_BT.sum(-1).clamp(min=1)).sum() / num_sequences
        case Aggregation.SEQ_MEAN_TOKEN_SUM_NORM:
            return sum_B.sum() / (num_sequences * max_completion_tokens)
        case _:
            assert_never(kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """The loss of GRPO and its kin as an `offbeat_engine.LossFn`: picklable, and additive over micro-batches.

    loss = weight * surrogate + kl_coef * KL(policy || reference) - entropy_coef * entropy, each aggregated by
    `config.aggregation`; the weight is 1 for tokens of the policy itself, see `ratios`. The KL is weighted, by weight and
    ratio, with the estimator UNBIASED alone. Needs `advantages`; with `kl_coef` also `ref_logprobs`; with `entropy_coef` an engine whose
    `entropy` carries gradient.

    Where the batch has no `old_logprobs`, the old policy *is* the current one: the ratio is exactly 1 whatever the
    micro-batches were, and the gradient is the plain policy gradient. That is right for one update per batch. With
    several, give `old_logprobs`, taken before the first. These are the proximal policy of decoupled PPO; with
    `proximal` ROLLOUT the sampler's log-probs take their place, and there is no weight.

    `surrogate` takes the place of the clipped one.

    `sums` are shares of means over the step's tokens: added up over micro-batches and ranks they *are* the means.

    Raises:
        PlanRefused: a setting is outside its range (when made).
        TrainerError: the batch or the predictions lack what the settings need (when called).
    """

    config: PolicyLossConfig
    max_completion_tokens: int
    surrogate: SurrogateFn | None = None

    def __post_init__(self) -> None:
        for name, told in policy_loss_bounds(self.config):
            raise PlanRefused(f"`{name}` must be {told}")
        if self.max_completion_tokens < 1:
            raise PlanRefused(f"`max_completion_tokens` must be >= 1, got {self.max_completion_tokens}")

    @property
    def entropy_gradient(self) -> bool:
        """Whether the engine must give `entropy` a gradient; engines read this, since it costs time and memory."""
        return self.config.entropy_coef != 0

    @staticmethod
    def derived(sums: Mapping[str, float]) -> dict[str, float]:
        """Return what follows from the whole sums of a step; see `Role.train`."""
        return derived(sums)

    def __call__(self, predictions: Predictions, batch: TrainBatch, scale: LossScale) -> LossOutput:
        """Return this micro-batch's share of the loss and what is worth watching."""
        config = self.config
        mask_BT = batch["loss_mask"]
        # This one `where` keeps NaN and infinity outside the mask out of the gradient, `aggregate` out of the loss.
        logprobs_BT = inside(predictions["logprobs"], mask_BT)
        trainer_BT = _optional(batch, "old_logprobs")
        trainer_BT = logprobs_BT.detach() if trainer_BT is None else trainer_BT
        sampler_BT = _optional(batch, "rollout_logprobs")
        old_BT = self._sampler(sampler_BT) if config.proximal is Proximal.ROLLOUT else trainer_BT
        ratio_BT = importance_ratio(logprobs_BT, old_BT)
        surrogate = self._surrogate(ratio_BT, self._advantages(batch))
        token_loss_BT = surrogate.loss
        cuts = {"low": surrogate.clipped_low, "high": surrogate.clipped_high, "dual": surrogate.clipped_dual}
        sums = {f"policy/clip_{name}_fraction": cut_BT for name, cut_BT in cuts.items() if cut_BT is not None}
        # KL(old || policy), sampled from old: the roles of k3's two policies are swapped.
        sums["policy/approx_kl_nats"] = k3(logprobs_BT - old_BT)
        maxes = {"policy/ratio_max": ratio_BT}
        weight_BT = torch.ones_like(trainer_BT)
        if sampler_BT is not None:
            weight_BT = self._weigh(trainer_BT, sampler_BT, mask_BT, sums, maxes)
            token_loss_BT = token_loss_BT * weight_BT
        ref_BT = self._reference(batch)
        if ref_BT is not None:
            kl_BT = kl_estimate(config.kl_estimator, logprobs_BT, ref_BT)
            if config.kl_estimator is KlEstimator.UNBIASED:
                kl_BT = kl_BT * ratio_BT * weight_BT
            token_loss_BT = token_loss_BT + config.kl_coef * kl_BT
            sums["policy/ref_kl_nats"] = kl_BT
        entropy_BT = self._entropy(predictions, batch)
        if entropy_BT is not None:
            token_loss_BT = token_loss_BT - config.entropy_coef * entropy_BT
            sums["policy/entropy_nats"] = entropy_BT
        num_tokens = max(scale.num_tokens, 1)
        return LossOutput(
            loss=aggregate(config.aggregation, token_loss_BT, mask_BT, scale, self.max_completion_tokens),
            sums={
                key: inside(value.detach().float(), mask_BT).sum() / num_tokens for key, value in sums.items()
            },
            maxes={key: peak(inside(value.detach(), mask_BT)) for key, value in maxes.items()},
        )

    def _surrogate(self, ratio_BT: torch.Tensor, advantages_BT: torch.Tensor) -> Surrogate:
        if self.surrogate is not None:
            return self.surrogate(ratio_BT, advantages_BT)
        config = self.config
        return clipped_surrogate(ratio_BT, advantages_BT, config.clip_low, config.clip_high, config.dual_clip)

    def _weigh(
        self,
        trainer_BT: torch.Tensor,
        sampler_BT: torch.Tensor,
        mask_BT: torch.Tensor,
        sums: dict[str, torch.Tensor],
        maxes: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return the weight of each token for having been sampled elsewhere; note what it comes to."""
        config = self.config
        kind = Correction.NONE if config.proximal is Proximal.ROLLOUT else config.correction
        ratio_BT = importance_ratios(config.correction_level, trainer_BT, sampler_BT, mask_BT)
        weights = correct(kind, ratio_BT, config.correction_low, config.correction_high)
        sums |= {
            RATIO_MEAN: weights.ratio,
            RATIO_SQUARE_MEAN: weights.ratio.square(),
            "offpolicy/truncated_fraction": weights.truncated,
            "offpolicy/masked_fraction": weights.masked,
        }
        maxes["offpolicy/ratio_max"] = ratio_BT
        return weights.weight

    def _sampler(self, sampler_BT: torch.Tensor | None) -> torch.Tensor:
        if sampler_BT is None:
            raise TrainerError(
                "`proximal: rollout` takes the ratio against the sampler, but the batch has no `rollout_logprobs`; "
                "build it with `assemble`, or use `proximal: recompute`"
            )
        return sampler_BT

    def _advantages(self, batch: TrainBatch) -> torch.Tensor:
        advantages_BT = _optional(batch, "advantages")
        if advantages_BT is None:
            raise TrainerError("a policy loss needs `advantages` in the batch; build it with `assemble`")
        return advantages_BT

    def _reference(self, batch: TrainBatch) -> torch.Tensor | None:
        ref_BT = _optional(batch, "ref_logprobs")
        if ref_BT is None and self.config.kl_coef:
            raise TrainerError(
                f"`kl_coef` is {self.config.kl_coef} but the batch has no `ref_logprobs`; "
                "run the reference model over it first, or set `kl_coef` to 0"
            )
        return ref_BT

    def _entropy(self, predictions: Predictions, batch: TrainBatch) -> torch.Tensor | None:
        entropy_BT = _optional(predictions, "entropy")
        if not self.entropy_gradient:
            return None if entropy_BT is None else entropy_BT.detach()
        if entropy_BT is None or (
            predictions["logprobs"].requires_grad and not predictions["entropy"].requires_grad
        ):
            state = "gives none" if entropy_BT is None else "gives it without gradient"
            raise TrainerError(
                f"`entropy_coef` is {self.config.entropy_coef}, which needs the gradient of the entropy, but this "
                f"engine {state}; set `entropy_coef` to 0, or use an engine whose entropy carries gradient"
            )
        return entropy_BT


def _optional(values: TrainBatch, key: str) -> torch.Tensor | None:
    return cast("torch.Tensor | None", values.get(key, None))
