"""The policy loss: clipped surrogate, weighed for off-policy tokens, KL to a reference, entropy bonus.

How losses of tokens become one number is here, too, and ratios of two policies, per token. B = sequences of a micro-batch, T = tokens.

**KL.** Schulman's estimators of KL(policy || reference) from tokens that the policy sampled (joschu.net/blog/kl-approx.html).
`log_ratio` is log reference - log policy, per token, nats. As *numbers*, k1 and k3 are unbiased and k2 is nearly so; k1 alone can be
negative and k3 varies the least. As *losses*, what matters is the expected gradient while the tokens stay fixed, and there they differ:

- k1: the score function, zero on average. It adds noise and no pull to the reference. Use it to watch, not to train.
- k2: the gradient of KL(policy || reference), the quantity usually meant.
- k3: the gradient of KL(reference || policy); gentle where the policy has left the reference's support (GRPO, arXiv 2402.03300).
- k3_plus: the value of k3, the gradient of k2 (verl's `k3+`).
- abs: |log ratio|, no KL; its gradient is plus or minus that of the log-probability, however far the policy is.
- full: KL(policy || reference) of whole distributions at each token, its value and its gradient.

Of tokens that older weights sampled they pull as if those weights were the policy; `PolicyLoss` does not weigh them. "unbiased" is k3
times policy / sampler, with the gradient of that ratio (DeepSeek-V3.2, arXiv 2512.02556, section 3.1): its expected gradient is that
of KL(policy || reference), whoever sampled. tests/algorithms/test_kl.py holds these sentences against exact expectations.

**Importance weights** trainer / sampler, cut where they run wild. The *sampler* made the tokens: older weights, and an engine that
rounds differently. The *proximal* policy is the trainer's own before the step. The *current* one is being trained. Decoupled PPO
(Hilton et al., arXiv 2110.00641; for asynchronous runs AReaL, arXiv 2505.24298, section 5.2) clips current / proximal and weighs each
sample by proximal / sampler. Exact weights leave the gradient unbiased and their variance grows with every version and every token;
`correct` trades a little bias for much less of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, assert_never, cast

import torch

from offbeat_engine import Field, LossOutput, LossScale, register_field
from offbeat_trainer.config import Aggregation, Correction, CorrectionLevel, KlEstimator, Proximal
from offbeat_trainer.errors import PlanRefused, TrainerError

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
    masked: torch.Tensor | None = None

    def fractions(self) -> dict[str, torch.Tensor]:
        """Return where which bound cut, by the name of its metric."""
        cuts = {f"clip_{name}": getattr(self, f"clipped_{name}") for name in ("low", "high", "dual")}
        cuts["masked"] = self.masked
        return {f"policy/{name}_fraction": cut_BT for name, cut_BT in cuts.items() if cut_BT is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What a surrogate may know beside ratio and advantage, all [B, T]; log-probs in nats, zero outside `mask`.

    `logprobs` has the gradient. `old_logprobs` are those of the policy that the ratio is taken against. `chosen` are the
    tokens (bool) that the algorithm chose over the whole batch; see `GroupPolicyGradient.choose`.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    mask: torch.Tensor
    chosen: torch.Tensor | None = None


CHOSEN = register_field(
    Field(key="policy/chosen", dims="BT", dtype=torch.bool, meaning="tokens that a loss treats apart")
)


class SurrogateFn(Protocol):
    """What is minimised, of each token; see `Grpo.surrogate`. It travels to the ranks."""

    def __call__(self, ratio: torch.Tensor, advantages: torch.Tensor, tokens: Tokens) -> Surrogate:
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


def clip(
    ratio: torch.Tensor, advantages: torch.Tensor, tokens: Tokens, config: PolicyLossConfig
) -> Surrogate:
    """Return `clipped_surrogate` by the settings."""
    del tokens
    return clipped_surrogate(ratio, advantages, config.clip_low, config.clip_high, config.dual_clip)


def policy_loss_bounds(config: PolicyLossConfig) -> Iterator[tuple[str, str]]:
    """Yield the name of each setting that is out of its bounds, and what was expected and came."""
    low, high, dual = config.clip_low, config.clip_high, config.dual_clip
    for name, value, ok, wanted in (
        ("clip_low", low, 0 <= low <= 1, "in 0..1 (1: no bound below)"),
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
        """Return the effective sample size where its parts are in the whole sums of a step; see `Role.train`."""
        if RATIO_MEAN not in sums:
            return {}
        return {ESS: ess_fraction(sums[RATIO_MEAN], sums[RATIO_SQUARE_MEAN])}

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
        old_BT = inside(old_BT, mask_BT)
        ratio_BT = importance_ratio(logprobs_BT, old_BT)
        chosen_BT = _optional(batch, CHOSEN.key)
        tokens = Tokens(logprobs=logprobs_BT, old_logprobs=old_BT, mask=mask_BT, chosen=chosen_BT)
        formula = self.surrogate or partial(clip, config=config)
        surrogate = formula(ratio_BT, self._advantages(batch), tokens)
        token_loss_BT, sums = surrogate.loss, surrogate.fractions()
        # KL(old || policy), sampled from old: the roles of k3's two policies are swapped.
        sums["policy/approx_kl_nats"] = k3(logprobs_BT - old_BT)
        maxes = {"policy/ratio_max": ratio_BT}
        weight_BT = torch.ones_like(trainer_BT)
        if sampler_BT is not None:
            weight_BT = self._weigh(trainer_BT, sampler_BT, mask_BT, sums, maxes)
            token_loss_BT = token_loss_BT * weight_BT
        kl_BT = self._kl(predictions, batch, logprobs_BT)
        if kl_BT is not None:
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

    def _kl(
        self, predictions: Predictions, batch: TrainBatch, logprobs_BT: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the KL to the reference [B, T]; None where there is none."""
        ref_BTK = _optional(batch, "reference/top")
        if ref_BTK is None:
            ref_BT = self._reference(batch)
            return None if ref_BT is None else kl_estimate(self.config.kl_estimator, logprobs_BT, ref_BT)
        policy_BTK = predictions["top_logprobs"]
        return (policy_BTK.exp() * (policy_BTK - ref_BTK)).sum(-1)

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


RATIO_MEAN = "offpolicy/ratio_mean"
RATIO_SQUARE_MEAN = "offpolicy/ratio_square_mean"
ESS = "offpolicy/ess_fraction"
MAX_LOG_RATIO = 20.0
"""Beyond exp(20) a ratio says only "far away"; capping there keeps float32 sums finite."""


def inside(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return `values_BT` under `mask_BT` and zero elsewhere, in value and in gradient.

    A product with the mask would turn infinity outside it into NaN.
    """
    return torch.where(mask_BT, values_BT, torch.zeros_like(values_BT))


def peak(values_BT: torch.Tensor) -> torch.Tensor:
    """Return the maximum; zero, the least a ratio or a distance can be, where there is nothing."""
    return values_BT.max() if values_BT.numel() else values_BT.new_zeros(())


def k1(log_ratio: torch.Tensor) -> torch.Tensor:
    """Unbiased, of high variance, of either sign."""
    return -log_ratio


def k2(log_ratio: torch.Tensor) -> torch.Tensor:
    """Non-negative, slightly biased, of low variance."""
    return log_ratio.square() / 2


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """Non-negative, unbiased, of low variance; `log_ratio` is capped at `MAX_LOG_RATIO`."""
    capped = log_ratio.clamp(max=MAX_LOG_RATIO)
    return torch.expm1(capped) - capped  # expm1: exp(x) - 1 - x loses every digit near 0


def kl_estimate(kind: KlEstimator, logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return the estimate of KL(policy || reference) per token in nats, any shape."""
    log_ratio = ref_logprobs - logprobs
    match kind:
        case KlEstimator.K1:
            return k1(log_ratio)
        case KlEstimator.K2:
            return k2(log_ratio)
        case KlEstimator.K3 | KlEstimator.UNBIASED:  # whose weight is known to the loss
            return k3(log_ratio)
        case KlEstimator.ABS:
            return log_ratio.abs()
        case KlEstimator.FULL:
            raise TrainerError("KL of whole distributions is no estimate from one token; see `PolicyLoss`")
        case KlEstimator.K3_PLUS:
            return k3(log_ratio).detach() + k2(log_ratio) - k2(log_ratio).detach()
        case _:
            assert_never(kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights per token, and where which bound changed them (bool). `ratio` is the weight before any bound."""

    weight: torch.Tensor
    ratio: torch.Tensor
    truncated: torch.Tensor
    masked: torch.Tensor


def importance_ratios(
    level: CorrectionLevel, proximal_BT: torch.Tensor, sampler_BT: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """Return the ratio proximal / sampler [B, T] at `level`, 1 outside the mask; logs are capped to +-20.

    - token: each token's own. Ignores that earlier tokens were off-policy, too (biased, of low variance).
    - sequence: the product over the completion (unbiased, of a variance that grows exponentially with its length).
    - geometric: its T-th root, the length-normalised ratio of GSPO (arXiv 2507.18071, equation 7): how far the
      completion as a whole is off per token.
    """
    log_ratio_BT = inside(proximal_BT - sampler_BT, mask_BT)
    match level:
        case CorrectionLevel.TOKEN:
            log_BT = log_ratio_BT
        case CorrectionLevel.SEQUENCE:
            log_BT = log_ratio_BT.sum(-1, keepdim=True).expand_as(log_ratio_BT)
        case CorrectionLevel.GEOMETRIC:
            length_B1 = mask_BT.sum(-1, keepdim=True).clamp(min=1)
            log_BT = (log_ratio_BT.sum(-1, keepdim=True) / length_B1).expand_as(log_ratio_BT)
        case _:
            assert_never(level)
    return inside(log_BT, mask_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def truncate(ratio: torch.Tensor, high: float) -> Weights:
    """Return min(ratio, high): truncated importance sampling (Ionides, J. Comp. Graph. Stat. 17, 2008, section 2).

    For language models as TIS (Yao et al., "Your efficient RL framework secretly brings you off-policy RL training",
    2025). Every token keeps a voice; those the sampler found too unlikely are heard less than they should be.
    """
    return Weights(
        weight=ratio.clamp(max=high),
        ratio=ratio,
        truncated=ratio > high,
        masked=torch.zeros_like(ratio, dtype=torch.bool),
    )


def mask_above(ratio: torch.Tensor, high: float) -> Weights:
    """Return the ratio where it is at most `high`, else 0: masked importance sampling.

    (Liu et al., "When speed kills stability: demystifying RL collapse from the training-inference mismatch", 2025.)
    What the sampler would hardly have made is taken for an error, not for a rare chance.
    """
    return mask_outside(ratio, -torch.inf, high)


def mask_outside(ratio: torch.Tensor, low: float, high: float) -> Weights:
    """Return the ratio where it lies in low .. high, else 0 (IcePop; Ring-1T, arXiv 2510.18855, section on IcePop).

    The lower bound also leaves out tokens that the trainer would hardly make: their weight is small, but what they are
    there for is the mismatch of two engines.
    """
    masked = (ratio < low) | (ratio > high)
    return Weights(
        weight=ratio.masked_fill(masked, 0.0), ratio=ratio, truncated=torch.zeros_like(masked), masked=masked
    )


def correct(kind: Correction, ratio: torch.Tensor, low: float, high: float) -> Weights:
    """Return the weights that `kind` makes of `ratio`, any shape."""
    match kind:
        case Correction.NONE:
            no = torch.zeros_like(ratio, dtype=torch.bool)
            return Weights(weight=torch.ones_like(ratio), ratio=ratio, truncated=no, masked=no)
        case Correction.TRUNCATE:
            return truncate(ratio, high)
        case Correction.MASK:
            return mask_above(ratio, high)
        case Correction.ICEPOP:
            return mask_outside(ratio, low, high)
        case _:
            assert_never(kind)


def ess_fraction(ratio_mean: float, ratio_square_mean: float) -> float:
    """Return the effective sample size per sample, (mean r)^2 / mean r^2 (Kish, "Survey sampling", 1965, section 11.7).

    1: as good as fresh samples; 0.5: half of them are wasted. Means can be joined over micro-batches and ranks, this
    cannot: it is computed once the means are whole.
    """
    return ratio_mean**2 / ratio_square_mean if ratio_square_mean > 0 else float("nan")
