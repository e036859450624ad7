"""PPO with a critic (arXiv 1707.06347): advantages per token from values that are learned beside the policy.

B = completions, C = places of the longest one, T = tokens of a sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn.utils.rnn import pad_sequence

from offbeat_engine import Field, Refusal, register_field
from offbeat_trainer.algorithms.grpo import REFERENCE, check_scores
from offbeat_trainer.algorithms.interface import Algorithm
from offbeat_trainer.algorithms.policy_loss import PolicyLoss, policy_loss_bounds
from offbeat_trainer.algorithms.value_loss import ValueLoss, gae
from offbeat_trainer.config import AlgorithmConfig, PpoConfig, Proximal
from offbeat_trainer.roles.critic import Critic
from offbeat_trainer.roles.role import POLICY, RoleSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat_engine import TrainBatch
    from offbeat_trainer.data.types import Group
    from offbeat_trainer.metrics import Metric
    from offbeat_trainer.roles.role import Role

CRITIC = "critic"
REWARDS = register_field(Field(key="ppo/rewards", dims="BT", meaning="what each token was rewarded with"))


class Ppo(Algorithm[PpoConfig]):
    """A policy and a critic, both trained, and a reference where the loss has a KL term.

    A step: the critic's values of the whole batch, GAE on every rank, then the critic's updates and the policy's. The last token of
    a turn has the turn's reward, the last of all what no turn earned.
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
        judge = {REFERENCE: RoleSpec(trained=False)} if config.kl_coef else {}
        return {POLICY: RoleSpec(trained=True), CRITIC: critic, **judge}

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
        if REFERENCE in roles:
            roles[REFERENCE].judge(shares, "ref_logprobs")
        if len(shares) > 1 and config.proximal is Proximal.RECOMPUTE:
            policy.judge(shares, "old_logprobs")
        loss_fn = PolicyLoss(config=config, max_completion_tokens=self.step.max_completion_tokens)
        return [*metrics, *policy.train(shares, loss_fn)]

    def check(self) -> list[Refusal]:
        """See `Algorithm.check`."""
        remedy = "leave the setting out for its default"
        bounds = policy_loss_bounds(self.config)
        return [Refusal(f"algorithm.{name}", f"must be {told}", remedy) for name, told in bounds]


def whitened(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return `values_BT` of the tokens under `mask_BT` at mean 0 and variance 1 over the batch, zero elsewhere."""
    values_N = values_BT[mask_BT].double()
    centred_N = values_N - values_N.mean()
    scaled_N = centred_N / (centred_N.square().mean() + 1e-8).sqrt()
    return torch.zeros_like(values_BT).masked_scatter(mask_BT, scaled_N.to(values_BT.dtype))
