"""From rewards to advantages: pure functions, each beside its formula and its source.

B = completions of a step, N = prompts, G = completions of one prompt; r a reward, mu and sigma the mean and the sample standard
deviation (over G - 1) of its group. An estimate of groups takes rewards [..., G] and works along the last axis; leading axes are
separate groups. All compute and return float64: the differences that matter may be small beside the rewards. A group whose rewards
are all equal teaches nothing: its advantages are exactly zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

from offbeat_engine import Field, register_field
from offbeat_trainer.config import GRPO_EPSILON, Advantage
from offbeat_trainer.errors import TrainerError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat_engine import TrainBatch
    from offbeat_trainer.data.types import Group

MAX_REWARD = 1e38
"""The largest reward, up or down: differences of two of them are float32 numbers still, and advantages are no more."""


def grpo(rewards_G: torch.Tensor, epsilon: float = GRPO_EPSILON) -> torch.Tensor:
    """Return (r - mu) / (sigma + epsilon) (GRPO, arXiv 2402.03300, section 4.1)."""
    return dr_grpo(rewards_G) / (_sigma(rewards_G) + epsilon)


def dr_grpo(rewards_G: torch.Tensor) -> torch.Tensor:
    """Return r - mu (Dr. GRPO, arXiv 2503.20783, section 3.2).

    Dividing by the standard deviation would weigh prompts that are almost always or almost never solved the most.
    """
    rewards_G = rewards_G.double()
    return _zero_where_equal(rewards_G, rewards_G - rewards_G.mean(-1, keepdim=True))


def rloo(rewards_G: torch.Tensor) -> torch.Tensor:
    """Return r minus the mean of the *other* completions' rewards (RLOO, arXiv 2402.14740, section 3.2).

    A baseline without the sample itself leaves the policy gradient unbiased. A group of one has no others: zero.
    """
    rewards_G = rewards_G.double()
    num_others = max(rewards_G.shape[-1] - 1, 1)
    others_mean_G = (rewards_G.sum(-1, keepdim=True) - rewards_G) / num_others
    return _zero_where_equal(rewards_G, rewards_G - others_mean_G)


def loo_grpo(rewards_G: torch.Tensor, epsilon: float = GRPO_EPSILON) -> torch.Tensor:
    """Return (r - mean of the others) / (sigma + epsilon): the leave-one-out baseline of NeMo-RL's GRPO.

    The deviation is that of the whole group. NeMo-RL takes it of the others, too: a lone success, whose others are all equal, would
    be divided by nothing.
    """
    return rloo(rewards_G) / (_sigma(rewards_G) + epsilon)


def opo(rewards_G: torch.Tensor, lengths_G: torch.Tensor) -> torch.Tensor:
    """Return r - b with b = sum l r / sum l, l = sampled tokens of a completion (OPO, arXiv 2505.23585).

    The baseline of least variance where the squared norm of a completion's gradient grows with its length. Where no completion has a
    token, b is mu.
    """
    rewards_G, lengths_G = rewards_G.double(), lengths_G.double()
    lengths_G = torch.where(lengths_G.sum(-1, keepdim=True) > 0, lengths_G, 1.0)
    baseline_1 = (lengths_G * rewards_G).sum(-1, keepdim=True) / lengths_G.sum(-1, keepdim=True)
    return _zero_where_equal(rewards_G, rewards_G - baseline_1)


def pass_at_k(rewards_G: torch.Tensor, epsilon: float = GRPO_EPSILON) -> torch.Tensor:
    """Return (r - second largest) / (sigma + epsilon) for the best completion, 0 for the others (pass@k, arXiv 2503.19595).

    What the group's largest reward, of k = G tries, owes to the one that has it; of several best ones none is needed.
    """
    rewards_G = rewards_G.double()
    if rewards_G.shape[-1] < 2:
        return torch.zeros_like(rewards_G)
    best_2, place_2 = rewards_G.topk(2, -1)
    gap_1 = (best_2[..., :1] - best_2[..., 1:]) / (_sigma(rewards_G) + epsilon)
    return torch.zeros_like(rewards_G).scatter(-1, place_2[..., :1], gap_1)


def max_rl(rewards_G: torch.Tensor) -> torch.Tensor:
    """Return (r - mu) / mu, 0 where mu is 0 (MaxRL, arXiv 2602.02710): of rewards 0 and 1, the gradient of the log of the pass rate.

    Raises:
        TrainerError: a reward is negative.
    """
    rewards_G = rewards_G.double()
    if (rewards_G < 0).any():
        raise TrainerError(
            f"`advantage: max_rl` divides by the mean reward and needs rewards >= 0, got {float(rewards_G.min()):g}; "
            "shift the rewards, or take another advantage"
        )
    mean_1 = rewards_G.mean(-1, keepdim=True)
    return torch.where(mean_1 > 0, dr_grpo(rewards_G) / mean_1, 0.0)


def otb(rewards_G: torch.Tensor, energies_GC: torch.Tensor, sampled_GC: torch.Tensor) -> torch.Tensor:
    """Return r - b_t [G, C] with b_t = sum W_t r / sum W_t, of the completions of one prompt that have a t-th token (OTB, arXiv 2602.07078).

    W_t sums |grad log p|^2 = 1 - 2 p + sum_v p(v)^2, the gradient by logits, over the tokens of a completion up to t: `energies_GC`. b_t
    has the least variance where gradients of tokens are independent. Where W_t is 0 for all, b_t is their mean; who alone is so
    long has 0 there, where verl leaves it r.
    """
    rewards_G1, number_C = rewards_G.double()[:, None], sampled_GC.sum(0)
    weights_GC = energies_GC.double().cumsum(1).masked_fill(~sampled_GC, 0.0)
    weights_GC = torch.where(weights_GC.sum(0) > 0, weights_GC, sampled_GC.double())
    baseline_C = (weights_GC * rewards_G1).sum(0) / weights_GC.sum(0).clamp(min=1e-300)
    found_GC = (rewards_G1 - baseline_C).masked_fill(~sampled_GC | (number_C < 2), 0.0)
    return found_GC * _unequal(rewards_G.double())


def token_advantages(samples: Samples, batch: TrainBatch, energies_BT: torch.Tensor) -> torch.Tensor:
    """Return `otb` of each token [B, T] float32; `samples` and `batch` are those of `from_batch`, and t counts trained tokens."""
    mask_BT, index_B = batch["loss_mask"], batch[INDEX.key]
    counts_S = index_B.repeat_interleave(mask_BT.sum(1)).bincount(minlength=len(samples.rewards))
    energies_SC = pad_sequence([*energies_BT[mask_BT].double().split(counts_S.tolist())], batch_first=True)
    sampled_SC = torch.arange(energies_SC.shape[1]) < counts_S[:, None]
    found_SC = torch.zeros_like(energies_SC)
    for group in sorted(set(map(float, samples.groups))):
        own_S = samples.groups == group
        found_SC[own_S] = otb(samples.rewards[own_S], energies_SC[own_S], sampled_SC[own_S])
    return torch.zeros(mask_BT.shape).masked_scatter(mask_BT, found_SC[sampled_SC].float())


def gpg(samples: Samples) -> torch.Tensor:
    """Return alpha (r - mu) [B], alpha = B / completions of groups with unequal rewards (GPG, arXiv 2504.02546).

    What groups of equal rewards take from the mean gradient is given back. verl counts completions with a reward other than 0 instead.
    """
    spread_B = by_group(samples, _unequal)
    return by_group(samples, dr_grpo) * (len(spread_B) / spread_B.sum().clamp(min=1))


def whiten(values_B: torch.Tensor, weights_B: torch.Tensor) -> torch.Tensor:
    """Return (x - m) / sqrt(v + 1e-8), where each value counts `weights_B` times in the mean m and the variance v.

    v is over the sum of weights - 1; a value that counts 0 times becomes 0. The global normalisation of REINFORCE++ (arXiv 2501.03262), over tokens where a weight is a completion's length.
    """
    counted_B = weights_B > 0
    values_M, weights_M = values_B.double()[counted_B], weights_B.double()[counted_B]
    total = weights_M.sum()
    centred_M = values_M - (values_M * weights_M).sum() / total
    variance = (centred_M.square() * weights_M).sum() / (total - 1).clamp(min=1)
    found_B = torch.zeros_like(values_B, dtype=torch.float64)
    found_B[counted_B] = _zero_where_equal(values_M, centred_M / (variance + 1e-8).sqrt())
    return found_B


def grpo_across(samples: Samples, domains_B: torch.Tensor, epsilon: float = GRPO_EPSILON) -> torch.Tensor:
    """Return (r - mu) / (s + epsilon) [B], s the deviation of all rewards of the same number in `domains_B`, of all their groups.

    One number: the batch's deviation (Lite PPO, arXiv 2508.08221), which a group of nearly equal rewards cannot blow up.
    By domain, tasks whose rewards are of different size do not outweigh one another.
    """
    domains = Samples.of(samples.rewards, groups=domains_B)
    return by_group(samples, dr_grpo) / (by_group(domains, _sigma) + epsilon)


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """What estimates look at, of the completions of a step: [B] each, float64.

    `lengths` are sampled tokens. `groups` and `domains` hold the same number for completions of one prompt, of one
    `prompt.data["domain"]`; prompts that name none are one domain. `baselines` are rewards of `Group.baseline`, 0 where none is drawn.
    """

    rewards: torch.Tensor
    lengths: torch.Tensor
    groups: torch.Tensor
    domains: torch.Tensor
    baselines: torch.Tensor

    @classmethod
    def of(cls, rewards: torch.Tensor, groups: torch.Tensor, lengths: torch.Tensor | None = None) -> Samples:
        """Return samples of one domain, of equal lengths unless these are given."""
        rewards, zeros = rewards.double(), torch.zeros_like(rewards, dtype=torch.float64)
        lengths = zeros + 1 if lengths is None else lengths.double()
        return cls(rewards=rewards, lengths=lengths, groups=groups, domains=zeros, baselines=zeros)

    def at(self, places: Sequence[int]) -> Samples:
        """Return those at `places`."""
        index = torch.tensor(places, dtype=torch.int64)
        return Samples(**{item.name: getattr(self, item.name)[index] for item in fields(self)})


_KEYS = {
    item.name: register_field(
        Field(key=f"sample/{item.name}", dims="B", dtype=torch.float64, meaning="see `Samples`")
    ).key
    for item in fields(Samples)
}
INDEX = register_field(
    Field(key="sample/index", dims="B", dtype=torch.int64, meaning="number of the trajectory of a sequence")
)


def as_targets(samples: Samples) -> dict[str, torch.Tensor]:
    """Return `samples` as keys of a batch, from which `from_batch` has them again."""
    index_B = torch.arange(len(samples.rewards))
    return {INDEX.key: index_B, **{key: getattr(samples, name) for name, key in _KEYS.items()}}


def from_batch(batch: TrainBatch) -> tuple[Samples, TrainBatch]:
    """Return the samples that `as_targets` put into `batch`, and the batch without them but for `INDEX`."""
    counts_B = batch[INDEX.key].bincount()
    first_B = (counts_B.cumsum(0) - counts_B).tolist()  # rows of a trajectory are neighbours
    samples = Samples(**{name: batch[key] for name, key in _KEYS.items()}).at(first_B)
    return samples, batch.exclude(*_KEYS.values())


def advantages_of(groups: Sequence[Group], batch: TrainBatch) -> list[torch.Tensor] | None:
    """Return the advantages [T] of each trajectory of `groups`, of which `batch` was made, by the order of its `token_ids`.

    None: the driver does not know them. A critic, a KL in the reward and `otb` have them made by the ranks.
    """
    if "advantages" not in batch or INDEX.key in batch:
        return None
    rows = zip(batch["advantages"], batch["lengths"].tolist(), strict=True)
    return [
        torch.cat(
            [own_T[end - row.num_tokens : end] for row, (own_T, end) in zip(one.rows, rows, strict=False)]
        )
        for group in groups
        for one in group.trajectories
    ]


def by_group(
    samples: Samples, estimate: Callable[..., torch.Tensor], *values_B: torch.Tensor
) -> torch.Tensor:
    """Return [B] float64 what `estimate` makes of rewards [N, G] float64 (and `values_B` alike), for groups of one size at a time.

    An answer of [N, 1] is one for each group.
    """
    order_B = samples.groups.argsort(stable=True)
    sorted_B = samples.groups[order_B]
    ends_N = torch.cat([(sorted_B[1:] != sorted_B[:-1]).nonzero()[:, 0] + 1, torch.tensor([len(order_B)])])
    size_N = ends_N.diff(prepend=torch.tensor([0]))
    size_B = size_N.repeat_interleave(size_N)
    found_B = torch.zeros(len(order_B), dtype=torch.float64)
    for size in map(int, size_B.bincount().nonzero()):  # hundreds of tiny tensors would cost more
        places_NG = order_B[size_B == size].view(-1, size)
        found_NG = estimate(*(one[places_NG] for one in (samples.rewards, *values_B)))
        found_B[places_NG] = found_NG.double().expand_as(places_NG)
    return found_B


OF_REWARDS = {
    Advantage.GRPO: grpo,
    Advantage.DR_GRPO: dr_grpo,
    Advantage.RLOO: rloo,
    Advantage.LOO_GRPO: loo_grpo,
    Advantage.PASS_AT_K: pass_at_k,
    Advantage.MAX_RL: max_rl,
}
"""Estimates that look at the rewards of a group alone."""
SCALED = {Advantage.GRPO, Advantage.LOO_GRPO, Advantage.PASS_AT_K}
"""Those that divide by a deviation."""


def estimate(kind: Advantage, samples: Samples, epsilon: float = GRPO_EPSILON) -> torch.Tensor:
    """Return the advantages [B] float64 of `samples` by `kind`, finite for finite float32 rewards; `epsilon` goes to a deviation.

    Raises:
        TrainerError: `kind` does not take such rewards.
    """
    match kind:
        case Advantage.OPO:
            return by_group(samples, opo, samples.lengths)
        case Advantage.BATCH_STD:
            return grpo_across(samples, torch.zeros_like(samples.domains), epsilon)
        case Advantage.DOMAIN_STD:
            return grpo_across(samples, samples.domains, epsilon)
        case Advantage.OTB:
            raise TrainerError(
                "`advantage: otb` is of tokens, by the policy's probabilities: it is known where the models are"
            )
        case _:
            return by_group(samples, partial(compute_advantages, kind, epsilon=epsilon))


def compute_advantages(
    kind: Advantage,
    rewards_G: torch.Tensor,
    lengths_G: torch.Tensor | None = None,
    epsilon: float = GRPO_EPSILON,
) -> torch.Tensor:
    """Return the advantages of `rewards_G` [..., G] by `kind`: float64, same shape; see `estimate`.

    The leading axes are the groups of one batch and domain, whose completions have `lengths_G` tokens, or equally many.
    """
    if kind in OF_REWARDS:
        return OF_REWARDS[kind](rewards_G, *([epsilon] if kind in SCALED else []))
    groups_B = torch.arange(rewards_G.numel()) // max(rewards_G.shape[-1], 1)
    lengths_B = None if lengths_G is None else lengths_G.flatten()
    samples = Samples.of(rewards_G.flatten(), groups_B, lengths_B)
    return estimate(kind, samples, epsilon).view(rewards_G.shape)


def samples_of(groups: Sequence[Group]) -> Samples:
    """Return the completions of scored `groups`, in their order.

    Raises:
        TrainerError: a group has not one finite score per completion.
    """
    of_groups: list[tuple[float, float, float]] = []
    domains: dict[str, int] = {}
    for index, group in enumerate(groups):
        check_scores(group)
        domain = domains.setdefault(repr(group.prompt.data.get("domain")), len(domains))
        of_groups.append((index, domain, group.baseline[0].reward if group.baseline else 0.0))
    sizes_N = torch.tensor([len(group.scores) for group in groups], dtype=torch.int64)
    columns = torch.tensor(of_groups, dtype=torch.float64).view(-1, 3).repeat_interleave(sizes_N, 0).unbind(1)
    rewards = [score.reward for group in groups for score in group.scores]
    lengths_B = torch.tensor([one.num_trained for group in groups for one in group.trajectories])
    samples = Samples.of(torch.tensor(rewards, dtype=torch.float64), columns[0], lengths_B)
    return replace(samples, domains=columns[1], baselines=columns[2])


def group_advantages(
    groups: Sequence[Group], estimate: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the advantage [B] float64 of every completion of scored `groups`, in their order.

    `estimate` is given rewards [N, G] float64 of groups of one size, and answers alike.

    Raises:
        TrainerError: a group has not one finite score per completion.
    """
    return by_group(samples_of(groups), estimate)


def turn_advantages(groups: Sequence[Group], estimate: Callable[[Samples], torch.Tensor]) -> torch.Tensor:
    """Return the advantage of every token [B, C] float64 of scored `groups`: that of its turn.

    With r_l what turn l earned, turn k of a trajectory is worth R_k = sum of r_l over l >= k, and A_k is `estimate` of R_k, and of the
    tokens sampled from turn k on, among those that have a turn k: turn-level rewards (MT-GRPO, arXiv 2505.11821) as rewards to go. What
    no turn earned counts to the last. Each turn has one baseline, which no later choice to stop or to go on changes; who alone of its
    group has a turn k has 0 there.

    Raises:
        TrainerError: a group has not one finite score per completion.
    """
    whole = samples_of(groups)
    trajectories = [one for group in groups for one in group.trajectories]
    worth_B = [
        _to_go([turn.reward for turn in one.turns], float(total))
        for one, total in zip(trajectories, whole.rewards, strict=True)
    ]
    tokens_B = [
        _to_go([turn.completion.num_tokens for turn in one.turns], one.num_trained) for one in trajectories
    ]
    found_B: list[list[float]] = [[] for _ in worth_B]
    for k in range(max(map(len, worth_B), default=0)):
        places = [place for place, turns in enumerate(worth_B) if len(turns) > k]
        turns = replace(
            whole.at(places),
            rewards=torch.tensor([worth_B[place][k] for place in places], dtype=torch.float64),
            lengths=torch.tensor([tokens_B[place][k] for place in places], dtype=torch.float64),
        )
        for place, value in zip(places, estimate(turns), strict=True):
            found_B[place].append(float(value))
    rows = [
        torch.tensor(values, dtype=torch.float64).repeat_interleave(
            torch.tensor([turn.num_tokens for turn in one.turns], dtype=torch.int64)
        )
        for one, values in zip(trajectories, found_B, strict=True)
    ]
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


def _sigma(rewards_G: torch.Tensor) -> torch.Tensor:
    """Return the sample standard deviation [..., 1] float64; of one reward 0."""
    rewards_G = rewards_G.double()
    # The sum over max(G - 1, 1) instead of `std()`: a group of one must not divide by zero.
    freedom = max(rewards_G.shape[-1] - 1, 1)
    return (rewards_G - rewards_G.mean(-1, keepdim=True)).square().sum(-1, keepdim=True).div(freedom).sqrt()


def _unequal(rewards_G: torch.Tensor) -> torch.Tensor:
    """Return whether the rewards of a group differ, [..., 1] bool."""
    return rewards_G.amax(-1, keepdim=True) != rewards_G.amin(-1, keepdim=True)


def _zero_where_equal(rewards_G: torch.Tensor, advantages_G: torch.Tensor) -> torch.Tensor:
    """Zero the groups of equal rewards: rounding in the mean would leave them a residue."""
    if rewards_G.shape[-1] == 0:
        return advantages_G
    return advantages_G.masked_fill(~_unequal(rewards_G), 0.0)
