"""Packed rows by variable-length kernels: sequences are segments of the row, and what they share is attended to once.

Attention to a prefix that several sequences share splits in two: what a token sees of its own sequence's tokens, and
what it sees of the prefix. Each part gives an output and the log-sum-exp of its scores, and those of both together
are

    lse = log(exp(lse_1) + exp(lse_2)),   out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2.

FlashAttention's backward pass (arXiv 2307.08691) takes a token's probabilities from its scores and log-sum-exp, so
given `lse` and `out` of both together it gives for each part that part's share of the gradients, and they add up. All
sequences with the same prefix ask for it in one segment, so the kernel itself adds up what its keys get.

On a GPU the kernel is FlashAttention 2 as it comes with torch (`torch.nn.attention.varlen`, bfloat16), elsewhere a plain
one, for any dtype and slow: it is there to be compared with; that was done on an H200
(torch 2.11).
"""

# torch.autograd.Function and torch's own operators are untyped.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.nn import functional

from offbeat_engine.config import Dtype
from offbeat_engine.errors import ConfigError
from offbeat_engine.fsdp2.attention import packed as attention
from offbeat_engine.fsdp2.attention.packing import RowInputs, padded_inputs
from offbeat_engine.fsdp2.attention.varlen_plain import Heads, Part, plain_backward, plain_forward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat_engine.fsdp2.attention.packed import AttnOptions, PlanRows
    from offbeat_engine.fsdp2.config import Fsdp2Config
    from offbeat_engine.toolkit.hf.layouts import MakeInputs
    from offbeat_engine.toolkit.world import SubGroup


# Shapes: N packed tokens, S sequences or segments, T tokens of the longest, Q query tokens and M key tokens of one
# part, A query heads, K key-value heads, D head size.

_Share = tuple["torch.Tensor | None", torch.Tensor]

MAX_HEAD_SIZE = 256
"""What FlashAttention 2 takes at most."""


class Shared(NamedTuple):
    """What sharing adds to a row: attention to prefixes, and for layers with a window, to sequences as a whole."""

    prefixes: Part | None  # None where all that is shared are whole sequences, which nobody else attends to
    whole: Part


@dataclass(frozen=True, slots=True)
class VarlenRows:
    """A `RowPlan` for variable-length kernels."""

    sequences: Part
    longest: int  # sequence, with what it shares
    num_tokens: int
    shared: Shared | None = None
    peers: SubGroup | None = None

    def attend(
        self, query_NAD: torch.Tensor, key_NKD: torch.Tensor, value_NKD: torch.Tensor, options: AttnOptions
    ) -> torch.Tensor:
        """Attend within each sequence; [N, A, D]."""
        window = options.window if options.window is not None and options.window < self.longest else None
        heads = (query_NAD, key_NKD, value_NKD)
        heads = _as_flash_takes_them(*heads) if query_NAD.is_cuda else heads
        if options.dropout:
            raise ConfigError(
                f"varlen attention knows no dropout, and the model asks for {options.dropout:g}; "
                "set `attention: sdpa`, or train without dropout"
            )
        output_NAD = cast("torch.Tensor", _Varlen.apply(*heads, self.parts(window), options.scaling, window))
        return output_NAD[..., : value_NKD.shape[-1]]

    def parts(self, window: int | None) -> tuple[Part, ...]:
        """Return what attention consists of for a layer that sees the last `window` tokens; None: all."""
        if self.shared is None:
            return (self.sequences,)
        # It reaches back from a token's own place, which a segment of many sequences has not.
        if window is not None:
            return (self.shared.whole,)
        return (self.sequences,) if self.shared.prefixes is None else (self.sequences, self.shared.prefixes)


def plan_varlen(
    where_ST: torch.Tensor, query_ST: torch.Tensor, lengths: Sequence[int], device: torch.device
) -> VarlenRows:
    """Plan `VarlenRows`: a `PlanRows`."""
    num_query_tokens = (
        (query_ST & (torch.arange(where_ST.shape[1]) < torch.tensor(lengths)[:, None])).sum(1).tolist()
    )
    where = [places_T[:length] for places_T, length in zip(where_ST, lengths, strict=True)]
    # A sequence that shares all of its tokens has no query of its own.
    with_queries = [index for index, number in enumerate(num_query_tokens) if number]
    num_queries = [num_query_tokens[index] for index in with_queries]
    plan = VarlenRows(
        sequences=_part(None, None, num_queries, num_queries, device, causal=True),
        longest=max(lengths),
        num_tokens=sum(num_query_tokens),
    )
    if plan.num_tokens == sum(lengths):
        return plan
    keys_M, num_keys = (
        torch.cat([where[index] for index in with_queries]),
        [lengths[index] for index in with_queries],
    )
    whole = _part(None, keys_M, num_queries, num_keys, device, causal=True)
    return replace(plan, shared=Shared(_prefixes(where, num_query_tokens, device), whole))


def _prefixes(where: list[torch.Tensor], num_query_tokens: list[int], device: torch.device) -> Part | None:
    """Return the part in which sequences see what they share with others, all that share the same in one segment."""
    # Both by the place of the last token that is shared: it tells the prefix.
    queries: dict[int, list[torch.Tensor]] = {}
    keys: dict[int, torch.Tensor] = {}
    for places_T, num_own in zip(where, num_query_tokens, strict=True):
        first = len(places_T) - num_own
        if first and num_own:
            last = int(places_T[first - 1])
            queries.setdefault(last, []).append(places_T[first:])
            keys[last] = places_T[:first]
    if not queries:
        return None
    queries_Q, keys_M = [torch.cat(each) for each in queries.values()], list(keys.values())
    num_queries, num_keys = ([len(each) for each in side] for side in (queries_Q, keys_M))
    return _part(torch.cat(queries_Q), torch.cat(keys_M), num_queries, num_keys, device, causal=False)


def _part(
    queries_Q: torch.Tensor | None,
    keys_M: torch.Tensor | None,
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    device: torch.device,
    *,
    causal: bool,
) -> Part:
    queries_Q, keys_M = (
        None if each is None else each.to(device, non_blocking=True) for each in (queries_Q, keys_M)
    )
    ends_q, ends_k = (
        torch.tensor([0, *accumulate(sizes)], dtype=torch.int32).to(device, non_blocking=True)
        for sizes in (lengths_q, lengths_k)
    )
    return Part(queries_Q, keys_M, ends_q, ends_k, max(lengths_q), max(lengths_k), causal)


class _Varlen(torch.autograd.Function):
    """Attention in parts, as on top of this file. The first part has a query for every token."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 torch wants tensors as positional arguments
        ctx: Any,
        query_NAD: torch.Tensor,
        key_NKD: torch.Tensor,
        value_NKD: torch.Tensor,
        parts: tuple[Part, ...],
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        forward = _flash_forward if query_NAD.is_cuda else plain_forward
        heads = (query_NAD, key_NKD, value_NKD)
        first, *others = parts
        output_NAD, lse_AN = forward(_picked(first, heads), first, scaling, window)
        for part in others:
            assert part.queries_Q is not None
            output_QAD, lse_AQ = forward(_picked(part, heads), part, scaling, window)
            before_AQ, before_QAD = _pick(lse_AN, part.queries_Q, 1), _pick(output_NAD, part.queries_Q)
            # The weight of the second: exp(lse_2 - lse) is the sigmoid of lse_2 - lse_1.
            weight_QA1 = (lse_AQ - before_AQ).sigmoid().T[..., None]
            wide = weight_QA1.dtype
            both_QAD = torch.lerp(before_QAD.to(wide), output_QAD.to(wide), weight_QA1)
            output_NAD.index_copy_(0, part.queries_Q, both_QAD.to(output_NAD.dtype))
            lse_AN.index_copy_(1, part.queries_Q, torch.logaddexp(before_AQ, lse_AQ))
        ctx.save_for_backward(*heads, output_NAD, lse_AN)
        ctx.parts, ctx.scaling, ctx.window = parts, scaling, window
        return output_NAD

    @staticmethod
    def backward(ctx: Any, grad_NAD: torch.Tensor) -> tuple[Any, ...]:
        query_NAD, key_NKD, value_NKD, output_NAD, lse_AN = ctx.saved_tensors
        backward = _flash_backward if query_NAD.is_cuda else plain_backward
        queries: list[_Share] = []
        keys: list[_Share] = []
        values: list[_Share] = []
        for part in ctx.parts:
            answer = (
                _pick(grad_NAD, part.queries_Q).contiguous(),
                _pick(output_NAD, part.queries_Q),
                _pick(lse_AN, part.queries_Q, 1),
            )
            heads = _picked(part, (query_NAD, key_NKD, value_NKD))
            of_q, of_k, of_v = backward(answer, heads, part, ctx.scaling, ctx.window)
            queries.append((part.queries_Q, of_q))
            keys.append((part.keys_M, of_k))
            values.append((part.keys_M, of_v))
        return (
            _total(queries, query_NAD),
            _total(keys, key_NKD),
            _total(values, value_NKD),
            None,
            None,
            None,
        )


def _pick(tensor: torch.Tensor, index: torch.Tensor | None, dim: int = 0) -> torch.Tensor:
    return tensor if index is None else tensor.index_select(dim, index)


def _picked(part: Part, heads: Heads) -> Heads:
    return _pick(heads[0], part.queries_Q), _pick(heads[1], part.keys_M), _pick(heads[2], part.keys_M)


def _total(shares: list[_Share], like: torch.Tensor) -> torch.Tensor:
    """Add up what each part says of a gradient, in float32: many parts and sequences may speak of one key."""
    if len(shares) == 1 and shares[0][0] is None:
        return shares[0][1]
    total = torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))
    for index, share in shares:
        total = total.add_(share) if index is None else total.index_add_(0, index, share.to(total.dtype))
    return total.to(like.dtype)


def _flash_forward(
    heads: Heads, part: Part, scaling: float, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    output, lse_AQ = varlen_attn(
        *heads, part.ends_q, part.ends_k, part.longest_q, part.longest_k,
        return_aux=AuxRequest(lse=True), scale=scaling, window_size=_sides(part, window), **_grouped(),
    )  # fmt: skip
    wanted = heads[0].shape[1::-1]
    if lse_AQ.shape != wanted:  # ROCm builds of torch before 2.13 pad it
        raise ConfigError(
            f"varlen attention of torch {torch.__version__} answers a log-sum-exp of shape {list(lse_AQ.shape)}, "
            f"expected {list(wanted)}; set `attention: sdpa`"
        )
    return output, lse_AQ


def _flash_backward(answer: Heads, heads: Heads, part: Part, scaling: float, window: int | None) -> Heads:
    from torch.nn.attention import varlen  # registers the operator

    del varlen
    grad, output, lse_AQ = answer
    sides = _sides(part, window)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=grad.device)
    return torch.ops.torch_attn._varlen_attn_backward(  # noqa: SLF001 its public form takes no merged log-sum-exp
        grad, *heads, output, lse_AQ, part.ends_q, part.ends_k, part.longest_q, part.longest_k, sides == (-1, 0),
        no_dropout, scaling, list(sides),
    )  # fmt: skip


def _sides(part: Part, window: int | None) -> tuple[int, int]:
    """Return how many tokens left and right of its own place each keys, -1 for all."""
    if not part.causal:
        return -1, -1
    return (-1 if window is None else window - 1), 0


@cache
def _grouped() -> dict[str, Any]:
    """Return what varlen attention must be told where key-value heads are fewer; torch 2.11 takes that as it comes."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _as_flash_takes_them(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Heads:
    """Return heads in one half precision and of one size, a multiple of 8: zeros change no score and no output."""
    sizes = (query.shape[-1], value.shape[-1])
    size = -(-max(sizes) // 8) * 8
    if size > MAX_HEAD_SIZE or value.dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(
            f"varlen attention takes heads of at most {MAX_HEAD_SIZE} in half precision, got {max(sizes)} in "
            f"{value.dtype}; set `attention: sdpa`"
        )
    # Rotary embeddings may have left queries and keys in float32.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if {*sizes} != {size}:  # padding by nothing would copy
        query, key, value = (functional.pad(each, (0, size - each.shape[-1])) for each in (query, key, value))
    return query, key, value


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One way to attend.

    `padded` is its name in transformers for padded rows, `plan` how it sees packed ones; None where it takes none. Packed
    rows enter through `attention.NAME` whatever the kernel, so what that refuses is refused with all of them.
    """

    padded: str | None = None
    plan: PlanRows | None = None
    shares: bool = False  # whether a prefix that sequences have in common may lie in the row once
    cuda_dtypes: frozenset[Dtype] = frozenset(Dtype)
    capability: tuple[int, int] = (0, 0)  # of a GPU, at least


KERNELS = {
    "eager": Kernel(padded="eager"),
    "sdpa": Kernel(padded="sdpa", plan=attention.plan_padded, shares=True),
    "varlen": Kernel(
        plan=plan_varlen, shares=True, cuda_dtypes=frozenset({Dtype.BFLOAT16}), capability=(8, 0)
    ),
}


def kernel_name(config: Fsdp2Config) -> str:
    """Return which of `KERNELS` the setting `attention` comes to; "auto" follows settings alone, not what is installed."""
    if config.attention != "auto":
        return config.attention
    on_cuda = config.device == "cuda" and config.dtype in KERNELS["varlen"].cuda_dtypes
    return "varlen" if config.packing and on_cuda else "sdpa"


def implementation(config: Fsdp2Config) -> str:
    """Return the transformers attention implementation that `config` comes to."""
    if config.packing:
        return attention.NAME
    name = KERNELS[kernel_name(config)].padded
    assert name is not None  # refused before
    return name


def inputs_maker(config: Fsdp2Config) -> MakeInputs:
    """Return the arrangement of tokens that goes with the attention of `config`."""
    kernel = KERNELS[kernel_name(config)]
    if not config.packing:
        return padded_inputs
    assert kernel.plan is not None  # refused before
    # Ranks that share a row cut it where they like, which a shared prefix does not survive.
    alone = config.sequence_parallel_size == 1
    return RowInputs(kernel.plan, share=config.share_prefixes and kernel.shares and alone)


def refusal(config: Fsdp2Config) -> tuple[str, str] | None:
    """Return why the kernel of `config` cannot go with its other settings, and what to do; None if it can."""
    name = kernel_name(config)
    kernel = KERNELS[name]
    if config.packing and kernel.plan is None:
        return f"{name} attention knows no packed rows", "set `packing: false`, or use auto"
    if not config.packing and kernel.padded is None:
        return f"{name} attention knows packed rows only", "set `packing: true`, or use auto"
    if config.device == "cuda" and config.dtype not in kernel.cuda_dtypes:
        return f"{name} on a CUDA device takes {', '.join(sorted(kernel.cuda_dtypes))}", "use auto"
    return None


def missing_here(config: Fsdp2Config, capability: tuple[int, int]) -> str | None:
    """Return what this process lacks for the kernel of `config` on a GPU of that compute capability, None if nothing."""
    name = kernel_name(config)
    kernel = KERNELS[name]
    if capability < kernel.capability:
        have, need = (".".join(map(str, each)) for each in (capability, kernel.capability))
        return f"{name} needs a GPU of compute capability {need}, this one has {have}"
    return None
