"""Transformer Engine's matrices and its attention over packed rows, on GPUs where it is installed; products in eight bits.

Norms and rotary angles stay this package's, so that parameters have the names and shapes of the tables. What it keeps beside
parameters (`_extra_state`) is of no use here: scales have no past. **Nobody has run any of this yet.**
"""

# megatron-core is untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import math
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from offbeat_engine.config import Dtype, Refusal
from offbeat_engine.toolkit.collectives import gather

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from offbeat_engine.megatron.config import MegatronConfig
    from offbeat_engine.megatron.families import Shape
    from offbeat_engine.toolkit.world import World

_EIGHT_BITS = ("e4m3", "hybrid")
_MULTIPLE, _CAPABILITY = 16, (8, 9)
_INSTALL = "install transformer-engine[pytorch] 2.9 to 2.11, which megatron-core 0.16.1 asks for"


def is_possible(config: MegatronConfig) -> bool:
    """Return whether its kernels fit `config`, wherever it runs: on CUDA in bfloat16."""
    return config.device == "cuda" and config.dtype == Dtype.BFLOAT16


def has_eight_bits(config: MegatronConfig) -> bool:
    """Return whether products are in eight bits."""
    return config.transformer_engine in _EIGHT_BITS


def is_asked(config: MegatronConfig) -> bool:
    """Return whether a rank without it is refused."""
    return config.transformer_engine is True or has_eight_bits(config)


def multiple_of(config: MegatronConfig) -> int:
    """Return what the sizes of all tensors in a product must be multiples of."""
    return _MULTIPLE if has_eight_bits(config) else 1


def _refusal(reason: str, remedy: str) -> Refusal:
    return Refusal(setting="transformer_engine", reason=reason, remedy=remedy)


def refusals(config: MegatronConfig) -> Iterator[Refusal]:
    """Yield why it cannot be used as `config` asks for; where nothing does (`auto`), nothing is refused."""
    if not is_asked(config):
        return
    if not is_possible(config):
        reason = f"its kernels are for bfloat16 on CUDA, got {config.dtype} on {config.device}"
        yield _refusal(reason, "use auto or false")
    elif find_spec("transformer_engine") is None:
        yield _refusal("Transformer Engine is not installed", f"{_INSTALL}, or use auto or false")


def size_refusals(config: MegatronConfig, shape: Shape) -> Iterator[Refusal]:
    """Yield the sizes of a model that products in eight bits cannot have."""
    multiple, tensor = multiple_of(config), config.tensor_parallel_size
    heads = shape.num_heads + 2 * shape.num_groups
    for what, size in (
        ("hidden dimensions", shape.hidden),
        ("inner dimensions of an MLP on a rank", shape.ffn // tensor),
        ("dimensions of all heads on a rank", shape.num_heads * shape.head_dim // tensor),
        ("dimensions of queries, keys and values on a rank", heads * shape.head_dim // tensor),
    ):
        if size % multiple:
            reason = f"the model has {size} {what}, and products in eight bits take multiples of {multiple}"
            yield _refusal(reason, "use auto, true or false, or fewer ranks of a tensor")


def refusals_here(config: MegatronConfig, world: World) -> list[Refusal]:
    """Return what this rank lacks of what `config` asks for; `refusals` may be asked on another machine."""
    if not is_asked(config) or not torch.cuda.is_available():
        return []
    return list(lacking(config, is_found(), torch.cuda.get_device_capability(world.local_rank)))


def lacking(config: MegatronConfig, found: bool, capability: tuple[int, int]) -> Iterator[Refusal]:
    """Yield what is missing where megatron-core has `found` it or not, on a GPU of that compute capability."""
    if not found:
        reason = "megatron-core cannot import Transformer Engine on this rank"
        yield _refusal(reason, f"{_INSTALL}, or use auto or false")
    if has_eight_bits(config) and capability < _CAPABILITY:
        have, need = (".".join(map(str, each)) for each in (capability, _CAPABILITY))
        reason = f"eight bits need a GPU of compute capability {need}, this one has {have}"
        yield _refusal(reason, "use auto, true or false")


def is_found() -> bool:
    """Return whether megatron-core can use it in this process."""
    from megatron.core.extensions import transformer_engine

    return bool(transformer_engine.HAVE_TE)


def is_used(config: MegatronConfig, world: World) -> bool:
    """Return whether all ranks build their layers of it; a collective where `config` leaves that open."""
    if config.transformer_engine is False or not is_possible(config):
        return False
    return all(gather(world, is_found()))


def settings(config: MegatronConfig) -> dict[str, Any]:
    """Return megatron-core's settings for products in eight bits; weights and gradients stay as they are."""
    if not has_eight_bits(config):
        return {}
    # Its default takes scales from a history of maxima, which a checkpoint would have to hold.
    return {"fp8": config.transformer_engine, "fp8_recipe": "tensorwise"}


@contextmanager
def without_eight_bits(ours: Any) -> Generator[None]:  # noqa: ANN401
    """Let a model with megatron-core's settings `ours` compute in bfloat16 inside: so its answers can be compared with others'."""
    kept, ours.fp8 = ours.fp8, None
    try:
        yield
    finally:
        ours.fp8 = kept


def linears() -> tuple[Any, Any]:
    """Return its matrices that are cut by columns and by rows, as megatron-core wraps them."""
    from megatron.core.extensions import transformer_engine

    return transformer_engine.TEColumnParallelLinear, transformer_engine.TERowParallelLinear


def put_linears(spec: Any, *, grouped: bool = False) -> None:  # noqa: ANN401
    """Let a layer of megatron-core's local spec have `linears` for its own matrices; those of a mixture's router stay.

    `grouped`: a rank's experts are one product, of matrices that keep their shapes.
    """
    column, row = linears()
    attention = spec.submodules.self_attention.submodules
    attention.linear_qkv, attention.linear_proj = column, row
    mlp = spec.submodules.mlp.submodules
    if hasattr(mlp, "experts") and grouped:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        mlp.experts.module, mlp.experts.submodules = TESpecProvider().grouped_mlp_modules(True, False)
        return
    mlp = mlp.experts.submodules if hasattr(mlp, "experts") else mlp
    mlp.linear_fc1, mlp.linear_fc2 = column, row


class PackedAttention(torch.nn.Module):
    """Its causal attention over a packed row; as in `Attention`, the place of a mask is taken by the lengths of the sequences.

    Where ranks share sequences, keys and values go round a ring; what fills a sequence up is taken for tokens of it, which
    nobody sees.
    """

    def __init__(
        self,
        config: Any,  # noqa: ANN401
        layer_number: int,
        attn_mask_type: Any,  # noqa: ANN401
        attention_type: str,
        pg_collection: Any = None,  # noqa: ANN401
        **_: object,
    ) -> None:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        super().__init__()
        self.shared = config.context_parallel_size > 1
        self.inner = TEDotProductAttention(
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type=attention_type,
            # Cosine and sine of query and of key are this much longer.
            softmax_scale=config.offbeat_rotary_scaling**2 / math.sqrt(config.kv_channels),
            cp_comm_type="p2p",
            pg_collection=pg_collection,
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor,
        attn_mask_type: Any,  # noqa: ANN401
        **_: object,
    ) -> torch.Tensor:
        """Return what the tokens of `query` [s, 1, A, D] gather, [s, 1, A * D]; `key` and `value` may have fewer heads."""
        lengths = tuple(map(int, attention_mask.tolist()))
        out = self.inner(
            query.squeeze(1),
            key.squeeze(1),
            value.squeeze(1),
            None,
            attn_mask_type=attn_mask_type,
            packed_seq_params=packed(lengths, self.shared, query.device),
        )
        return out.reshape(out.shape[0], 1, -1)


@lru_cache(maxsize=64)
def packed(lengths: tuple[int, ...], shared: bool, device: torch.device) -> Any:  # noqa: ANN401
    """Return what its attention is told of a whole row whose sequences are so long, filled up where ranks share them.

    These cut by the padded ends. Elsewhere there are none: it would compare both, for which the host waits.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    ends_N = torch.tensor((0, *lengths)).cumsum(0, dtype=torch.int32).to(device, non_blocking=True)
    longest = max(lengths)
    told: dict[str, Any] = {"cu_seqlens_q": ends_N, "cu_seqlens_kv": ends_N}
    if shared:
        told |= {"cu_seqlens_q_padded": ends_N, "cu_seqlens_kv_padded": ends_N}
    return PackedSeqParams(qkv_format="thd", max_seqlen_q=longest, max_seqlen_kv=longest, **told)


def set_windows(ours: Any, windows: tuple[int | None, ...]) -> None:  # noqa: ANN401
    """Tell megatron-core's settings the windows of layers in its words: how far a token looks back, and in which layers."""
    widths = {*windows} - {None}
    if widths:
        (width,) = widths  # a config has one
        assert width is not None
        ours.window_size = (width - 1, 0)
        ours.window_attn_skip_freq = [int(one is not None) for one in windows]
