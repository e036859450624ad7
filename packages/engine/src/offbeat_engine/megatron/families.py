"""The families as data: how Hugging Face's names and shapes map to megatron-core's, and what of a config is covered.

Which part of which weight of the files lies where in a weight of Megatron's: rectangles, on both sides.

Every cut of the tables comes to such blocks, and no more: by them weights are read, leave, and go into checkpoints, and
gradients and moments with them, since they move elements and never mix them. A rank's share of moments is a run of numbers of a
flattened weight, which comes to boxes, too: the end of a row, whole rows, the beginning of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from offbeat_engine.config import Refusal
from offbeat_engine.toolkit.state.slices import Region

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch


Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """`sizes` elements of the file's weight `name` (of `shape`) from `offsets` on, which lie from `start` on in ours."""

    name: str
    shape: Numbers
    offsets: Numbers
    sizes: Numbers
    start: Numbers

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this block of Megatron's `tensor`, a view."""
        return tensor[tuple(slice(at, at + size) for at, size in zip(self.start, self.sizes, strict=True))]


@dataclass(frozen=True, slots=True)
class Among:
    """This rank's place among the `size` ranks that share a tensor."""

    rank: int
    size: int


def blocks_of(
    entry: Entry, layer: int | None, expert: int | None, shape: Shape, tensor: Among
) -> list[Block]:
    """Return the blocks of one weight on the rank `tensor.rank` of its tensor."""
    called = list(in_files(entry, layer, expert, shape).items())
    match entry.cut:
        case Cut.COPY:
            name, whole = called[0]
            return [_rows(name, whole, 0, whole[0], 0)]
        case Cut.VOCAB:
            name, whole = called[0]
            first, num_rows = vocab_rows(whole[0], tensor)
            return [_rows(name, whole, first, num_rows, 0)] if num_rows else []
        case Cut.ROW:
            name, whole = called[0]
            share = whole[1] // tensor.size
            return [Block(name, whole, (0, tensor.rank * share), (whole[0], share), (0, 0))]
        case Cut.GLU:
            share = called[0][1][0] // tensor.size
            return [
                _rows(name, whole, tensor.rank * share, share, half * share)
                for half, (name, whole) in enumerate(called)
            ]
        case Cut.QKV:
            return _qkv(called, shape, tensor)


def _qkv(called: list[tuple[str, Numbers]], shape: Shape, tensor: Among) -> list[Block]:
    num_groups = shape.num_groups // tensor.size
    heads = shape.num_heads // shape.num_groups
    blocks: list[Block] = []
    place = 0
    for group in range(tensor.rank * num_groups, (tensor.rank + 1) * num_groups):
        for (name, whole), num_heads in zip(called, (heads, 1, 1), strict=True):
            num_rows = num_heads * shape.head_dim
            blocks.append(_rows(name, whole, group * num_rows, num_rows, place))
            place += num_rows
    return blocks


def _rows(name: str, whole: Numbers, first: int, num_rows: int, place: int) -> Block:
    rest = whole[1:]
    zeros = (0,) * len(rest)
    return Block(name, whole, (first, *zeros), (num_rows, *rest), (place, *zeros))


def padded_vocab(vocab: int, tensor_size: int) -> int:
    """Return how many rows the vocabulary has where `tensor_size` ranks have as many each."""
    return -(-vocab // tensor_size) * tensor_size


def vocab_rows(vocab: int, tensor: Among) -> tuple[int, int]:
    """Return the first token of a rank, and how many it has that are none to fill up."""
    share = padded_vocab(vocab, tensor.size) // tensor.size
    first = tensor.rank * share
    return first, max(0, min(share, vocab - first))


@dataclass(frozen=True, slots=True)
class Part:
    """A box of the weight `block.name`, at `region`, and where its numbers lie in a rank's run of a flattened weight."""

    block: Block
    region: Region
    first: int
    width: int
    columns: slice

    def of(self, run: torch.Tensor) -> torch.Tensor:
        """Return the numbers in a run, a view."""
        if len(self.region.shape) == 1:
            return run[self.first : self.first + self.region.numel]
        num_rows = self.region.shape[0]
        return run[self.first : self.first + num_rows * self.width].view(num_rows, self.width)[
            :, self.columns
        ]


def parts_of(blocks: Sequence[Block], shape: Numbers, start: int, stop: int) -> Iterator[Part]:
    """Yield what the numbers `start` to `stop` of a flattened weight of `shape` are of its `blocks`."""
    for box in _boxes(shape, start, stop):
        for block in blocks:
            common = box.common(Region(block.start, block.sizes))
            if common is None:
                continue
            offsets = tuple(
                file + here - there
                for file, here, there in zip(block.offsets, common.offsets, block.start, strict=True)
            )
            row, width = (common.offsets[0], box.shape[1]) if len(shape) > 1 else (0, 1)
            first = (row * shape[1] + box.offsets[1] if len(shape) > 1 else common.offsets[0]) - start
            columns = common.within(box)[-1]
            yield Part(block, Region(offsets, common.shape), first, width, columns)


def _boxes(shape: Numbers, start: int, stop: int) -> Iterator[Region]:
    """Yield the boxes that a run of a flattened tensor consists of."""
    if len(shape) == 1:
        yield Region((start,), (stop - start,))
        return
    width = shape[1]
    while start < stop:
        row, column = divmod(start, width)
        if column or stop - start < width:
            size = min(width - column, stop - start)
            yield Region((row, column), (1, size))
        else:
            num_rows = (stop - start) // width
            size = num_rows * width
            yield Region((row, 0), (num_rows, width))
        start += size


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
    "cwm": Family(layer=_BLOCK + _DENSE, must={**_SILU, "mlp_bias": False}),
    "seed_oss": Family(
        layer=_BLOCK + _QKV_BIAS + _DENSE,
        qkv_bias=True,
        must={**_SILU, "attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
    ),
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


def in_files(entry: Entry, layer: int | None, expert: int | None, shape: Shape) -> dict[str, Numbers]:
    """Return `names`, in their order, with the shapes that the weights have in the files."""
    whole = tuple(size if isinstance(size, int) else int(getattr(shape, size)) for size in entry.sizes)
    shapes = [whole for _ in entry.theirs]
    if entry.cut is Cut.QKV:
        shapes[1:] = [(shape.keys, *whole[1:])] * 2
    return dict(zip(names(entry, layer, expert), shapes, strict=True))


def all_in_files(shape: Shape, head: str) -> dict[str, Numbers]:
    """Return the shapes in the files of all weights of a model, by name, in the order in which they leave."""
    return {name: whole for one in entries(shape, head) for name, whole in in_files(*one, shape).items()}
