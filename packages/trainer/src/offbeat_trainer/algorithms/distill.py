"""On-policy distillation: a policy is told by a teacher, token by token, what its own completions are worth.

GKD (arXiv 2306.13649) on the policy's own samples with reverse KL; as a policy gradient with the reward log teacher - log policy of
each token by itself (Lu and Thinking Machines Lab, "On-policy distillation", 2025): E[grad log pi (log pi - log teacher)] is the
gradient of KL(policy || teacher) at each token, given those before it. What a token does to later ones is left out.

Or by divergences of whole distributions at the places that the policy sampled: of the teacher's K likeliest tokens and the rest.

B = sequences, T = tokens of the longest one, K = likeliest tokens, X = K + 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from offbeat_engine import Field, LossOutput, Refusal, register_field
from offbeat_trainer.algorithms.grpo import REFERENCE
from offbeat_trainer.algorithms.interface import Algorithm
from offbeat_trainer.algorithms.policy_loss import PolicyLoss, inside, policy_loss_bounds
from offbeat_trainer.algorithms.roles import POLICY, RoleSpec, whole_kl
from offbeat_trainer.config import AlgorithmConfig, DistillConfig, Divergence, Proximal
from offbeat_trainer.errors import TrainerError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat_engine import LossScale, Predictions, TrainBatch
    from offbeat_trainer.algorithms.roles import Role
    from offbeat_trainer.data.metrics import Metric
    from offbeat_trainer.data.types import Group

TEACHER = "teacher"
TAUGHT = register_field(
    Field(key="distill/teacher_logprobs", dims="BT", meaning="log-probabilities under the teacher")
)
WHOSE = register_field(
    Field(key="distill/teacher", dims="B", dtype=torch.int64, meaning="number of the teacher of a sequence")
)
TOP = register_field(
    Field(key="distill/teacher_top", dims="BTK", meaning="log-probabilities of `top_ids` under the teacher")
)


class DistillLoss(PolicyLoss):
    """`PolicyLoss` with the advantage log teacher - log policy of each token, from before the step: its negative is reverse KL.

    The policy's own log-probs of before the step are `old_logprobs`, or, where the batch has none, the current ones.
    """

    config: DistillConfig

    def __call__(self, predictions: Predictions, batch: TrainBatch, scale: LossScale) -> LossOutput:
        """Return this micro-batch's share of the loss; `distill/reverse_kl_nats` is what it brings down."""
        before_BT = batch["old_logprobs"] if "old_logprobs" in batch else predictions["logprobs"].detach()
        gain_BT = inside(batch[TAUGHT.key] - before_BT, batch["loss_mask"])
        limit = self.config.gain_clip
        batch = batch.copy()
        batch["advantages"] = gain_BT.clamp(-limit, limit) if limit else gain_BT
        found = super().__call__(predictions, batch, scale)
        reverse_kl = -gain_BT.sum() / max(scale.num_tokens, 1)
        return LossOutput(
            loss=found.loss, sums={**found.sums, "distill/reverse_kl_nats": reverse_kl}, maxes=found.maxes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceLoss:
    """A divergence of policy and teacher over the batch's `top_ids` and the rest as one bucket, a mean over tokens.

    The chain rule of KL makes it a lower bound of the divergence over the whole vocabulary, tight where the rest is rare or K is V.
    """

    divergence: Divergence
    beta: float

    def __call__(self, predictions: Predictions, batch: TrainBatch, scale: LossScale) -> LossOutput:
        """Return this micro-batch's share of the loss; it is `distill/divergence_nats` as well."""
        policy_BTX = with_rest(predictions["top_logprobs"])
        found_BT = divergence(self.divergence, policy_BTX, with_rest(batch[TOP.key]), self.beta)
        loss = inside(found_BT, batch["loss_mask"]).sum() / max(scale.num_tokens, 1)
        entropy = predictions["entropy"].detach().sum() / max(scale.num_tokens, 1)
        return LossOutput(
            loss=loss, sums={"distill/divergence_nats": loss.detach(), "policy/entropy_nats": entropy}
        )


def asked_of(share: TrainBatch, teacher: int) -> TrainBatch:
    """Return `share` with the tokens alone to be judged that `teacher` teaches: all, where there is one."""
    share = share.copy()
    if WHOSE.key in share:
        share["loss_mask"] = share["loss_mask"] & (share[WHOSE.key] == teacher)[:, None]
    return share


def with_rest(logprobs_BTK: torch.Tensor) -> torch.Tensor:
    """Return [B, T, K + 1]: the log-probability of all other tokens comes last, of at least 1e-6, where float32 sums end."""
    rest_BT1 = (1 - logprobs_BTK.exp().sum(-1, keepdim=True)).clamp(min=1e-6)
    return torch.cat((logprobs_BTK, rest_BT1.log()), -1)


def divergence(
    kind: Divergence, policy_BTX: torch.Tensor, teacher_BTX: torch.Tensor, beta: float
) -> torch.Tensor:
    """Return the divergence [B, T] of log-probabilities S of the policy and T of the teacher.

    forward KL(T || S), reverse KL(S || T), or, with M = b T + (1 - b) S, b KL(T || M) + (1 - b) KL(S || M), the generalised
    Jensen-Shannon divergence (GKD, arXiv 2306.13649, equation 1).
    """

    def kl(p_BTX: torch.Tensor, q_BTX: torch.Tensor) -> torch.Tensor:
        return (p_BTX.exp() * (p_BTX - q_BTX)).sum(-1)

    match kind:
        case Divergence.FORWARD_KL:
            return kl(teacher_BTX, policy_BTX)
        case Divergence.REVERSE_KL:
            return kl(policy_BTX, teacher_BTX)
        case Divergence.JSD:
            mixed_BTX = torch.logaddexp(teacher_BTX + math.log(beta), policy_BTX + math.log1p(-beta))
            return beta * kl(teacher_BTX, mixed_BTX) + (1 - beta) * kl(policy_BTX, mixed_BTX)
        case Divergence.SAMPLED:
            raise TrainerError("a divergence of sampled tokens is `DistillLoss`")


class Distill(Algorithm[DistillConfig]):
    """On-policy distillation (GKD, arXiv 2306.13649): a policy learns from a teacher what its own completions should have been.

    divergence "sampled": a policy gradient with the advantage log T(y_t) - log S(y_t) of each sampled token y_t, whose mean is the
    gradient of KL(S || T); S is the policy and T the teacher, each given the tokens before. "forward_kl" KL(T || S), "reverse_kl"
    KL(S || T) and "jsd" b KL(T || M) + (1 - b) KL(S || M), M = b T + (1 - b) S, b = `jsd_beta`, are means over sampled places of whole
    distributions: of the teacher's `top_k` likeliest tokens and of the rest as one. What a token does to later ones is left out.
    With `teachers`, T is the one of the prompt's domain (MOPD, arXiv 2601.02780).

    Use it when a stronger model with the same tokens is at hand, and not when it has other tokens, or when a reward says more than
    the teacher knows: the teacher is the ceiling. Rewards are looked at, not learned from.
    """

    Config: ClassVar[type[AlgorithmConfig]] = DistillConfig

    @property
    def _sampled(self) -> bool:
        return self.config.divergence is Divergence.SAMPLED

    def roles(self) -> Mapping[str, RoleSpec]:
        """See `Algorithm.roles`; a reference only where the policy loss has a KL term."""
        whole = whole_kl(self.config) and self._sampled
        reference = RoleSpec(trained=False, names_tokens=whole)
        judge = {REFERENCE: reference} if self.config.kl_coef and self._sampled else {}
        names = not self._sampled
        teachers = {
            name: RoleSpec(trained=False, path=path, names_tokens=names)
            for name, path in self._teachers.items()
        }
        return {POLICY: RoleSpec(trained=True, names_tokens=names or whole), **teachers, **judge}

    @property
    def _teachers(self) -> dict[str, str]:
        """The folder of each teacher's role, that of `teacher_path` first; one of several domains is held once."""
        folders = dict.fromkeys([self.config.teacher_path, *self.config.teachers.values()])
        return {f"{TEACHER}_{number}" if number else TEACHER: path for number, path in enumerate(folders)}

    def targets(self, groups: Sequence[Group]) -> Mapping[str, torch.Tensor]:
        """Return whose a sequence is, where there are several teachers: what a token is worth is known where the models are."""
        config, folders = self.config, list(self._teachers.values())
        if len(folders) == 1:
            return {}
        domains = [group.prompt.data.get("domain") for group in groups for _ in group.trajectories]
        paths = [config.teachers.get(str(domain), config.teacher_path) for domain in domains]
        return {WHOSE.key: torch.tensor([folders.index(path) for path in paths])}

    def _ask(self, roles: Mapping[str, Role], shares: list[TrainBatch]) -> None:
        """Put what its teacher says of each sequence into `shares`; a teacher reads its own sequences alone."""
        for number, name in enumerate(self._teachers):
            own = [asked_of(share, number) for share in shares]
            if self._sampled:
                roles[name].judge(own, TAUGHT.key)
            else:
                roles[name].judge_top(own, TOP.key, self.config.top_k)
            for share, answer in zip(shares, own, strict=True):
                for key in (one for one in (TAUGHT.key, TOP.key, "top_ids") if one in answer):
                    before = share[key] if number else torch.zeros_like(answer[key])
                    mine = answer["loss_mask"].view(*answer["loss_mask"].shape, *[1] * (before.ndim - 2))
                    share[key] = torch.where(mine, answer[key], before)

    def learn(self, roles: Mapping[str, Role], batch: TrainBatch) -> list[Metric]:
        """See `Algorithm.learn`; each of `updates_per_step` mini-batches is one optimizer step."""
        policy, config = roles[POLICY], self.config
        shares = policy.shares(batch, self.step.updates_per_step)
        self._ask(roles, shares)
        if not self._sampled:
            return policy.train(shares, DivergenceLoss(divergence=config.divergence, beta=config.jsd_beta))
        if len(shares) > 1:
            policy.judge(shares, "old_logprobs")
        if REFERENCE in roles:
            roles[REFERENCE].judge_for_kl(shares, config)
        return policy.train(
            shares, DistillLoss(config=config, max_completion_tokens=self.step.max_completion_tokens)
        )

    def check(self) -> list[Refusal]:
        """See `Algorithm.check`."""
        remedy = "leave the setting out for its default"
        bounds = policy_loss_bounds(self.config)
        refused = [Refusal(f"algorithm.{name}", f"must be {told}", remedy) for name, told in bounds]
        if not self.config.teacher_path:
            refused.append(
                Refusal("algorithm.teacher_path", "not given", "name the Hugging Face folder of the teacher")
            )
        if not all(self.config.teachers.values()):
            lacking = ", ".join(domain for domain, path in self.config.teachers.items() if not path)
            refused.append(
                Refusal("algorithm.teachers", f"names no folder for {lacking}", "name one for each")
            )
        if self.config.kl_coef and not self._sampled:
            why = "only the loss of sampled tokens has a KL term"
            refused.append(
                Refusal("algorithm.kl_coef", why, "algorithm.kl_coef=0, or algorithm.divergence=sampled")
            )
        if self.config.proximal is Proximal.ROLLOUT:
            why = "the teacher is compared with the trainer's own log-probs"
            refused.append(Refusal("algorithm.proximal", why, "algorithm.proximal=recompute"))
        return refused
