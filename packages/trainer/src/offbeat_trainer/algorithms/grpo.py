"""GRPO and its kin: rewards are compared within the completions of one prompt, and a clipped surrogate is followed.

N = prompts, G = completions of one; B = sequences, T = tokens. What becomes of rewards stands in `algorithms.advantages`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import fields, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from offbeat_engine import Refusal
from offbeat_trainer.algorithms.advantages import (
    INDEX,
    OF_REWARDS,
    as_targets,
    by_group,
    compute_advantages,
    estimate,
    from_batch,
    group_advantages,
    samples_of,
    token_advantages,
    turn_advantages,
)
from offbeat_trainer.algorithms.advantages import grpo as grpo
from offbeat_trainer.algorithms.interface import Algorithm, C_co
from offbeat_trainer.algorithms.policy_loss import (
    CHOSEN,
    PolicyLoss,
    Surrogate,
    clip,
    inside,
    policy_loss_bounds,
)
from offbeat_trainer.algorithms.roles import POLICY, RoleSpec, whole_kl
from offbeat_trainer.config import (
    UNUSED,
    Advantage,
    AlgorithmConfig,
    DrGrpoConfig,
    GrpoConfig,
    KlIn,
    Proximal,
    RlooConfig,
)
from offbeat_trainer.data.metrics import Last, Metric

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from offbeat_engine import LossFn, TrainBatch
    from offbeat_trainer.algorithms.advantages import Samples
    from offbeat_trainer.algorithms.policy_loss import Tokens
    from offbeat_trainer.algorithms.roles import Role
    from offbeat_trainer.data.types import Group

REFERENCE = "reference"
KL_GAIN, KL_ERROR = 0.1, 0.2
"""How fast the KL coefficient follows its target, and what the relative error is cut to (arXiv 1909.08593, section 2.2)."""
LIKELIEST = 64
"""Tokens whose squared probabilities stand for those of the vocabulary: the rest adds less than 1/64 of its probability."""
ENTROPY_STEP, ENTROPY_COEF_MAX = 0.005, 1.0
"""How far the entropy coefficient moves in a step (Skywork-OR1, arXiv 2505.22312), and how far it goes, as in TRL."""


class GroupPolicyGradient(Algorithm[C_co]):
    """One policy, trained by a loss of its own on advantages of groups: what is left to say are these two.

    `chooses`: whether `choose` is asked. `held_to_reference`: the loss is given `ref_logprobs`, of the model that the run starts
    from. `needs_old_logprobs`: with several updates a step it is given `old_logprobs`, the policy's own from before the first; with
    one, the policy that is updated is the one that a ratio is taken against, and no forward pass is made for it.
    """

    chooses: ClassVar[bool] = False

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

    def choose(self, batch: TrainBatch, logprobs: torch.Tensor) -> torch.Tensor:
        """Return the tokens [B, T] bool of a whole step's `batch` that the loss treats apart, as `Tokens.chosen`.

        `logprobs` [B, T] are the policy's own from before the step. All ranks are given the same and answer the same, so that
        neither they nor micro-batches change it. Asked where `chooses` is set, which costs a forward pass.
        """
        del logprobs
        return torch.zeros_like(batch["loss_mask"])

    def ask_reference(self, reference: Role, shares: list[TrainBatch]) -> None:
        """Put what the loss needs of the reference into each of `shares`."""
        reference.judge(shares, "ref_logprobs")

    def roles(self) -> Mapping[str, RoleSpec]:
        """See `Algorithm.roles`."""
        judge = {REFERENCE: RoleSpec(trained=False)} if self.held_to_reference else {}
        return {POLICY: RoleSpec(trained=True), **judge}

    def targets(self, groups: Sequence[Group]) -> Mapping[str, torch.Tensor]:
        """See `Algorithm.targets`."""
        return {"advantages": group_advantages(groups, self.advantages)}

    def learn(self, roles: Mapping[str, Role], batch: TrainBatch) -> list[Metric]:
        """See `Algorithm.learn`; each of `updates_per_step` runs of groups' neighbours is one optimizer step."""
        policy, num_updates = roles[POLICY], self.step.updates_per_step
        wants_old = num_updates > 1 and self.needs_old_logprobs and "old_logprobs" not in batch
        if self.chooses:
            batch, logprobs = batch.copy(), policy.whole_logprobs(batch)
            batch[CHOSEN.key] = self.choose(batch, logprobs)
            if wants_old:
                batch["old_logprobs"], wants_old = logprobs, False
        shares = policy.shares(batch, num_updates)
        if wants_old:  # before others are asked, who may name tokens that it would be asked for, too
            policy.judge(shares, "old_logprobs")
        if REFERENCE in roles and "ref_logprobs" not in batch:
            self.ask_reference(roles[REFERENCE], shares)
        return policy.train(shares, self.loss_fn())

    def check(self) -> list[Refusal]:
        """See `Algorithm.check`."""
        if self.step.group_size >= 2:
            return []
        reason = f"{self.step.group_size}; {type(self).__name__} compares completions of one prompt"
        return [Refusal("trainer.group_size", reason, "use 2 or more")]


class Grpo(GroupPolicyGradient[GrpoConfig]):
    """GRPO (arXiv 2402.03300): a policy gradient without a critic, which compares the completions of one prompt.

    A = (r - mu) / (sigma + 1e-6), with r the reward of a completion, mu and sigma the mean and the sample standard deviation of the G
    rewards of its prompt. The loss of a token is max(-rho A, -clip(rho, 1 - clip_low, 1 + clip_high) A) with rho = pi / pi_old, times
    the weight of a token that other weights sampled, plus kl_coef KL(pi || reference) - entropy_coef entropy. `advantage` chooses
    another A, `kl_in: reward` takes kl_coef (log pi_old - log reference), summed over a completion, from r instead.

    Use it when rewards can be checked and several completions of a prompt are cheap: it is the default that others are compared
    with. Do not use it when a prompt allows one completion only (`reinforce_pp`, `remax`), or when most groups are all right or all
    wrong and give no signal (`dapo` replaces them).
    """

    Config: ClassVar[type[AlgorithmConfig]] = GrpoConfig
    formula: ClassVar[Callable[..., Surrogate]] = staticmethod(clip)  # of ratio, advantages, tokens, config

    @property
    def held_to_reference(self) -> bool:
        """Whether there is a KL term, in the loss or in the reward."""
        return self.config.kl_coef != 0

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the proximal policy is the trainer's own; see `Proximal`."""
        return self.config.proximal is Proximal.RECOMPUTE

    def roles(self) -> Mapping[str, RoleSpec]:
        """See `Algorithm.roles`; a reference that moves is in float32 and in checkpoints."""
        config, roles = self.config, dict(super().roles())
        otb = config.advantage is Advantage.OTB
        roles[POLICY] = RoleSpec(trained=True, names_tokens=otb or whole_kl(config))
        if REFERENCE in roles:
            roles[REFERENCE] = RoleSpec(trained=bool(config.reference_every), names_tokens=whole_kl(config))
        return roles

    def ask_reference(self, reference: Role, shares: list[TrainBatch]) -> None:
        """Put what `config.kl_estimator` needs of the reference into each of `shares`."""
        reference.judge_for_kl(shares, self.config)

    def advantages(self, rewards_NG: torch.Tensor) -> torch.Tensor:
        """Return them by `config.advantage`."""
        return compute_advantages(self.config.advantage, rewards_NG, epsilon=self.config.std_epsilon)

    def estimate(self, samples: Samples) -> torch.Tensor:
        """Return the advantages [B] float64 of the completions of a step, or with `per_turn` of their k-th turns."""
        kind = self.config.advantage
        if kind in OF_REWARDS:
            return by_group(samples, self.advantages)
        return estimate(kind, samples, self.config.std_epsilon)

    def keeps(self, group: Group) -> str:
        """With `config.dynamic_sampling` leave out groups that teach nothing (DAPO, arXiv 2503.14476, section 3.2)."""
        if not self.config.dynamic_sampling:
            return ""
        earned = {
            (score.reward, *(turn.reward for turn in one.turns if self.config.per_turn))
            for one, score in zip(group.trajectories, group.scores, strict=True)
        }
        return "flat" if len(earned) < 2 else ""

    def targets(self, groups: Sequence[Group]) -> Mapping[str, torch.Tensor]:
        """See `Algorithm.targets`; with `config.per_turn` each turn has an advantage of its own."""
        if self.config.per_turn:
            return {"advantages": turn_advantages(groups, self.estimate)}
        samples = samples_of(groups)
        if self.config.advantage is Advantage.OTB:
            return as_targets(samples)
        later = as_targets(samples) if self.config.kl_in is KlIn.REWARD else {}
        return {"advantages": self.estimate(samples), **later}

    def learn(self, roles: Mapping[str, Role], batch: TrainBatch) -> list[Metric]:
        """See `Algorithm.learn`; a reference that moves takes the weights of the policy after its updates."""
        config, policy = self.config, roles[POLICY]
        if config.kl_in is KlIn.REWARD:
            batch = self._less_kl(roles, batch)
        elif config.advantage is Advantage.OTB:
            samples, batch = from_batch(batch)
            batch["advantages"] = token_advantages(samples, batch, policy.whole_energies(batch, LIKELIEST))
            batch = batch.exclude(INDEX.key)
        metrics = super().learn(roles, batch)
        if config.reference_every and (policy.step + 1) % config.reference_every == 0:
            roles[REFERENCE].take_weights(policy, config.reference_keep)
        follows = {"kl_coef": config.kl_target, "entropy_coef": config.entropy_target}
        coefs = [Metric(f"policy/{name}", Last(self._coef(name))) for name, to in follows.items() if to]
        return [*metrics, *coefs]

    def _less_kl(self, roles: Mapping[str, Role], batch: TrainBatch) -> TrainBatch:
        """Return `batch` with the advantages of rewards less the KL: every rank has the whole batch, and computes the same."""
        samples, batch = from_batch(batch)
        by_trainer = self.config.proximal is Proximal.RECOMPUTE
        old_BT = roles[POLICY].whole_logprobs(batch) if by_trainer else batch["rollout_logprobs"]
        batch["ref_logprobs"] = roles[REFERENCE].whole_logprobs(batch)
        if by_trainer and self.step.updates_per_step > 1:
            batch["old_logprobs"] = old_BT
        kl_B = inside(old_BT - batch["ref_logprobs"], batch["loss_mask"]).double().sum(-1)
        index_B = batch[INDEX.key]
        costs = samples.rewards.new_zeros(len(samples.rewards)).index_add(0, index_B, kl_B)
        rewards = samples.rewards - self._coef("kl_coef") * costs
        advantages_B = self.estimate(replace(samples, rewards=rewards))[index_B]
        batch["advantages"] = inside(advantages_B[:, None].float(), batch["loss_mask"])
        return batch.exclude(INDEX.key)

    def _coef(self, name: str) -> float:
        """Return a coefficient of this step; see `next_state`."""
        if name == "entropy_coef" and self.state.get("entropy_nats", 0.0) > self.config.entropy_target > 0:
            return 0.0
        return self.state.get(name, getattr(self.config, name))

    def next_state(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Return the coefficients that follow a target, by what this step measured.

        kl_coef <- kl_coef (1 + 0.1 clip(KL / target - 1, -0.2, 0.2)) (arXiv 1909.08593, section 2.2). The entropy coefficient rises by
        0.005 where the entropy is at most its target and falls as much above it, where it does not count either (arXiv 2505.22312).
        """
        config, state = self.config, dict(self.state)
        kl, entropy = metrics.get("policy/ref_kl_nats"), metrics.get("policy/entropy_nats")
        if config.kl_target and kl is not None:
            error = max(-KL_ERROR, min(KL_ERROR, kl / config.kl_target - 1))
            state["kl_coef"] = state.get("kl_coef", config.kl_coef) * (1 + KL_GAIN * error)
        if config.entropy_target and entropy is not None:
            step = ENTROPY_STEP if entropy <= config.entropy_target else -ENTROPY_STEP
            coef = state.get("entropy_coef", config.entropy_coef) + step
            state |= {"entropy_coef": min(max(coef, 0.0), ENTROPY_COEF_MAX), "entropy_nats": entropy}
        return state

    def surrogate(self, ratio: torch.Tensor, advantages: torch.Tensor, tokens: Tokens) -> Surrogate:
        """Return what is minimised, by `ratio` [B, T], which has the gradient, and `advantages` [B, T]: here by `formula`.

        An algorithm of one's own may say another, for which `tokens` has the rest: a loss of whole sequences needs their
        log-probs and mask. Correction, KL, entropy, aggregation and metrics stay around it.
        """
        return type(self).formula(ratio, advantages, tokens, self.config)

    def loss_fn(self) -> PolicyLoss:
        """Return the surrogate with what stands around it, and the coefficients of this step."""
        in_loss = self.config.kl_in is KlIn.LOSS
        coefs = {
            "kl_coef": self._coef("kl_coef") if in_loss else 0.0,
            "entropy_coef": self._coef("entropy_coef"),
        }
        return PolicyLoss(
            config=replace(self.config, **coefs),
            max_completion_tokens=self.step.max_completion_tokens,
            surrogate=self.surrogate,
        )

    def check(self) -> list[Refusal]:
        """See `Algorithm.check`."""
        wrong = [(name, f"must be {told}") for name, told in policy_loss_bounds(self.config)]
        moved = [one for one in fields(self.config) if getattr(self.config, one.name) != one.default]
        idle = [one.name for one in moved if one.metadata.get("derived") == UNUSED["derived"]]
        wrong += [(name, f"{type(self).__name__} has no use for it") for name in idle]
        remedy = "leave the setting out for its default"
        return [
            *super().check(),
            *(Refusal(f"algorithm.{name}", why, remedy) for name, why in wrong),
            *self._reference_refusals(),
        ]

    def _reference_refusals(self) -> Iterator[Refusal]:
        config = self.config
        in_reward = config.kl_in is KlIn.REWARD
        asks = {"kl_in": in_reward, "kl_target": config.kl_target, "reference_every": config.reference_every}
        for name in (name for name, value in asks.items() if value and not config.kl_coef):
            reason = f"is {getattr(config, name)}, and with `algorithm.kl_coef` 0 there is no reference"
            yield Refusal(f"algorithm.{name}", reason, "give a kl_coef, 0.01 say, or leave the setting out")
        if config.reference_keep and not config.reference_every:
            reason = f"is {config.reference_keep:g}, and the reference never moves"
            yield Refusal("algorithm.reference_keep", reason, "algorithm.reference_every=1")
        if whole_kl(config) and (in_reward or config.advantage is Advantage.OTB):
            reason = "is of whole distributions, and `algorithm.kl_in=reward` and `algorithm.advantage=otb` look at sampled tokens"
            yield Refusal("algorithm.kl_estimator", reason, "algorithm.kl_estimator=k3, or leave those out")
        if in_reward and config.per_turn:
            reason = "the KL of a whole completion is no turn's, and `algorithm.per_turn` compares turns"
            yield Refusal("algorithm.kl_in", reason, "algorithm.kl_in=loss")
        if in_reward and config.advantage is Advantage.MAX_RL:
            reason = "it makes rewards negative, which `algorithm.advantage=max_rl` does not take"
            yield Refusal("algorithm.kl_in", reason, "algorithm.kl_in=loss")
        if config.advantage is Advantage.OTB and (in_reward or config.per_turn):
            reason = "is of tokens and of the reward as it is, not with `algorithm.kl_in=reward` or `algorithm.per_turn`"
            yield Refusal("algorithm.advantage", reason, "algorithm.advantage=opo, or leave those out")


class DrGrpo(Grpo):
    """Dr. GRPO (arXiv 2503.20783): GRPO without its two divisions, by the group's deviation and by a completion's length.

    A = r - mu, with r the reward of a completion and mu the mean of the G rewards of its prompt; the loss is the sum of the token
    losses of `grpo` (rho = pi / pi_old) over the step, divided by its number of completions and the constant `sampling.max_tokens`.

    Use it when completions grow longer without getting better, or when very easy and very hard prompts dominate. Do not use it when
    rewards of different prompts differ in size: nothing scales them.
    """

    Config: ClassVar[type[AlgorithmConfig]] = DrGrpoConfig


class Rloo(Grpo):
    """RLOO (arXiv 2402.14740): REINFORCE whose baseline is the mean reward of the prompt's other completions.

    A = r - (sum of the other G - 1 rewards) / (G - 1), which is (r - mu) G / (G - 1), with r the reward and mu the mean of all G; the
    loss is the mean over completions of the sum of the token losses of `grpo` (rho = pi / pi_old).

    Use it when groups are small, 2 to 4, and an unbiased gradient matters. Do not use it when rewards of different prompts differ in
    size, or when completions differ much in length: long ones weigh more.
    """

    Config: ClassVar[type[AlgorithmConfig]] = RlooConfig
