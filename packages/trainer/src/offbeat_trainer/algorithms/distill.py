"""On-policy distillation: a policy is told by a teacher, token by token, what its own completions are worth.

GKD (arXiv 2306.13649) on the policy's own samples with reverse KL; as a policy gradient with the reward log teacher - log policy of
each token by itself (Lu and Thinking Machines Lab, "On-policy distillation", 2025): E[grad log pi (log pi - log teacher)] is the
gradient of KL(policy || teacher) at each token, given those before it. What a token does to later ones is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from offbeat_engine import Field, LossOutput, Refusal, register_field
from offbeat_trainer.algorithms.grpo import REFERENCE
from offbeat_trainer.algorithms.interface import Algorithm
from offbeat_trainer.algorithms.policy_loss import PolicyLoss, inside, policy_loss_bounds
from offbeat_trainer.algorithms.roles import POLICY, RoleSpec
from offbeat_trainer.config import AlgorithmConfig, DistillConfig, Proximal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from offbeat_engine import LossScale, Predictions, TrainBatch
    from offbeat_trainer.algorithms.roles import Role
    from offbeat_trainer.data.metrics import Metric
    from offbeat_trainer.data.types import Group

TEACHER = "teacher"
TAUGHT = register_field(
    Field(key="distill/teacher_logprobs", dims="BT", meaning="log-probabilities under the teacher")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillLoss:
    """`PolicyLoss` with the advantage log teacher - log policy of each token, from before the step: its negative is reverse KL.

    The policy's own log-probs of before the step are `old_logprobs`, or, where the batch has none, the current ones.
    """

    config: DistillConfig
    max_completion_tokens: int

    @property
    def entropy_gradient(self) -> bool:
        """As `PolicyLoss`."""
        return self._policy_loss.entropy_gradient

    @property
    def _policy_loss(self) -> PolicyLoss:
        return PolicyLoss(config=self.config, max_completion_tokens=self.max_completion_tokens)

    def derived(self, sums: Mapping[str, float]) -> dict[str, float]:
        """As `PolicyLoss`."""
        return PolicyLoss.derived(sums)

    def __call__(self, predictions: Predictions, batch: TrainBatch, scale: LossScale) -> LossOutput:
        """Return this micro-batch's share of the loss; `distill/reverse_kl_nats` is what it brings down."""
        before_BT = batch["old_logprobs"] if "old_logprobs" in batch else predictions["logprobs"].detach()
        gain_BT = inside(batch[TAUGHT.key] - before_BT, batch["loss_mask"])
        limit = self.config.gain_clip
        batch = batch.copy()
        batch["advantages"] = gain_BT.clamp(-limit, limit) if limit else gain_BT
        found = self._policy_loss(predictions, batch, scale)
        reverse_kl = -gain_BT.sum() / max(scale.num_tokens, 1)
        return LossOutput(
            loss=found.loss, sums={**found.sums, "distill/reverse_kl_nats": reverse_kl}, maxes=found.maxes
        )


class Distill(Algorithm[DistillConfig]):
    """A policy, a teacher that is not trained, and a reference where the loss has a KL term. Rewards are looked at, not learned from."""

    Config: ClassVar[type[AlgorithmConfig]] = DistillConfig

    def roles(self) -> Mapping[str, RoleSpec]:
        """See `Algorithm.roles`."""
        judge = {REFERENCE: RoleSpec(trained=False)} if self.config.kl_coef else {}
        teacher = RoleSpec(trained=False, path=self.config.teacher_path)
        return {POLICY: RoleSpec(trained=True), TEACHER: teacher, **judge}

    def targets(self, groups: Sequence[Group]) -> Mapping[str, torch.Tensor]:
        """Return nothing: what a token is worth is known where the models are."""
        del groups
        return {}

    def learn(self, roles: Mapping[str, Role], batch: TrainBatch) -> list[Metric]:
        """See `Algorithm.learn`; each of `updates_per_step` mini-batches is one optimizer step."""
        policy = roles[POLICY]
        shares = policy.shares(batch, self.step.updates_per_step)
        roles[TEACHER].judge(shares, TAUGHT.key)
        if REFERENCE in roles:
            roles[REFERENCE].judge(shares, "ref_logprobs")
        if len(shares) > 1:
            policy.judge(shares, "old_logprobs")
        loss_fn = DistillLoss(config=self.config, max_completion_tokens=self.step.max_completion_tokens)
        return policy.train(shares, loss_fn)

    def check(self) -> list[Refusal]:
        """See `Algorithm.check`."""
        remedy = "leave the setting out for its default"
        bounds = policy_loss_bounds(self.config)
        refused = [Refusal(f"algorithm.{name}", f"must be {told}", remedy) for name, told in bounds]
        if not self.config.teacher_path:
            refused.append(
                Refusal("algorithm.teacher_path", "not given", "name the Hugging Face folder of the teacher")
            )
        if self.config.proximal is Proximal.ROLLOUT:
            why = "the teacher is compared with the trainer's own log-probs"
            refused.append(Refusal("algorithm.proximal", why, "algorithm.proximal=recompute"))
        return refused
