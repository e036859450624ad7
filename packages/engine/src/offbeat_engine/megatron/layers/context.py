"""Context parallelism: ranks share the tokens of every sequence; keys and values of all of them meet in attention.

A sequence is filled up to a multiple of twice the ranks and cut into that many chunks. Rank r has chunk r and the one that is r from
the end, so that all ranks have the same to do, and the keys and values of all chunks (section 3.3.2 of arXiv 2407.21783).
Everything that answers with tensors of other ranks is a collective of theirs.
"""

# megatron-core is untyped, and so is torch.autograd.Function: its context carries whatever forward put there.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from offbeat_engine.toolkit import collectives
from offbeat_engine.toolkit.step.planning import plan_length_classes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat_engine.megatron.families import Among
    from offbeat_engine.toolkit.hf.layouts import Layout


Count = TypeVar("Count", int, torch.Tensor)


# S = tokens of a packed row, N = sequences of one class of lengths, L = the longest of them, A = heads here, D = head size.


class RmsNorm(torch.nn.Module):
    """Root mean square norm (arXiv 1910.07467) in float32, rounded where Hugging Face rounds.

    Its gradient is a part of the whole where the ranks of a tensor share the tokens, which megatron-core adds up then.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: object) -> None:  # noqa: ANN401
        super().__init__()
        on = torch.device("cpu") if config.use_cpu_initialization else torch.device("cuda")
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=on))
        self.eps = eps
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 a name of megatron-core's

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return `states` over their root mean square, times the weight."""
        wide = states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(states.dtype)


class Attention(torch.nn.Module):
    """Causal attention over a packed row; the place of a mask is taken by the lengths of its sequences, int64 on the CPU.

    Sequences of similar length go through PyTorch's kernel together, padded to the longest of them: what is to the right of
    a token does not reach it. No matrix of the whole row's size exists.
    """

    def __init__(self, config: Any, layer_number: int, **_: object) -> None:  # noqa: ANN401
        super().__init__()
        self.window: int | None = config.offbeat_windows[layer_number - 1]
        self.rotary_scaling: float = config.offbeat_rotary_scaling

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor,
        **_: object,
    ) -> torch.Tensor:
        """Return what the tokens of `query` [S, 1, A, D] gather, [S, 1, A * D]; `key` and `value` may have fewer heads."""
        lengths = tuple(map(int, attention_mask.tolist()))
        rows = [states.squeeze(1) for states in (query, key, value)]
        found = torch.zeros_like(rows[0])
        for index_NL, real_R, place_R in _classes(lengths, query.device):
            queries, keys, values = (states[index_NL].transpose(1, 2) for states in rows)
            longest = index_NL.shape[1]
            seen = None if self.window is None or longest <= self.window else _seen(longest, self.window)
            out = functional.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=None if seen is None else seen.to(query.device, non_blocking=True),
                is_causal=seen is None,
                # Cosine and sine of query and of key are this much longer.
                scale=self.rotary_scaling**2 / math.sqrt(query.shape[-1]),
                enable_gqa=queries.shape[1] != keys.shape[1],
            )
            found = found.index_put((place_R,), out.transpose(1, 2).flatten(0, 1)[real_R])
        return found.flatten(1)[:, None]


@lru_cache(maxsize=64)
def _classes(
    lengths: tuple[int, ...], device: torch.device
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]:
    """Return for each class of lengths: where its tokens lie in the row [N, L], which of [N * L] are real, and where those go."""
    starts = torch.tensor((0, *lengths)).cumsum(0)
    classes: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for members in plan_length_classes(lengths):
        length_N = torch.tensor([lengths[index] for index in members])
        position_L = torch.arange(int(length_N.max()))
        index_NL = starts[torch.tensor(members)][:, None] + position_L
        real_R = (position_L < length_N[:, None]).flatten().nonzero().squeeze(1)
        place_R = index_NL.flatten()[real_R]
        index_NL = index_NL.clamp(max=int(starts[-1]) - 1)  # padding looks at some token, which nobody sees
        at = partial(torch.Tensor.to, device=device, non_blocking=True)
        classes.append((at(index_NL), at(real_R), at(place_R)))
    return tuple(classes)


@lru_cache(maxsize=8)
def _seen(length: int, window: int) -> torch.Tensor:
    apart = torch.arange(length)[:, None] - torch.arange(length)
    return (apart >= 0) & (apart < window)


class Rotary(torch.nn.Module):
    """Rotary angles (arXiv 2104.09864) of the row at hand, by each token's position in its own sequence.

    Frequencies are Hugging Face's own, and so is `scaling`, the factor on cosine and sine (yarn, arXiv 2309.00071; longrope), which
    attention takes. megatron-core asks for as many angles as a row is long, and hands them to the layers;
    `positions_S` is set before each forward pass.
    """

    def __init__(self, config: Any) -> None:  # noqa: ANN401 a config of transformers
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        super().__init__()
        theirs: Any = LlamaRotaryEmbedding(config)
        self._frequencies: torch.Tensor = theirs.inv_freq.float()
        self.scaling = float(theirs.attention_scaling)
        self.positions_S: torch.Tensor = torch.zeros(0, dtype=torch.int64)

    def get_rotary_seq_len(self, *_: object, **__: object) -> int:
        """Return the tokens of the row."""
        return len(self.positions_S)

    def forward(self, _: int, **__: object) -> torch.Tensor:
        """Return the angles, float32 [S, 1, 1, D]."""
        if self._frequencies.device != self.positions_S.device:
            self._frequencies = self._frequencies.to(self.positions_S.device, non_blocking=True)
        angles = torch.outer(self.positions_S.float(), self._frequencies)
        return torch.cat((angles, angles), -1)[:, None, None]


# ruff: noqa: N815 shapes ride in names, of fields too


# S = tokens of a row, P = ranks that share them, s = S / P, N = sequences of one length, q = tokens of a chunk, L = those it
# looks at, A = heads here, K = key-value heads here, D = head size, M = tokens asked for, C = answers per token.


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """Return which of the `2 * size` chunks of a sequence a rank has, in the order in which they lie there."""
    return rank, 2 * size - 1 - rank


def filled_up(num_tokens: Count, size: int) -> Count:
    """Return how long a sequence of `num_tokens` is, or each of several, once `size` ranks can share it."""
    multiple = 2 * size if size > 1 else 1
    return -(-num_tokens // multiple) * multiple


@lru_cache(maxsize=64)
def dealt(lengths: tuple[int, ...], size: int) -> torch.Tensor:
    """Return which tokens of a row each rank has, int64 [P, s]; `lengths` are those of its sequences, filled up."""
    ranks: list[torch.Tensor] = []
    for rank in range(size):
        parts: list[torch.Tensor] = []
        start = 0
        for length in lengths:
            width = length // (2 * size)
            parts += [
                torch.arange(start + number * width, start + (number + 1) * width)
                for number in chunks_of(rank, size)
            ]
            start += length
        ranks.append(torch.cat(parts))
    return torch.stack(ranks)


def cut(layout: Layout, sharing: Among) -> Layout:
    """Return the part of a row's layout that this rank answers; `place_M` is that of all ranks' answers, one rank after the other."""
    lengths = cast("torch.Tensor", layout.model_inputs["lengths"])
    order_Ps = dealt(tuple(map(int, lengths.tolist())), sharing.size)
    at_S = _inverse(order_Ps).to(layout.select_M.device)
    at_M = at_S[layout.select_M]
    owner_M = at_M // order_Ps.shape[1]
    mine_M = owner_M == sharing.rank
    temperature_M = layout.temperature_M
    return replace(
        layout,
        select_M=at_M[mine_M] % order_Ps.shape[1],
        targets_M=layout.targets_M[mine_M],
        temperature_M=None if temperature_M is None else temperature_M[mine_M],
        place_M=layout.place_M[owner_M.argsort(stable=True)],
        counts_P=tuple(map(int, owner_M.bincount(minlength=sharing.size).tolist())),
    )


def _inverse(order_Ps: torch.Tensor) -> torch.Tensor:
    """Return for each token of the row where it is, int64 [S], with the ranks' tokens one rank after the other."""
    return order_Ps.flatten().argsort()


def gather_answers(answers: Sequence[torch.Tensor], layout: Layout) -> tuple[torch.Tensor, ...]:
    """Join the ranks' answers, float32 [M] each, in rank order: the same tensors on all of them.

    Each rank's loss is the whole one, and its gradients are those by its own answers: over the ranks they add up.
    """
    return collectives.gather_answers(answers, layout.counts_P, _group(), adds_up=False)


@dataclass(frozen=True, slots=True)
class _Work:
    """The same chunk of all sequences of one length: which tokens of this rank look at which of all ranks' tokens."""

    query_Nq: torch.Tensor
    key_NL: torch.Tensor
    seen_qL: torch.Tensor | None  # with a window


class SharedAttention(Attention):
    """As `Attention` over the tokens that this rank has of a row, whose sequences are as long as the mask says."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor,
        **_: object,
    ) -> torch.Tensor:
        """Return what this rank's tokens gather, [s, 1, A * D], of `query` [s, 1, A, D] and its `key` and `value`."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        group = _group()
        place = (dist.get_rank(group), dist.get_world_size(group))
        lengths = tuple(map(int, attention_mask.tolist()))
        # Forward gathers, and backward adds up what all ranks say about this one's keys and values.
        both_SKD = gather_from_sequence_parallel_region(
            torch.cat((key.squeeze(1), value.squeeze(1)), -1), group=group
        )
        query_sAD = query.squeeze(1)
        found = torch.zeros_like(query_sAD)
        for work in _works(lengths, place, self.window, query.device):
            keys, values = both_SKD[work.key_NL].transpose(1, 2).chunk(2, -1)
            out = functional.scaled_dot_product_attention(
                query_sAD[work.query_Nq].transpose(1, 2),
                keys,
                values,
                **_mask(work),
                scale=self.rotary_scaling**2 / math.sqrt(query.shape[-1]),
                enable_gqa=query.shape[2] != key.shape[2],
            )
            found = found.index_put((work.query_Nq,), out.transpose(1, 2))
        return found.flatten(1)[:, None]


def _mask(work: _Work) -> dict[str, Any]:
    num_queries, num_keys = work.query_Nq.shape[1], work.key_NL.shape[1]
    if work.seen_qL is not None:
        return {"attn_mask": work.seen_qL}
    if num_queries == num_keys:
        return {"is_causal": True}
    # The last query is the last key's token: a kernel that knows of that needs no matrix.
    return {"attn_mask": causal_lower_right(num_queries, num_keys)}


@lru_cache(maxsize=64)
def _works(
    lengths: tuple[int, ...], place: tuple[int, int], window: int | None, device: torch.device
) -> tuple[_Work, ...]:
    """Return what the rank `place[0]` of `place[1]` has to do for a row."""
    rank, size = place
    at_S = _inverse(dealt(lengths, size))
    starts = torch.tensor((0, *lengths)).cumsum(0)
    works: list[_Work] = []
    for length in sorted({*lengths} - {0}, reverse=True):
        start_N1 = starts[[index for index, one in enumerate(lengths) if one == length]][:, None]
        width = length // (2 * size)
        for half, number in enumerate(chunks_of(rank, size)):
            first, stop = number * width, (number + 1) * width
            after = 0 if window is None else max(0, first + 1 - window)
            seen_qL = None
            if window is not None and stop > window:
                apart = torch.arange(first, stop)[:, None] - torch.arange(after, stop)
                seen_qL = ((apart >= 0) & (apart < window)).to(device, non_blocking=True)
            query_Nq = start_N1 // size + half * width + torch.arange(width)
            key_NL = at_S[start_N1 + torch.arange(after, stop)]
            query_Nq, key_NL = (each.to(device, non_blocking=True) for each in (query_Nq, key_NL))
            works.append(_Work(query_Nq, key_NL, seen_qL))
    return tuple(works)


def _group() -> Any:  # noqa: ANN401
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group()
