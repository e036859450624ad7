"""PPO with a critic (arXiv 1707.06347): advantages per token from values that are learned beside the policy.

B = completions, C = places of the longest one, T = tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn.utils.rnn import pad_sequence

from offbeat_engine import Field, LossOutput, LossScale, Refusal, register_field
from offbeat_trainer.algorithms.advantages import check_scores, whiten
from offbeat_trainer.algorithms.grpo import REFERENCE
from offbeat_trainer.algorithms.interface import Algorithm
from offbeat_trainer.algorithms.policy_loss import PolicyLoss, inside, policy_loss_bounds
from offbeat_trainer.algorithms.roles import POLICY, Critic, RoleSpec, whole_kl
from offbeat_trainer.config import AlgorithmConfig, PpoConfig, Proximal
from offbeat_trainer.errors import PlanRefused, TrainerError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat_engine import Predictions, TrainBatch
    from offbeat_trainer.algorithms.roles import Role
    from offbeat_trainer.data.metrics import Metric
    from offbeat_trainer.data.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """Half the squared error of the values, clipped around the old ones, as an `offbeat_engine.LossFn`.

    Per token 1/2 max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2), averaged over the step's tokens: the
    value side of PPO as in its authors' code (github.com/openai/baselines, ppo2). `clip` 0 leaves the plain error. The
    batch holds `returns` and, with a clip, `values` taken before the update.

    `sums` are shares of means over the step's tokens; `value/return_square` and the two beside it are what
    a critic's explained variance is computed from.

    Raises:
        PlanRefused: `clip` is negative (when made).
        TrainerError: the batch lacks what the loss needs, or the engine has no value head (when called).
    """

    clip: float = 0.2

    def __post_init__(self) -> None:
        if not self.clip >= 0:
            raise PlanRefused(f"`clip` of a value loss must be >= 0 (0 = off), got {self.clip}")

    def __call__(self, predictions: Predictions, batch: TrainBatch, scale: LossScale) -> LossOutput:
        """Return this micro-batch's share of the loss."""
        if "values" not in predictions:
            raise TrainerError('a value loss needs an engine whose model has `head: "value"`')
        mask_BT = batch["loss_mask"]
        values_BT = inside(predictions["values"], mask_BT)
        returns_BT = inside(_wanted(batch, "returns"), mask_BT)
        error_BT = (values_BT - returns_BT).square()
        clipped_BT = torch.zeros_like(mask_BT)
        worst_BT = error_BT
        if self.clip:
            old_BT = inside(_wanted(batch, "values"), mask_BT)
            near_BT = old_BT + (values_BT - old_BT).clamp(-self.clip, self.clip)
            near_error_BT = (near_BT - returns_BT).square()
            # Where nothing was clamped, `near_BT` differs from the value by the rounding of a sum.
            clipped_BT = (near_error_BT > error_BT) & ((values_BT - old_BT).abs() > self.clip)
            worst_BT = torch.maximum(error_BT, near_error_BT)
        num_tokens = max(scale.num_tokens, 1)
        sums = {
            "value/mean": values_BT,
            "value/clip_fraction": clipped_BT,
            "value/error_square": error_BT,
            "value/return_mean": returns_BT,
            "value/return_square": returns_BT.square(),
        }
        return LossOutput(
            loss=0.5 * inside(worst_BT, mask_BT).sum() / num_tokens,
            sums={
                key: inside(value.detach().float(), mask_BT).sum() / num_tokens for key, value in sums.items()
            },
        )


def gae(
    rewards_BT: torch.Tensor, values_BT: torch.Tensor, mask_BT: torch.Tensor, *, discount: float, trace: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns [B, T] float32 by GAE (arXiv 1506.02438, equation 16), zero outside the mask.

    delta_t = r_t + discount * V_{t+1} - V_t and A_t = delta_t + discount * trace * A_{t+1}, over the masked tokens of
    each row in order: a token outside the mask (a tool's answer, say) is passed over. After the last, V = A = 0.

    Args:
        rewards_BT: reward of each token; that of a whole completion belongs to its last one.
        values_BT: value of the state before each token, as `predictions["values"]`.
        mask_BT: bool, tokens the policy chose.
        discount: gamma, in 0..1.
        trace: lambda, in 0..1: 0 trusts the values, 1 the rewards.

    Raises:
        PlanRefused: `discount` or `trace` is outside 0..1.
    """
    for name, value in (("discount", discount), ("trace", trace)):
        if not 0 <= value <= 1:
            raise PlanRefused(f"`{name}` of GAE must be in 0..1, got {value}")
    rewards, values = inside(rewards_BT, mask_BT).double(), inside(values_BT, mask_BT).double()
    advantages_BT = torch.zeros_like(rewards)
    next_value_B = rewards.new_zeros(rewards.shape[0])
    next_advantage_B = rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        here_B = mask_BT[:, t]
        delta_B = rewards[:, t] + discount * next_value_B - values[:, t]
        advantage_B = delta_B + discount * trace * next_advantage_B
        advantages_BT[:, t] = torch.where(here_B, advantage_B, 0.0)
        next_value_B = torch.where(here_B, values[:, t], next_value_B)
        next_advantage_B = torch.where(here_B, advantage_B, next_advantage_B)
    returns_BT = inside(advantages_BT + values, mask_BT)
    return advantages_BT.float(), returns_BT.float()


def _wanted(batch: TrainBatch, key: str) -> torch.Tensor:
    if key not in batch:
        raise TrainerError(
            f"a value loss needs `{key}` in the batch; compute it with `gae` before the update"
        )
    return batch[key]


CRITIC = "critic"
REWARDS = register_field(Field(key="ppo/rewards", dims="BT", meaning="what each token was rewarded with"))


class Ppo(Algorithm[PpoConfig]):
    """PPO (arXiv 1707.06347): a policy and a critic that is learned beside it and says what each token is worth.

    delta_t = r_t + discount V_{t+1} - V_t and A_t = delta_t + discount trace A_{t+1} (GAE, arXiv 1506.02438), brought to mean 0 and
    variance 1 over the batch's tokens with `whiten`; V is the critic's value before a token, r_t its reward: the last token of a turn
    has the turn's, the last of all what no turn earned. The loss of a token is that of `grpo` with this A and rho = pi / pi_old; the
    critic's is half the squared error of V against A_t + V_t of before the update, clipped by `value_clip`.

    Use it when one completion of a prompt must do, or when tokens of long trajectories should have advantages of their own. Do not
    use it when memory is short, or when groups of completions are cheap: a second model is trained and must be good first.
    """

    Config: ClassVar[type[AlgorithmConfig]] = PpoConfig

    def roles(self) -> Mapping[str, RoleSpec]:
        """See `Algorithm.roles`."""
        config = self.config
        critic = RoleSpec(
            trained=True,
            head="value",
            path=config.critic_path,
            engine=config.critic_engine,
            lr=config.critic_lr,
        )
        names = whole_kl(config)
        judge = {REFERENCE: RoleSpec(trained=False, names_tokens=names)} if config.kl_coef else {}
        return {POLICY: RoleSpec(trained=True, names_tokens=names), CRITIC: critic, **judge}

    def targets(self, groups: Sequence[Group]) -> Mapping[str, torch.Tensor]:
        """See `Algorithm.targets`. An empty completion has no token that could be rewarded."""
        for group in groups:
            check_scores(group)
        rows = [
            torch.from_numpy(trajectory.rewards(score.reward))
            for group in groups
            for trajectory, score in zip(group.trajectories, group.scores, strict=True)
        ]
        return {REWARDS.key: pad_sequence(rows, batch_first=True) if rows else torch.zeros(0, 0)}

    def learn(self, roles: Mapping[str, Role], batch: TrainBatch) -> list[Metric]:
        """See `Algorithm.learn`; each of `updates_per_step` mini-batches is one optimizer step of critic and policy."""
        config, policy, num_updates = self.config, roles[POLICY], self.step.updates_per_step
        critic = Critic(roles[CRITIC].engine, ValueLoss(clip=config.value_clip), updates_per_step=num_updates)
        mask_BT, batch = batch["loss_mask"], batch.copy()
        batch["values"] = critic.values(batch)
        advantages_BT, batch["returns"] = gae(
            batch[REWARDS.key], batch["values"], mask_BT, discount=config.discount, trace=config.trace
        )
        batch["advantages"] = whitened(advantages_BT, mask_BT) if config.whiten else advantages_BT
        metrics = critic.update(batch)
        if policy.step < config.critic_warmup_steps:
            return metrics
        shares = policy.shares(batch, num_updates)
        if len(shares) > 1 and config.proximal is Proximal.RECOMPUTE:
            policy.judge(shares, "old_logprobs")
        if REFERENCE in roles:
            roles[REFERENCE].judge_for_kl(shares, config)
        loss_fn = PolicyLoss(config=config, max_completion_tokens=self.step.max_completion_tokens)
        return [*metrics, *policy.train(shares, loss_fn)]

    def check(self) -> list[Refusal]:
        """See `Algorithm.check`."""
        remedy = "leave the setting out for its default"
        bounds = policy_loss_bounds(self.config)
        return [Refusal(f"algorithm.{name}", f"must be {told}", remedy) for name, told in bounds]


def whitened(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return `values_BT` of the N tokens under `mask_BT` at mean 0 and variance 1 (over N - 1), zero elsewhere."""
    return whiten(values_BT.flatten(), mask_BT.flatten()).view_as(values_BT).to(values_BT.dtype)
