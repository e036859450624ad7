"""Sampling of one token per row, vectorised. R = rows, V = vocabulary.

Randomness is one uniform number per token, drawn from a stream that belongs to the request alone, and turned into a
token by inverting the cumulative distribution. So the token of a row depends on that row and its seed only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat_rollout.types import SamplingParams

# Largest uniform drawn: one float32 step further and `u * total` could round up to `total`, beyond the last token.
_MAX_UNIFORM = 1.0 - 2.0**-23


def uniform_stream(seed: int | None, num_tokens: int) -> list[float]:
    """Return `num_tokens` uniforms in [0, 1) for a request; a longer stream of a seed begins with the shorter one.

    Philox is counter-based (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the key is the
    seed, the counter the position. Without a seed the key is fresh entropy.
    """
    bits = np.random.Philox() if seed is None else np.random.Philox(key=seed % 2**128)
    return np.minimum(np.random.Generator(bits).random(num_tokens), _MAX_UNIFORM).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTable:
    """The sampling parameters of a batch as tensors; None where no row uses the feature."""

    temperature: torch.Tensor | None  # [R, 1] float32, 1 for greedy rows
    greedy: torch.Tensor | None  # [R] bool
    top_k: torch.Tensor | None  # [R, 1] int64, V where off
    top_p: torch.Tensor | None  # [R, 1] float32, 1 where off


def sampling_table(params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> SamplingTable:
    """Return the table of `params`, one entry per row."""
    greedy = [p.temperature == 0 for p in params]
    temperature = [1.0 if p.temperature == 0 else p.temperature for p in params]
    top_k = [vocab_size if p.temperature == 0 or p.top_k == -1 else min(p.top_k, vocab_size) for p in params]
    top_p = [1.0 if p.temperature == 0 else p.top_p for p in params]

    def column(values: Sequence[float], off: float, dtype: torch.dtype) -> torch.Tensor | None:
        if all(value == off for value in values):
            return None
        return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

    return SamplingTable(
        temperature=column(temperature, 1.0, torch.float32),
        greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
        top_k=column(top_k, vocab_size, torch.int64),
        top_p=column(top_p, 1.0, torch.float32),
    )


def truncate(
    logits_RV: torch.Tensor, top_k_R1: torch.Tensor | None, top_p_R1: torch.Tensor | None
) -> torch.Tensor:
    """Return logits with everything outside top-k, then outside the nucleus, at -inf; a row that asks for neither keeps its bits.

    Top-k keeps ties of the k-th value. Top-p keeps the smallest set of most likely tokens whose mass, after top-k,
    reaches p (Holtzman et al., "The curious case of neural text degeneration", ICLR 2020).
    """
    if top_k_R1 is None and top_p_R1 is None:
        return logits_RV
    sorted_RV, order_RV = logits_RV.sort(dim=-1, stable=True)  # ascending
    drop_RV = torch.zeros_like(sorted_RV, dtype=torch.bool)
    if top_k_R1 is not None:
        kth_R1 = sorted_RV.gather(1, sorted_RV.shape[1] - top_k_R1)
        drop_RV = sorted_RV < kth_R1
    if top_p_R1 is not None:
        mass_RV = sorted_RV.masked_fill(drop_RV, -torch.inf).softmax(dim=-1).cumsum(dim=-1)
        outside_RV = (mass_RV <= 1 - top_p_R1) & (top_p_R1 < 1)
        outside_RV[:, -1] = False  # the most likely token always stays
        drop_RV = drop_RV | outside_RV
    return logits_RV.masked_fill(drop_RV.scatter(1, order_RV, drop_RV), -torch.inf)


def sample(
    logits_RV: torch.Tensor, table: SamplingTable, uniform_R: torch.Tensor, num_top: int = 0
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """Return (token ids [R] int64, log-probs [R] float32) drawn from float32 `logits_RV`, and the likeliest tokens.

    Those are (log-probs [R, K], token ids [R, K]), likeliest first, where K = `num_top` is not 0.

    Log-probs are those of the distribution drawn from, after temperature and truncation; greedy rows are given at
    temperature 1 without truncation.
    """
    if table.temperature is not None:
        logits_RV = logits_RV / table.temperature
    logits_RV = truncate(logits_RV, table.top_k, table.top_p)
    logprob_RV = logits_RV.log_softmax(dim=-1)
    cdf_RV = logprob_RV.exp().cumsum(dim=-1)
    target_R1 = uniform_R.unsqueeze(1) * cdf_RV[:, -1:]
    # right=True: the first entry above the target, so a token of probability zero is never drawn.
    token_R = torch.searchsorted(cdf_RV, target_R1, right=True).squeeze(1)
    if table.greedy is not None:
        token_R = torch.where(table.greedy, logits_RV.argmax(dim=-1), token_R)
    top = logprob_RV.topk(num_top, dim=-1) if num_top else None
    return token_R, logprob_RV.gather(1, token_R.unsqueeze(1)).squeeze(1), top
