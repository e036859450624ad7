"""GRPO and its kin: rewards are compared within the completions of one prompt, and a clipped surrogate is followed."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from offbeat_engine import Refusal
from offbeat_trainer.algorithms.advantages import compute_advantages, group_advantages
from offbeat_trainer.algorithms.interface import Algorithm, C_co
from offbeat_trainer.algorithms.policy_loss import PolicyLoss
from offbeat_trainer.config import (
    AlgorithmConfig,
    DrGrpoConfig,
    GrpoConfig,
    Proximal,
    RlooConfig,
    policy_loss_bounds,
)
from offbeat_trainer.roles.role import POLICY, RoleSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from offbeat_engine import LossFn, TrainBatch
    from offbeat_trainer.data.types import Group
    from offbeat_trainer.metrics import Metric
    from offbeat_trainer.roles.role import Role

REFERENCE = "reference"


class GroupPolicyGradient(Algorithm[C_co]):
    """One policy, trained by a loss of its own on advantages of groups: what is left to say are these two.

    `held_to_reference`: the loss is given `ref_logprobs`, of the model that the run starts from. `needs_old_logprobs`: with
    several updates a step it is given `old_logprobs`, the policy's own from before the first; with one, the policy that is
    updated is the one that a ratio is taken against, and no forward pass is made for it.
    """

    @property
    def held_to_reference(self) -> bool:
        """Whether there is a reference model."""
        return False

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether several updates of one batch need the policy's log-probs from before the first."""
        return True

    @abstractmethod
    def advantages(self, rewards_NG: torch.Tensor) -> torch.Tensor:
        """Return the advantages [N, G] float64 of `rewards_NG` float64, each row the completions of one prompt."""

    @abstractmethod
    def loss_fn(self) -> LossFn:
        """Return the loss; the batch has `advantages`, and what the sampler and the judges said."""

    def roles(self) -> Mapping[str, RoleSpec]:
        """See `Algorithm.roles`."""
        judge = {REFERENCE: RoleSpec(trained=False)} if self.held_to_reference else {}
        return {POLICY: RoleSpec(trained=True), **judge}

    def targets(self, groups: Sequence[Group]) -> Mapping[str, torch.Tensor]:
        """See `Algorithm.targets`."""
        return {"advantages": group_advantages(groups, self.advantages)}

    def learn(self, roles: Mapping[str, Role], batch: TrainBatch) -> list[Metric]:
        """See `Algorithm.learn`; each of `updates_per_step` runs of groups' neighbours is one optimizer step."""
        policy = roles[POLICY]
        shares = policy.shares(batch, self.step.updates_per_step)
        if REFERENCE in roles:
            roles[REFERENCE].judge(shares, "ref_logprobs")
        if len(shares) > 1 and self.needs_old_logprobs:
            policy.judge(shares, "old_logprobs")
        return policy.train(shares, self.loss_fn())

    def check(self) -> list[Refusal]:
        """See `Algorithm.check`."""
        if self.step.group_size >= 2:
            return []
        reason = f"{self.step.group_size}; {type(self).__name__} compares completions of one prompt"
        return [Refusal("trainer.group_size", reason, "use 2 or more")]


class Grpo(GroupPolicyGradient[GrpoConfig]):
    """GRPO (arXiv 2402.03300); `algorithms.advantages` and `algorithms.policy_loss` have the formulas and their sources."""

    Config: ClassVar[type[AlgorithmConfig]] = GrpoConfig

    @property
    def held_to_reference(self) -> bool:
        """Whether there is a KL term in the loss."""
        return self.config.kl_coef != 0

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the proximal policy is the trainer's own; see `Proximal`."""
        return self.config.proximal is Proximal.RECOMPUTE

    def advantages(self, rewards_NG: torch.Tensor) -> torch.Tensor:
        """Return them by `config.advantage`."""
        return compute_advantages(self.config.advantage, rewards_NG)

    def loss_fn(self) -> PolicyLoss:
        """Return the clipped surrogate."""
        return PolicyLoss(config=self.config, max_completion_tokens=self.step.max_completion_tokens)

    def check(self) -> list[Refusal]:
        """See `Algorithm.check`."""
        bounds = policy_loss_bounds(self.config)
        remedy = "leave the setting out for its default"
        return [
            *super().check(),
            *(Refusal(f"algorithm.{name}", f"must be {told}", remedy) for name, told in bounds),
        ]


class DrGrpo(Grpo):
    """Dr. GRPO (arXiv 2503.20783): GRPO with other defaults."""

    Config: ClassVar[type[AlgorithmConfig]] = DrGrpoConfig


class Rloo(Grpo):
    """RLOO (arXiv 2402.14740): GRPO with other defaults."""

    Config: ClassVar[type[AlgorithmConfig]] = RlooConfig
