"""Ulysses sequence parallelism (arXiv 2309.14509): ranks share the tokens of a row, and its heads for attention.

Each rank has a slice of the tokens. For attention it trades that, by one all-to-all, for all tokens of a slice of
the heads, and trades back after it. Everything here is a collective of the `SubGroup` of ranks that share the
same sequences.
"""

# torch.autograd.Function is untyped: its context carries whatever forward put there.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from offbeat_engine.errors import ConfigError
from offbeat_engine.toolkit import collectives

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat_engine.world import SubGroup

# Shapes: P peers, n tokens of one rank's slice, N = P * n tokens of the row, A query heads, K key-value heads,
# a and k those of one rank, D head size, M tokens asked for, C answers per token.


def padded_length(num_tokens: int, num_peers: int) -> int:
    """Return the smallest multiple of `num_peers` that holds `num_tokens`."""
    return -(-num_tokens // num_peers) * num_peers


def heads_of_all_tokens(
    query_nAD: torch.Tensor, key_nKD: torch.Tensor, value_nKD: torch.Tensor, peers: SubGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Trade this rank's tokens with all heads for all tokens with this rank's heads: [N, a, D] and twice [N, k, D].

    Where key-value heads do not come out even they are repeated, as few times as possible, so that each rank gets
    the ones its query heads look at.

    Raises:
        ConfigError: the query heads cannot be shared evenly.
    """
    num_heads, num_kv = query_nAD.shape[1], key_nKD.shape[1]
    if num_heads % peers.size:
        raise ConfigError(
            f"{num_heads} attention heads cannot be shared by {peers.size} ranks; "
            "set `sequence_parallel_size` to a divisor of the number of heads"
        )
    repeats = lcm(num_kv, peers.size) // num_kv
    if repeats > 1:
        key_nKD, value_nKD = (tensor.repeat_interleave(repeats, 1) for tensor in (key_nKD, value_nKD))
    # One message to each peer: its heads of the queries, keys and values of our tokens.
    parts = [tensor.unflatten(1, (peers.size, -1)).flatten(2) for tensor in (query_nAD, key_nKD, value_nKD)]
    sent_PnF = torch.cat(parts, -1).transpose(0, 1).contiguous()
    row_NF = _exchange(sent_PnF, peers).flatten(0, 1)
    query, key, value = row_NF.split([part.shape[2] for part in parts], dim=-1)
    sizes = (query_nAD.shape[2], key_nKD.shape[2], value_nKD.shape[2])
    query, key, value = (
        tensor.unflatten(1, (-1, size)) for tensor, size in zip((query, key, value), sizes, strict=True)
    )
    return query, key, value


def tokens_of_all_heads(output_NaD: torch.Tensor, peers: SubGroup) -> torch.Tensor:
    """Undo `heads_of_all_tokens` for the outcome of attention: [N, a, D] becomes [n, A, D]."""
    sent_PnaD = output_NaD.unflatten(0, (peers.size, -1)).contiguous()
    return _exchange(sent_PnaD, peers).transpose(0, 1).flatten(1, 2)


def gather_answers(
    answers: Sequence[torch.Tensor], counts: Sequence[int], peers: SubGroup
) -> tuple[torch.Tensor, ...]:
    """Join the peers' answers, float32 [counts[p]] each, in rank order: the same tensors on every peer.

    Backward adds up what all peers say about an answer and hands it to the rank that gave it, so the peers' losses
    add up: a loss that each computes in full counts once per peer.
    """
    return collectives.gather_answers(answers, counts, peers.group, adds_up=True)


def _exchange(parts_P: torch.Tensor, peers: SubGroup) -> torch.Tensor:
    return cast("torch.Tensor", _Exchange.apply(parts_P, peers))


class _Exchange(torch.autograd.Function):
    """Part p of rank r becomes part r of rank p; that is its own inverse, and its own transpose."""

    @staticmethod
    def forward(ctx: Any, parts_P: torch.Tensor, peers: SubGroup) -> torch.Tensor:
        ctx.peers = peers
        got_P = torch.empty_like(parts_P)
        dist.all_to_all_single(got_P, parts_P, group=peers.group)
        return got_P

    @staticmethod
    def backward(ctx: Any, grad_P: torch.Tensor) -> tuple[Any, ...]:
        return _exchange(grad_P.contiguous(), ctx.peers), None
