"""Attention over packed rows: one entry in transformers' registry, and behind it a plan of which query token attends to which key token.

All sequences of a micro-batch lie one after the other in one row, so every linear layer, norm and activation
sees real tokens only. Attention alone must know where sequences begin: the row's plan says so. It enters through
transformers' own registry, whatever the kernel, so no model code is patched and every kernel refuses alike.
Under sequence parallelism the row is cut among the ranks of a group; attention alone sees all of it, for some of the
heads, as the last paragraphs say.

`PaddedRows` is the plan for any device and dtype: queries, keys and values of sequences of similar length are
gathered to [B, T], attended causally (right padding lies in no real token's past, so no mask is needed) and put
back. The cost is linear in the tokens times their own sequence's length; a dense [N, N] mask over the packed row
would be quadratic in the micro-batch. `fsdp2.attention.varlen` has the plan for variable-length kernels.

Ulysses sequence parallelism (arXiv 2309.14509): ranks share the tokens of a row, and its heads for attention.

Each rank has a slice of the tokens. For attention it trades that, by one all-to-all, for all tokens of a slice of
the heads, and trades back after it. Everything here is a collective of the `SubGroup` of ranks that share the
same sequences.
"""

# torch.autograd.Function is untyped: its context carries whatever forward put there.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import lcm
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.nn import functional

from offbeat_engine.errors import ConfigError
from offbeat_engine.toolkit.step.planning import plan_length_classes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat_engine.toolkit.world import SubGroup


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


# ruff: noqa: N815 shapes ride in names, of fields too


NAME = "offbeat_packed"

# Shapes: N packed tokens, B sequences of one length class, T tokens of its longest, S sequences, A query heads,
# K key-value heads, D head size.


@dataclass(frozen=True, slots=True, kw_only=True)
class AttnOptions:
    """What a layer asks of attention: the factor of the scores, the last tokens seen (None: all), dropout."""

    scaling: float
    window: int | None
    dropout: float


class RowPlan(Protocol):
    """Which query token attends to which key token of a packed row; made once per micro-batch, used in each layer."""

    @property
    def num_tokens(self) -> int:
        """Return N."""
        ...

    @property
    def peers(self) -> SubGroup | None:
        """Return the ranks among which the row is cut, None where it is whole."""
        ...

    def attend(
        self, query_NAD: torch.Tensor, key_NKD: torch.Tensor, value_NKD: torch.Tensor, options: AttnOptions
    ) -> torch.Tensor:
        """Attend within each sequence of the whole row; [N, A, D]."""
        ...


class PlanRows(Protocol):
    """Plans attention for sequences whose tokens lie anywhere in one packed row."""

    def __call__(
        self, where_ST: torch.Tensor, query_ST: torch.Tensor, lengths: Sequence[int], device: torch.device
    ) -> RowPlan:
        """Return the plan.

        Args:
            where_ST: int64, the place of each token in the row, for the first `lengths[s]` of sequence s. Sequences may
                share the places of a common prefix.
            query_ST: bool, each place once: whose query answers there. Of each sequence those are the last ones, and they
                lie together.
            lengths: tokens of each sequence, >= 1.
            device: where the plan is needed.
        """
        ...


class OpaquePlan:
    """A plan that the compiler passes on without a look: torch 2.11 opens frozen dataclasses, and compiles anew for each."""

    def __init__(self, plan: RowPlan) -> None:
        self.plan = plan


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """How to go from the packed row to padded classes and back: a `RowPlan`.

    Each class says of sequences that attend together where their tokens lie in the packed row: int64 [B, T]. Padding
    repeats the sequence's first token.
    """

    classes: tuple[torch.Tensor, ...]
    back_N: torch.Tensor  # int64, where each packed token lies in the concatenated, flattened classes
    shared: bool = False  # whether some tokens belong to more than one sequence
    peers: SubGroup | None = None

    @property
    def num_tokens(self) -> int:
        """Return N."""
        return len(self.back_N)

    def attend(
        self, query_NAD: torch.Tensor, key_NKD: torch.Tensor, value_NKD: torch.Tensor, options: AttnOptions
    ) -> torch.Tensor:
        """Attend within each sequence, class by class; [N, A, D]."""
        outputs: list[torch.Tensor] = []
        for source_BT in self.classes:
            mask = _window_mask(options.window, source_BT)
            keys, values = (_spread(each, source_BT, self.shared) for each in (key_NKD, value_NKD))
            if query_NAD.is_cuda and (mask is not None or query_NAD.dtype == torch.float32):
                # Flash takes neither. The memory-efficient kernel wants a key head for each query head; else all scores are made.
                repeats = query_NAD.shape[1] // key_NKD.shape[1]
                keys, values = (each.repeat_interleave(repeats, 1) for each in (keys, values))
            output_BATD = functional.scaled_dot_product_attention(
                _spread(query_NAD, source_BT),
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None,
                dropout_p=options.dropout,
                scale=options.scaling,
                enable_gqa=query_NAD.shape[1] != keys.shape[1],
            )
            outputs.append(output_BATD.transpose(1, 2).flatten(0, 1))
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.index_select(0, self.back_N)


def plan_padded(
    where_ST: torch.Tensor, query_ST: torch.Tensor, lengths: Sequence[int], device: torch.device
) -> PaddedRows:
    """Plan `PaddedRows`: a `PlanRows`."""
    lengths_S = torch.tensor(lengths, dtype=torch.int64)
    query_ST = query_ST & (torch.arange(where_ST.shape[1]) < lengths_S[:, None])
    back_N = torch.empty(int(query_ST.sum()), dtype=torch.int64)
    classes: list[torch.Tensor] = []
    offset = 0
    for members in plan_length_classes(lengths):
        members_B, longest = torch.tensor(members), lengths[members[0]]
        real_BT = torch.arange(longest)[None] < lengths_S[members_B, None]
        where_BT = where_ST[members_B, :longest]
        source_BT = torch.where(real_BT, where_BT, where_BT[:, :1])
        query_BT = query_ST[members_B, :longest]
        back_N[source_BT[query_BT]] = query_BT.flatten().nonzero().squeeze(1) + offset
        offset += real_BT.numel()
        classes.append(source_BT.to(device, non_blocking=True))
    shared = len(back_N) < sum(lengths)
    return PaddedRows(tuple(classes), back_N.to(device, non_blocking=True), shared=shared)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend inside each sequence of a packed row; the signature is transformers' attention interface.

    Args:
        module: the attention layer that calls.
        query: [1, A, N, D]; `key` and `value` alike, perhaps with fewer heads.
        key: see `query`.
        value: see `query`.
        attention_mask: must be None; the plan in `options["packed"]` says which token sees which.
        options: `packed` (a `RowPlan`), `scaling`, `dropout`, `sliding_window`; others must be absent.

    Returns:
        [1, N, A, D] and None (no attention weights).
    """
    given: RowPlan | OpaquePlan | None = options.get("packed")
    plan = given.plan if isinstance(given, OpaquePlan) else given
    if plan is None or attention_mask is not None:
        raise ConfigError(
            f"{type(module).__name__} does not hand the packing plan down to attention; set `packing: false`"
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ConfigError(f"packed attention does not know `{name}`; set `packing: false`")
    window, scaling = options.get("sliding_window"), options.get("scaling")
    attn = AttnOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=window if isinstance(window, int) else None,
        dropout=float(options.get("dropout") or 0.0),
    )
    query_NAD, key_NKD, value_NKD = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if plan.peers is None:
        return plan.attend(query_NAD, key_NKD, value_NKD, attn)[None], None
    num_tokens = plan.num_tokens  # without the padding to equal slices
    query_NaD, key_NkD, value_NkD = heads_of_all_tokens(query_NAD, key_NKD, value_NKD, plan.peers)
    output_NaD = plan.attend(query_NaD[:num_tokens], key_NkD[:num_tokens], value_NkD[:num_tokens], attn)
    output_NaD = functional.pad(output_NaD, (0, 0, 0, 0, 0, len(query_NaD) - num_tokens))
    return tokens_of_all_heads(output_NaD, plan.peers)[None], None


def _spread(tensor_NAD: torch.Tensor, source_BT: torch.Tensor, shared: bool = False) -> torch.Tensor:
    """Gather packed tokens into padded rows [B, A, T, D]."""
    index = source_BT.flatten()
    if shared and tensor_NAD.dtype.itemsize < 4:
        spread = cast("torch.Tensor", _GatherShared.apply(tensor_NAD, index))
    else:
        spread = tensor_NAD.index_select(0, index)
    return spread.view(*source_BT.shape, *tensor_NAD.shape[1:]).transpose(1, 2)


class _GatherShared(torch.autograd.Function):
    """`index_select` of rows that many ask for: their gradients are added up in float32 and rounded once."""

    @staticmethod
    def forward(ctx: Any, tensor_NAD: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.shape = tensor_NAD.shape
        return tensor_NAD.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        total = torch.zeros(ctx.shape, dtype=torch.float32, device=grad.device)
        return total.index_add_(0, index, grad.float()).to(grad.dtype), None


def _window_mask(window: int | None, source_BT: torch.Tensor) -> torch.Tensor | None:
    """Return which of the last `window` tokens each sees, or None where plain causal attention says it all."""
    num_tokens = source_BT.shape[1]
    if window is None or window >= num_tokens:
        return None
    position_T = torch.arange(num_tokens, device=source_BT.device)
    age_TT = position_T[:, None] - position_T[None]
    return (age_TT >= 0) & (age_TT < window)


def register() -> None:
    """Make `NAME` known to transformers; harmless to repeat."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _outside_graphs())


@cache
def _outside_graphs() -> Callable[..., tuple[torch.Tensor, None]]:
    """Return packed attention as the compiler leaves it alone, once: it would compile it anew for every plan."""
    return cast("Callable[..., tuple[torch.Tensor, None]]", torch.compiler.disable(packed_attention))
