"""Losses of tokens become one number, by global counts.

B = sequences of a micro-batch, T = tokens. Each mode is a sum over sequences divided by counts of the *whole*
optimizer step (`LossScale`): the parts of any split of a batch into micro-batches or ranks add up to the same loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import torch

from offbeat_trainer.config import Aggregation

if TYPE_CHECKING:
    from offbeat_engine import LossScale


def aggregate(
    kind: Aggregation,
    values_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    scale: LossScale,
    max_completion_tokens: int,
) -> torch.Tensor:
    """Return the share of `values_BT` under `mask_BT` in the step's aggregate, a scalar.

    - `token_mean`: every token weighs the same (DAPO, arXiv 2503.14476, section 3.3).
    - `seq_mean_token_sum`: every token weighs the same, divided by sequences.
    - `seq_mean_token_mean`: every sequence weighs the same, however long (GRPO, arXiv 2402.03300).
    - `seq_mean_token_sum_norm`: as `seq_mean_token_sum`, divided by the constant `max_completion_tokens`, so that a
      batch's length does not change the step (Dr. GRPO, arXiv 2503.20783).

    Values outside the mask count as zero, NaN and infinity included. Sequences without a masked token add nothing;
    whether they count in `scale.num_sequences` is the engine's affair.
    """
    sum_B = inside(values_BT, mask_BT).sum(-1)
    num_tokens = max(scale.num_tokens, 1)  # nothing to train on anywhere: zero, not 0 / 0
    num_sequences = max(scale.num_sequences, 1)
    match kind:
        case Aggregation.TOKEN_MEAN:
            return sum_B.sum() / num_tokens
        case Aggregation.SEQ_MEAN_TOKEN_SUM:
            return sum_B.sum() / num_sequences
        case Aggregation.SEQ_MEAN_TOKEN_MEAN:
            return (sum_B / mask_BT.sum(-1).clamp(min=1)).sum() / num_sequences
        case Aggregation.SEQ_MEAN_TOKEN_SUM_NORM:
            return sum_B.sum() / (num_sequences * max_completion_tokens)
        case _:
            assert_never(kind)


def inside(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return `values_BT` under `mask_BT` and zero elsewhere, in value and in gradient.

    A product with the mask would turn infinity outside it into NaN.
    """
    return torch.where(mask_BT, values_BT, torch.zeros_like(values_BT))
