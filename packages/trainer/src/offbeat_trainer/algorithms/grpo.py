"""GRPO and its kin: rewards are compared within the completions of one prompt, and a clipped surrogate is followed.

G = completions of one prompt. Every estimate takes rewards [..., G] and works along the last axis; leading axes are separate
groups. All compute and return float64: the differences that matter may be small beside the rewards.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, assert_never

import torch
from torch.nn.utils.rnn import pad_sequence

from offbeat_engine import Refusal
from offbeat_trainer.algorithms.interface import Algorithm, C_co
from offbeat_trainer.algorithms.policy_loss import (
    PolicyLoss,
    Surrogate,
    clipped_surrogate,
    policy_loss_bounds,
)
from offbeat_trainer.algorithms.roles import POLICY, RoleSpec
from offbeat_trainer.config import (
    GRPO_EPSILON,
    Advantage,
    AlgorithmConfig,
    DrGrpoConfig,
    GrpoConfig,
    Proximal,
    RlooConfig,
)
from offbeat_trainer.errors import TrainerError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from offbeat_engine import LossFn, TrainBatch
    from offbeat_trainer.algorithms.roles import Role
    from offbeat_trainer.data.metrics import Metric
    from offbeat_trainer.data.types import Group

REFERENCE = "reference"
MAX_REWARD = 1e38
"""The largest reward, up or down: differences of two of them are float32 numbers still, and advantages are no more."""


def grpo(rewards_G: torch.Tensor, epsilon: float = GRPO_EPSILON) -> torch.Tensor:
    """Centre by the group's mean and divide by its standard deviation (GRPO, arXiv 2402.03300, section 4.1).

    The deviation is the sample's, over G - 1.
    """
    rewards_G = rewards_G.double()
    centred_G = rewards_G - rewards_G.mean(-1, keepdim=True)
    # The sum over max(G - 1, 1) instead of `std()`: a group of one must not divide by zero.
    freedom = max(rewards_G.shape[-1] - 1, 1)
    std_1 = (centred_G.square().sum(-1, keepdim=True) / freedom).sqrt()
    return _zero_where_equal(rewards_G, centred_G / (std_1 + epsilon))


def dr_grpo(rewards_G: torch.Tensor) -> torch.Tensor:
    """Centre by the group's mean only (Dr. GRPO, arXiv 2503.20783, section 3.2).

    Dividing by the standard deviation would weigh prompts that are almost always or almost never solved the most.
    """
    rewards_G = rewards_G.double()
    return _zero_where_equal(rewards_G, rewards_G - rewards_G.mean(-1, keepdim=True))


def rloo(rewards_G: torch.Tensor) -> torch.Tensor:
    """Subtract the mean of the *other* completions' rewards (RLOO, arXiv 2402.14740, section 3.2).

    A baseline without the sample itself leaves the policy gradient unbiased. A group of one has no others: zero.
    """
    rewards_G = rewards_G.double()
    num_others = max(rewards_G.shape[-1] - 1, 1)
    others_mean_G = (rewards_G.sum(-1, keepdim=True) - rewards_G) / num_others
    return _zero_where_equal(rewards_G, rewards_G - others_mean_G)


def compute_advantages(
    kind: Advantage, rewards_G: torch.Tensor, std_epsilon: float = GRPO_EPSILON
) -> torch.Tensor:
    """Return the advantages of `rewards_G` [..., G] by `kind`: float64, same shape, finite for finite float32 rewards.

    A group whose rewards are all equal teaches nothing: its advantages are exactly zero. `std_epsilon` is GRPO's alone.
    """
    match kind:
        case Advantage.GRPO:
            return grpo(rewards_G, std_epsilon)
        case Advantage.DR_GRPO:
            return dr_grpo(rewards_G)
        case Advantage.RLOO:
            return rloo(rewards_G)
        case _:
            assert_never(kind)


def group_advantages(
    groups: Sequence[Group], estimate: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the advantage [B] float64 of every completion of scored `groups`, in their order.

    `estimate` is given rewards [N, G] float64 of groups of one size, and answers alike.

    Raises:
        TrainerError: a group has not one finite score per completion.
    """
    places: list[list[int]] = []
    by_size: defaultdict[int, list[int]] = defaultdict(list)
    begin = 0
    for index, group in enumerate(groups):
        check_scores(group)
        by_size[len(group.scores)].append(index)
        places.append(list(range(begin, begin := begin + len(group.scores))))
    advantages_B = torch.zeros(begin, dtype=torch.float64)
    for (
        indices
    ) in by_size.values():  # groups of one size in one call: hundreds of tiny tensors would cost more
        rewards_NG = torch.tensor(
            [[score.reward for score in groups[i].scores] for i in indices], dtype=torch.float64
        )
        advantages_B[torch.tensor([places[i] for i in indices], dtype=torch.int64)] = estimate(rewards_NG)
    return advantages_B


def turn_advantages(
    groups: Sequence[Group], estimate: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the advantage of every token [B, C] float64 of scored `groups`: that of its turn.

    With r_l what turn l earned, turn k of a trajectory is worth R_k = sum of r_l over l >= k, and A_k is `estimate` of R_k among those
    of the group that have a turn k: turn-level rewards (MT-GRPO, arXiv 2505.11821) as rewards to go. What no turn earned counts to the
    last. Each turn has one baseline, which no later choice to stop or to go on changes; who alone has a turn k has 0 there.

    Raises:
        TrainerError: a group has not one finite score per completion.
    """
    rows: list[torch.Tensor] = []
    for group in groups:
        check_scores(group)
        worth = [
            _to_go([turn.reward for turn in one.turns], score.reward)
            for one, score in zip(group.trajectories, group.scores, strict=True)
        ]
        found: list[list[float]] = [[] for _ in worth]
        for k in range(max(map(len, worth), default=0)):
            having = [index for index, turns in enumerate(worth) if len(turns) > k]
            rewards_1G = torch.tensor([[worth[index][k] for index in having]], dtype=torch.float64)
            for index, value in zip(having, estimate(rewards_1G)[0], strict=True):
                found[index].append(float(value))
        for one, turns in zip(group.trajectories, found, strict=True):
            sizes = torch.tensor([turn.num_tokens for turn in one.turns], dtype=torch.int64)
            rows.append(torch.tensor(turns, dtype=torch.float64).repeat_interleave(sizes))
    return pad_sequence(rows, batch_first=True) if rows else torch.zeros(0, 0, dtype=torch.float64)


def _to_go(earned: list[float], total: float) -> list[float]:
    """Return what was earned from each turn on, where all of it together is `total`."""
    if earned:
        earned = [*earned[:-1], total - math.fsum(earned[:-1])]
    return [*accumulate(reversed(earned))][::-1]


def check_scores(group: Group) -> None:
    """Raise `TrainerError` unless `group` has one finite reward per completion."""
    if len(group.scores) != len(group.trajectories):
        raise TrainerError(
            f"prompt {group.prompt.uid!r} has {len(group.trajectories)} completions and {len(group.scores)} scores; "
            "score every completion before advantages are computed"
        )
    for index, score in enumerate(group.scores):
        if not abs(score.reward) <= MAX_REWARD:  # NaN, too
            raise TrainerError(
                f"completion {index} of prompt {group.prompt.uid!r} has reward {score.reward}; "
                f"a reward must be a finite number of at most {MAX_REWARD:g} either way, or advantages leave float32"
            )


def _zero_where_equal(rewards_G: torch.Tensor, advantages_G: torch.Tensor) -> torch.Tensor:
    """Zero the groups of equal rewards: rounding in the mean would leave them a residue."""
    if rewards_G.shape[-1] == 0:
        return advantages_G
    equal_1 = rewards_G.amax(-1, keepdim=True) == rewards_G.amin(-1, keepdim=True)
    return advantages_G.masked_fill(equal_1, 0.0)


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
    """GRPO (arXiv 2402.03300); the estimates above and `algorithms.policy_loss` have the formulas and their sources."""

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
        return compute_advantages(self.config.advantage, rewards_NG, self.config.std_epsilon)

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
        if not self.config.per_turn:
            return super().targets(groups)
        return {"advantages": turn_advantages(groups, self.advantages)}

    def surrogate(self, ratio: torch.Tensor, advantages: torch.Tensor) -> Surrogate:
        """Return what is minimised, by `ratio` [B, T], which has the gradient, and `advantages` [B, T]: the clipped surrogate.

        An algorithm of one's own may say another; correction, KL, entropy, aggregation and metrics stay around it.
        """
        config = self.config
        return clipped_surrogate(ratio, advantages, config.clip_low, config.clip_high, config.dual_clip)

    def loss_fn(self) -> PolicyLoss:
        """Return the surrogate with what stands around it."""
        return PolicyLoss(
            config=self.config,
            max_completion_tokens=self.step.max_completion_tokens,
            surrogate=self.surrogate,
        )

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
