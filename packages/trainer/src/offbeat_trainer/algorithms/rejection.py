"""Rejection sampling: the best of a policy's own completions are what it is taught.

B = completions of a step, in the order of groups and of the completions in them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from offbeat_trainer.algorithms.advantages import check_scores
from offbeat_trainer.algorithms.interface import Algorithm
from offbeat_trainer.algorithms.roles import POLICY, RoleSpec
from offbeat_trainer.algorithms.written.sft import SupervisedLoss
from offbeat_trainer.config import AlgorithmConfig, RejectionConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat_engine import TrainBatch
    from offbeat_trainer.algorithms.roles import Role
    from offbeat_trainer.data.metrics import Metric
    from offbeat_trainer.data.types import Group


class Rejection(Algorithm[RejectionConfig]):
    """RAFT, or best-of-n (arXiv 2304.06767; with a bound on the reward ReST, 2308.08998): supervised training on a policy's best samples.

    loss = -(1/N) sum_t log pi(y_t | x, y_<t) over the N tokens of the completions kept: of each prompt x the `best_of_group`
    completions y of the largest reward (0: all), as far as their reward is at least `min_reward`. Equal rewards go by order.

    Use it when rewards are noisy or a stable baseline is wanted, and not when few completions succeed, or when failures are worth
    learning from: rejected completions teach nothing, and entropy falls fast.
    """

    Config: ClassVar[type[AlgorithmConfig]] = RejectionConfig

    def roles(self) -> Mapping[str, RoleSpec]:
        """See `Algorithm.roles`."""
        return {POLICY: RoleSpec(trained=True)}

    def keeps(self, group: Group) -> str:
        """See `Algorithm.keeps`: another prompt comes for one none of whose completions is good enough."""
        return "" if self._kept(group).any() else "rejected"

    def targets(self, groups: Sequence[Group]) -> Mapping[str, torch.Tensor]:
        """Return `loss_mask` [B]: 1 for what is kept."""
        return {"loss_mask": torch.cat([self._kept(group) for group in groups])}

    def learn(self, roles: Mapping[str, Role], batch: TrainBatch) -> list[Metric]:
        """See `Algorithm.learn`; each of `updates_per_step` mini-batches is one optimizer step."""
        policy = roles[POLICY]
        return policy.train(policy.shares(batch, self.step.updates_per_step), SupervisedLoss())

    def _kept(self, group: Group) -> torch.Tensor:
        """Return which completions [G] of `group` are kept."""
        check_scores(group)
        rewards_G = torch.tensor([score.reward for score in group.scores], dtype=torch.float64)
        rank_G = rewards_G.argsort(descending=True, stable=True).argsort()
        kept_G = rank_G < (self.config.best_of_group or len(rank_G))
        return kept_G if self.config.min_reward is None else kept_G & (rewards_G >= self.config.min_reward)
