"""Block-diagonal causal attention over packed rows, without a mask and without a special kernel.

All sequences of a micro-batch lie one after the other in one row, so every linear layer, norm and activation
sees real tokens only. Attention alone is done in padded form: queries, keys and values of sequences of similar
length are gathered to [B, T], attended causally (right padding lies in no real token's past, so no mask is
needed) and put back. The cost is linear in the tokens times their own sequence's length; a dense
[N, N] mask over the packed row would be quadratic in the micro-batch.

It enters through transformers' own attention registry: no model code is patched. Where flash-attention is
installed its variable-length kernel is used instead. Under sequence parallelism the row is cut among the ranks of
a group; attention alone sees all of it, for some of the heads (see `fsdp2.ulysses`).
"""

# transformers is typed in part: its registry takes any callable. flash-attn is not typed, and often not installed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false

# ruff: noqa: N815 shapes ride in names, of fields too

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, cast

import torch
from torch.nn import functional

from offbeat_engine.errors import ConfigError
from offbeat_engine.fsdp2.ulysses import heads_of_all_tokens, tokens_of_all_heads
from offbeat_engine.toolkit.planning import plan_length_classes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat_engine.world import SubGroup

NAME = "offbeat_packed"

# Shapes: N packed tokens, B sequences of one length class, T tokens of its longest, A heads, D head size.


@dataclass(frozen=True, slots=True)
class LengthClass:
    """Sequences that attend together: where their tokens lie in the packed row."""

    source_BT: torch.Tensor  # int64, index into the packed row; padding repeats the sequence's first token
    real_BT: torch.Tensor  # bool


@dataclass(frozen=True, slots=True)
class PackedRows:
    """How to go from the packed row to padded classes and back; made once per micro-batch, used in each layer."""

    classes: tuple[LengthClass, ...]
    back_N: torch.Tensor  # int64, where each packed token lies in the concatenated, flattened classes
    peers: SubGroup | None = None  # the ranks among which the row is cut

    @property
    def num_tokens(self) -> int:
        """Return N."""
        return len(self.back_N)


@dataclass(frozen=True, slots=True)
class FlashRows:
    """The same plan for flash-attention's variable-length kernel."""

    ends_S: torch.Tensor  # int32 [sequences + 1], where each sequence starts, and the last one ends
    longest: int
    num_tokens: int
    peers: SubGroup | None = None


def packed_rows(lengths: Sequence[int], device: torch.device) -> PackedRows:
    """Plan attention for sequences of `lengths` (>= 1) that lie in this order in one packed row."""
    lengths_S = torch.tensor(lengths, dtype=torch.int64)
    starts_S = lengths_S.cumsum(0) - lengths_S
    where_ST = starts_S[:, None] + torch.arange(max(lengths))
    return plan_rows(where_ST, torch.ones_like(where_ST, dtype=torch.bool), lengths, device)


def plan_rows(
    where_ST: torch.Tensor, own_ST: torch.Tensor, lengths: Sequence[int], device: torch.device
) -> PackedRows:
    """Plan attention for sequences whose tokens lie anywhere in one packed row.

    Args:
        where_ST: int64, the place of each token in the row, for the first `lengths[s]` of sequence s. Sequences may
            share places where they begin alike.
        own_ST: bool, each place once: whose query answers there.
        lengths: tokens of each sequence, >= 1.
        device: where the plan is needed.
    """
    lengths_S = torch.tensor(lengths, dtype=torch.int64)
    own_ST = own_ST & (torch.arange(where_ST.shape[1]) < lengths_S[:, None])
    back_N = torch.empty(int(own_ST.sum()), dtype=torch.int64)
    classes: list[LengthClass] = []
    offset = 0
    for members in plan_length_classes(lengths):
        members_B, longest = torch.tensor(members), lengths[members[0]]
        real_BT = torch.arange(longest)[None] < lengths_S[members_B, None]
        where_BT = where_ST[members_B, :longest]
        source_BT = torch.where(real_BT, where_BT, where_BT[:, :1])
        own_BT = own_ST[members_B, :longest]
        back_N[source_BT[own_BT]] = own_BT.flatten().nonzero().squeeze(1) + offset
        offset += real_BT.numel()
        classes.append(LengthClass(source_BT.to(device), real_BT.to(device)))
    return PackedRows(tuple(classes), back_N.to(device))


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Attend inside each sequence of a packed row; the signature is transformers' attention interface.

    Args:
        module: the attention layer that calls.
        query: [1, A, N, D]; `key` and `value` alike, perhaps with fewer heads.
        key: see `query`.
        value: see `query`.
        attention_mask: must be None; the plan in `options["packed"]` says which token sees which.
        options: `packed` (a `PackedRows`), `scaling`, `dropout`, `sliding_window`; others must be absent.

    Returns:
        [1, N, A, D] and None (no attention weights).
    """
    packed = options.get("packed")
    if not isinstance(packed, PackedRows | FlashRows) or attention_mask is not None:
        raise ConfigError(
            f"{type(module).__name__} does not hand the packing plan down to attention; set `packing: false`"
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ConfigError(f"packed attention does not know `{name}`; set `packing: false`")
    query_NAD, key_NAD, value_NAD = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    peers = packed.peers
    if peers is None:
        return _attend(packed, query_NAD, key_NAD, value_NAD, options)[None], None
    num_tokens = packed.num_tokens  # without the padding to equal slices
    query_NaD, key_NaD, value_NaD = heads_of_all_tokens(query_NAD, key_NAD, value_NAD, peers)
    output_NaD = _attend(
        packed, query_NaD[:num_tokens], key_NaD[:num_tokens], value_NaD[:num_tokens], options
    )
    output_NaD = functional.pad(output_NaD, (0, 0, 0, 0, 0, len(query_NaD) - num_tokens))
    return tokens_of_all_heads(output_NaD, peers)[None], None


def _attend(
    packed: PackedRows | FlashRows,
    query_NAD: torch.Tensor,
    key_NAD: torch.Tensor,
    value_NAD: torch.Tensor,
    options: dict[str, object],
) -> torch.Tensor:
    """Attend within each sequence of the whole row; [N, A, D]."""
    window = options.get("sliding_window")
    window = window if isinstance(window, int) else None
    dropout = float(options.get("dropout") or 0.0)  # type: ignore[arg-type]
    scaling = options.get("scaling")
    if isinstance(packed, FlashRows):
        return _attend_flash(packed, (query_NAD, key_NAD, value_NAD), dropout, scaling, window)
    outputs: list[torch.Tensor] = []
    for group in packed.classes:
        mask = _window_mask(window, group.source_BT)
        output_BATD = functional.scaled_dot_product_attention(
            _spread(query_NAD, group.source_BT),
            _spread(key_NAD, group.source_BT),
            _spread(value_NAD, group.source_BT),
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=dropout,
            scale=scaling,  # type: ignore[arg-type]
            enable_gqa=query_NAD.shape[1] != key_NAD.shape[1],
        )
        outputs.append(output_BATD.transpose(1, 2).flatten(0, 1))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.index_select(0, packed.back_N)


def _attend_flash(
    packed: FlashRows,
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dropout: float,
    scaling: object,
    window: int | None,
) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        *(tensor.contiguous() for tensor in heads),
        cu_seqlens_q=packed.ends_S,
        cu_seqlens_k=packed.ends_S,
        max_seqlen_q=packed.longest,
        max_seqlen_k=packed.longest,
        dropout_p=dropout,
        softmax_scale=scaling,
        causal=True,
        # The kernel counts the tokens left of the own one.
        window_size=(-1, -1) if window is None else (window - 1, 0),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def _spread(tensor_NAD: torch.Tensor, source_BT: torch.Tensor) -> torch.Tensor:
    """Gather packed tokens into padded rows [B, A, T, D]."""
    spread = tensor_NAD.index_select(0, source_BT.flatten())
    return spread.view(*source_BT.shape, *tensor_NAD.shape[1:]).transpose(1, 2)


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
