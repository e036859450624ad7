"""The families as data: how Hugging Face's names and shapes map to megatron-core's, and what of a config is covered."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from offbeat_engine.capabilities import Refusal


class Cut(Enum):
    """How a weight of Megatron's is made of weights of the files, and shared among the ranks of a tensor."""

    COPY = "whole on every rank"
    ROW = "columns shared out"
    VOCAB = "rows shared out, filled up to a multiple of the ranks"
    QKV = "by groups: the queries of a group, its key, its value; groups shared out"
    GLU = "gate over up, rows of each shared out"


@dataclass(frozen=True, slots=True)
class Entry:
    """One weight: Megatron's name, those in the files, in the order in which they lie in it, the cut, and `sizes` in the files.

    Names are of a layer where both speak of one, `{expert}` is one of a mixture. Sizes are numbers, or fields of `Shape`; where
    queries, keys and values make one weight they are those of the queries.
    """

    ours: str
    theirs: tuple[str, ...]
    cut: Cut
    sizes: tuple[str | int, ...] = ("hidden",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What is special in a model type. `must` are settings of its config that only one value is covered of."""

    layer: tuple[Entry, ...]
    qkv_bias: bool = False
    qk_norm: bool = False
    num_experts: str | None = None
    expert_size: str = "intermediate_size"
    must: dict[str, Any] = field(default_factory=dict[str, Any])


def _mlp(ours: str, gate: str, up: str, down: str) -> tuple[Entry, Entry]:
    return (
        Entry(f"{ours}.linear_fc1.weight", (gate, up), Cut.GLU, ("ffn", "hidden")),
        Entry(f"{ours}.linear_fc2.weight", (down,), Cut.ROW, ("hidden", "ffn")),
    )


_EXPERT = "mlp.experts.local_experts.{expert}"
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_BLOCK = (
    Entry("input_layernorm.weight", ("input_layernorm.weight",), Cut.COPY),
    Entry(
        "self_attention.linear_qkv.weight",
        tuple(f"{name}.weight" for name in _QKV),
        Cut.QKV,
        ("queries", "hidden"),
    ),
    Entry("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), Cut.ROW, ("hidden", "queries")),
    Entry("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), Cut.COPY),
)
_QKV_BIAS = (
    Entry("self_attention.linear_qkv.bias", tuple(f"{name}.bias" for name in _QKV), Cut.QKV, ("queries",)),
)
_QK_NORM = (
    Entry("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), Cut.COPY, ("head_dim",)),
    Entry("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), Cut.COPY, ("head_dim",)),
)
_DENSE = _mlp("mlp", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
_QWEN_EXPERTS = (
    Entry("mlp.router.weight", ("mlp.gate.weight",), Cut.COPY, ("num_experts", "hidden")),
    *_mlp(_EXPERT, *(f"mlp.experts.{{expert}}.{part}_proj.weight" for part in ("gate", "up", "down"))),
)
_MIXTRAL_EXPERTS = (
    Entry("mlp.router.weight", ("block_sparse_moe.gate.weight",), Cut.COPY, ("num_experts", "hidden")),
    *_mlp(_EXPERT, *(f"block_sparse_moe.experts.{{expert}}.{part}.weight" for part in ("w1", "w3", "w2"))),
)
_SILU = {"hidden_act": "silu"}
_NO_BIAS = {**_SILU, "attention_bias": False}

FAMILIES: dict[str, Family] = {
    "llama": Family(layer=_BLOCK + _DENSE, must={**_NO_BIAS, "mlp_bias": False}),
    "qwen2": Family(layer=_BLOCK + _QKV_BIAS + _DENSE, qkv_bias=True, must=_SILU),
    "qwen3": Family(layer=_BLOCK + _QK_NORM + _DENSE, qk_norm=True, must=_NO_BIAS),
    "mistral": Family(layer=_BLOCK + _DENSE, must=_SILU),
    "mixtral": Family(layer=_BLOCK + _MIXTRAL_EXPERTS, num_experts="num_local_experts", must=_SILU),
    "qwen3_moe": Family(
        layer=_BLOCK + _QK_NORM + _QWEN_EXPERTS,
        qk_norm=True,
        num_experts="num_experts",
        expert_size="moe_intermediate_size",
        must={**_NO_BIAS, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
}
"""By `model_type` of a config."""

EMBEDDING = Entry(
    "embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Cut.VOCAB, ("vocab", "hidden")
)
FINAL_NORM = Entry("decoder.final_layernorm.weight", ("model.norm.weight",), Cut.COPY)
HEAD = Entry("output_layer.weight", ("lm_head.weight",), Cut.VOCAB, ("vocab", "hidden"))
TIED_HEAD = Entry("output_layer.weight", EMBEDDING.theirs, Cut.VOCAB, EMBEDDING.sizes)
VALUE_HEAD = (
    Entry("score.weight", ("score.weight",), Cut.COPY, (1, "hidden")),
    Entry("score.bias", ("score.bias",), Cut.COPY, (1,)),
)
OURS_LAYER, THEIRS_LAYER = "decoder.layers.{layer}.", "model.layers.{layer}."

# Rotary frequencies that are the same for every position up to `sequence_limit`.
_ROPES = frozenset({"default", "linear", "llama3", "dynamic", "yarn", "longrope"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's numbers, in the words of Hugging Face; `windows` has each layer's, None where it sees everything."""

    family: Family
    hidden: int
    num_layers: int
    num_heads: int
    num_groups: int
    head_dim: int
    ffn: int
    vocab: int
    num_experts: int
    experts_per_token: int
    normalized_router: bool
    tied: bool
    norm_eps: float
    windows: tuple[int | None, ...]

    @property
    def queries(self) -> int:
        """Rows of all heads' queries."""
        return self.num_heads * self.head_dim

    @property
    def keys(self) -> int:
        """Rows of all groups' keys, and of their values."""
        return self.num_groups * self.head_dim


def shape_of(config: Any, head: str) -> Shape:  # noqa: ANN401 transformers' configs are untyped
    """Read the numbers off a config of a model type in `FAMILIES`."""
    family = FAMILIES[config.model_type]
    mixture = family.num_experts is not None
    return Shape(
        family=family,
        hidden=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_groups=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        ffn=getattr(config, family.expert_size),
        vocab=config.vocab_size,
        num_experts=getattr(config, family.num_experts or "", 0) if mixture else 0,
        experts_per_token=config.num_experts_per_tok if mixture else 0,
        normalized_router=mixture and getattr(config, "norm_topk_prob", True),
        tied=bool(config.tie_word_embeddings) and head == "lm",
        norm_eps=config.rms_norm_eps,
        windows=_windows(config),
    )


def _windows(config: Any) -> tuple[int | None, ...]:  # noqa: ANN401
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def refusals(config: Any) -> list[Refusal]:  # noqa: ANN401
    """Return what of a Hugging Face config the tables do not cover, so that a model is exact or refused."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        return [_not_for(f"of the families it knows {', '.join(FAMILIES)}, got {config.model_type}")]
    found = [
        _not_for(f"it covers `{name}` {value!r} of {config.model_type} alone, got {getattr(config, name)!r}")
        for name, value in family.must.items()
        if getattr(config, name, value) != value
    ]
    kind = (_rope(config)).get("rope_type", "default")
    if kind not in _ROPES:
        found.append(_not_for(f"of rotary embeddings it knows {', '.join(sorted(_ROPES))}, got {kind}"))
    if float(_rope(config).get("partial_rotary_factor", 1.0)) != 1.0:
        found.append(_not_for("rotary embeddings turn a part of each head, and it knows whole heads"))
    if getattr(config, "quantization_config", None) is not None:
        found.append(_not_for("the folder's weights are quantized"))
    return found


def _rope(config: Any) -> dict[str, Any]:  # noqa: ANN401
    rope: dict[str, Any] = (
        getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    )
    return {"rope_type": rope.get("rope_type", rope.get("type", "default")), **rope}


def _not_for(reason: str) -> Refusal:
    return Refusal(setting="model.path", reason=reason, remedy="use the engine `fsdp2`")


def entries(shape: Shape, head: str) -> list[tuple[Entry, int | None, int | None]]:
    """Return every weight of a model in the order in which they leave: an entry, its layer, its expert (None: not of one)."""
    listed: list[tuple[Entry, int | None, int | None]] = [(EMBEDDING, None, None)]
    for layer in range(shape.num_layers):
        for entry in shape.family.layer:
            experts = range(shape.num_experts) if "{expert}" in entry.ours else (None,)
            listed += [(entry, layer, expert) for expert in experts]
    listed.append((FINAL_NORM, None, None))
    if head == "value":
        listed += [(entry, None, None) for entry in VALUE_HEAD]
    elif not shape.tied:
        listed.append((HEAD, None, None))
    return listed


def names(entry: Entry, layer: int | None, expert: int | None) -> tuple[str, ...]:
    """Return the names in the files of one of `entries`."""
    prefix = "" if layer is None else THEIRS_LAYER.format(layer=layer)
    return tuple(prefix + name.format(expert=expert) for name in entry.theirs)


def whole_shapes(entry: Entry, shape: Shape) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of `names(entry)` in the files, in their order."""
    whole = tuple(size if isinstance(size, int) else int(getattr(shape, size)) for size in entry.sizes)
    if entry.cut is Cut.QKV:
        return (whole, *((shape.keys, *whole[1:]),) * 2)
    return (whole,) * len(entry.theirs)
