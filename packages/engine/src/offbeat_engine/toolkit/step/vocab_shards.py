"""One distribution over a vocabulary whose logits lie on several ranks, from what each says of its own part."""

# ruff: noqa: N815 shapes ride in names, of fields too

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

# M = tokens asked for.


class Whole(NamedTuple):
    """What the ranks agree on of each token: log-probability of the target, log-sum-exp, entropy; float32 [M], in nats."""

    logprobs_M: torch.Tensor
    lse_M: torch.Tensor
    entropy_M: torch.Tensor


@dataclass(frozen=True, slots=True)
class VocabShard:
    """This rank's part of the vocabulary: the head's rows here are those of the tokens from `first` on.

    The ranks of `group` have the same tokens to look at and, between them, every token of the vocabulary once, at least one
    each; parts may differ in size.
    """

    first: int
    group: dist.ProcessGroup

    def rows(self, targets_M: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row [M] of each target among the `num_rows` here, 0 for one of another rank, and which are here [M]."""
        own_M = targets_M - self.first
        here_M = (own_M >= 0) & (own_M < num_rows)
        return torch.where(here_M, own_M, 0), here_M

    def join(
        self, logprobs_M: torch.Tensor, here_M: torch.Tensor, lse_M: torch.Tensor, entropy_M: torch.Tensor
    ) -> Whole:
        """Return the whole from the parts: a collective over `group`, of one maximum and one sum.

        The parts speak of the distribution over this rank's rows alone; log-probabilities count where `here_M`. With s for
        the shards and p_s for the share of each: lse = log sum exp(lse_s), S = sum p_s (S_s - log p_s), whose terms have one
        sign each.
        """
        top_M = lse_M.clone()
        dist.all_reduce(top_M, op=dist.ReduceOp.MAX, group=self.group)
        apart_M = lse_M - top_M
        share_M = apart_M.exp()
        # The target's logit over the highest lse, from the one rank that has it.
        target_M = torch.where(here_M, logprobs_M + apart_M, 0.0)
        sums = torch.stack((share_M, share_M * (entropy_M - apart_M), target_M))
        dist.all_reduce(sums, group=self.group)
        log_total_M = sums[0].log()
        return Whole(sums[2] - log_total_M, top_M + log_total_M, sums[1] / sums[0] + log_total_M)
