"""Inputs that every library is given, and how a loss is differentiated. B = sequences, T = tokens, G = completions of a prompt."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

B, T, G = 8, 6, 4
LENGTHS = (6, 4, 5, 2, 6, 3, 6, 5)
REWARDS = (1.0, 0.0, 0.0, 1.0, 0.2, 1.0, 0.5, 0.0)
SEED = 31
LOSS = ("rewards", "logprobs", "old_logprobs")

Tensors = dict[str, torch.Tensor]
Case = dict[str, Any]


def inputs() -> Tensors:
    """Return random inputs, rounded so that JSON has them exactly. Rows are short, and ratios leave every bound.

    `turn_mask` leaves a token in the middle of a row out, as an environment's is; with `even_mask` two rows of a prompt are the longest.
    `squared_probs` are sums over a vocabulary in which the sampled token has the probability of `old_logprobs`.
    """
    draw = torch.Generator().manual_seed(SEED)
    noise = partial(torch.randn, B, T, generator=draw)
    logprobs = -0.1 - 1.5 * torch.rand(B, T, generator=draw)
    old = logprobs + 0.25 * noise()
    far = ((0, 1), (1, 2), (5, 0), (7, 3))  # where the advantage is positive and where it is not
    for b, t in far:
        old[b, t] = logprobs[b, t] - 1.4
    mask = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
    rollout = old + 0.3 * noise()
    rollout[0, 2] = old[0, 2] + 0.5  # between usual lower bounds of a token's weight
    for b, ratio in ((1, 2.5), (4, 4.0), (6, 0.6)):  # whole rows that bounds of 2 and 3 tell apart
        shift = (old - rollout)[b, : LENGTHS[b]].sum() - torch.tensor(ratio).log()
        rollout[b] += shift / LENGTHS[b]
    left = ((2, 0.02), (7, 0.1))  # bad completions that the policy has left, by less and by more than 0.05
    for b, drift in left:
        away = (rollout - logprobs)[b, : LENGTHS[b]].mean()
        rollout[b] += drift - away
    turn_mask = mask.clone()
    turn_mask[[2, 6], [1, 3]] = False
    teacher = logprobs + 0.4 * noise()
    teacher[3, 1] = logprobs[3, 1] - 12.0
    values = 0.5 * noise()
    rewards = torch.tensor(REWARDS)
    parts = torch.stack([rewards * torch.tensor((1, 0, 1, 0.5) * 2), torch.rand(B, generator=draw)], 1)
    found = {
        "logprobs": logprobs,
        "old_logprobs": old,
        "rollout_logprobs": rollout,
        "ref_logprobs": logprobs + 0.3 * noise(),
        "teacher_logprobs": teacher,
        "entropy": 0.5 + torch.rand(B, T, generator=draw),
        "values": values,
        "new_values": values + 0.5 * noise(),
        "rewards": rewards,
        "reward_parts": parts,
        "greedy_rewards": torch.tensor((1.0, 0.2)),
        "squared_probs": old.exp() ** 2 + (1 - old.exp()) ** 2 * torch.rand(B, T, generator=draw),
    }
    return {key: value.mul(1e4).round().div(1e4) for key, value in found.items()} | {
        "mask": mask.double(),
        "turn_mask": turn_mask.double(),
        "even_mask": (mask & (torch.arange(T) < T - 1)).double(),
    }


def differentiated(
    data: Tensors, loss_of: Callable[[torch.Tensor], torch.Tensor], key: str = "logprobs"
) -> Case:
    """Return the loss that `loss_of` a leaf of `data[key]` is, and its gradient."""
    leaf = data[key].clone().requires_grad_()
    loss = loss_of(leaf)
    loss.backward()
    assert leaf.grad is not None
    return {"loss": loss, "gradient": leaf.grad}
