"""Variable-length attention written out, segment by segment: what the GPU's kernels are held against, on any device.

Forward answers with the log-sum-exp of each token's scores too, backward takes one from outside: see `fsdp2.attention.varlen`.
"""

# ruff: noqa: N815 shapes ride in names, of fields too

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

# Shapes: q query and m key tokens of one segment, Q and M in all, A = K * G query heads, K key-value heads.

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values, or what belongs to each."""


class Part(NamedTuple):
    """Segments that attend: the query tokens (None: all) and key tokens of the row, and where each segment ends.

    With `causal` the last query sees the last key, as in FlashAttention since 2.1.
    """

    queries_Q: torch.Tensor | None  # int64
    keys_M: torch.Tensor | None  # int64
    ends_q: torch.Tensor  # int32 [S + 1], 0 first
    ends_k: torch.Tensor
    longest_q: int
    longest_k: int
    causal: bool


def plain_forward(
    heads: Heads, part: Part, scaling: float, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output [Q, A, D] and log-sum-exp [A, Q]; sums are float32 at least."""
    query_QAD, _, value_MKD = heads
    output = query_QAD.new_empty(*query_QAD.shape[:2], value_MKD.shape[-1])
    lse_AQ = torch.empty(query_QAD.shape[1::-1], dtype=_wide(query_QAD), device=query_QAD.device)
    for queries, keys in _segments(part):
        query_KGqD, key_K1mD, value_K1mD = _segment(heads, queries, keys)
        scores = _scores(query_KGqD, key_K1mD, part.causal, scaling, window)
        lse = scores.logsumexp(-1, keepdim=True)
        output[queries] = _joined((scores - lse).exp() @ value_K1mD).to(output.dtype)
        lse_AQ[:, queries] = lse.squeeze(-1).flatten(0, 1)
    return output, lse_AQ


def plain_backward(answer: Heads, heads: Heads, part: Part, scaling: float, window: int | None) -> Heads:
    """Return this part's share of the gradients by `heads`.

    With P = exp(S - lse), where S are the scores: dV = P' dO, dS = P * (dO V' - sum(dO * O)).

    Args:
        answer: gradient by the output, output and log-sum-exp of all parts together.
        heads: queries, keys and values of this part.
        part: which query sees which key.
        scaling: the factor of the scores.
        window: the last tokens seen, None for all.
    """
    grad_QAD, output_QAD, lse_AQ = answer
    grads = tuple(torch.zeros_like(each, dtype=_wide(each)) for each in heads)
    for queries, keys in _segments(part):
        query, key, value = _segment(heads, queries, keys)
        groups = query.shape[:2]
        grad, output = (_grouped(each[queries], groups[0]) for each in (grad_QAD, output_QAD))
        lse = lse_AQ[:, queries].unflatten(0, groups)[..., None]
        probs = (_scores(query, key, part.causal, scaling, window) - lse).exp()
        pull = probs * (grad @ value.mT - (grad * output).sum(-1, keepdim=True)) * scaling
        grads[0][queries] = _joined(pull @ key)
        grads[1][keys] = (pull.mT @ query).sum(1).transpose(0, 1)
        grads[2][keys] = (probs.mT @ grad).sum(1).transpose(0, 1)
    by_query, by_key, by_value = (grad.to(each.dtype) for grad, each in zip(grads, heads, strict=True))
    return by_query, by_key, by_value


def _segments(part: Part) -> Iterator[tuple[slice, slice]]:
    sides = (pairwise(ends.tolist()) for ends in (part.ends_q, part.ends_k))
    return ((slice(*queries), slice(*keys)) for queries, keys in zip(*sides, strict=True))


def _segment(heads: Heads, queries: slice, keys: slice) -> Heads:
    """Return one segment's heads, those of a key-value head together: [K, G, q, D] and twice [K, 1, m, D]."""
    query, key, value = heads
    num_kv = key.shape[1]
    return _grouped(query[queries], num_kv), _grouped(key[keys], num_kv), _grouped(value[keys], num_kv)


def _grouped(tensor_qAD: torch.Tensor, num_kv: int) -> torch.Tensor:
    return tensor_qAD.to(_wide(tensor_qAD)).transpose(0, 1).unflatten(0, (num_kv, -1))


def _joined(tensor_KGqD: torch.Tensor) -> torch.Tensor:
    return tensor_KGqD.flatten(0, 1).transpose(0, 1)


def _scores(
    query_KGqD: torch.Tensor, key_K1mD: torch.Tensor, causal: bool, scaling: float, window: int | None
) -> torch.Tensor:
    scores = query_KGqD @ key_K1mD.mT * scaling
    if not causal:
        return scores
    num_queries, num_keys = scores.shape[-2:]
    age = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
    seen = (age >= 0) if window is None else (age >= 0) & (age < window)
    return scores.masked_fill(~seen.to(scores.device), -torch.inf)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
