"""Tiny models and batches, drawn from a seed.

Ways to run the same training that an engine may offer: settings, and what they need.

Tensors on `cuda` without a GPU: they have a shape, a dtype and a device, and mixing devices raises as on a real one.
"""

# torch's modes and fake tensors are typed in part.
# pyright: reportMissingParameterType=false

from __future__ import annotations

import traceback
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from offbeat_engine.batch import train_batch
from offbeat_engine.config import Feature, OptimizerConfig, Schedule
from offbeat_engine.fsdp2.memory.updater import Updater
from offbeat_engine.toolkit.hf.probing import without_bars

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from offbeat_engine.batch import TrainBatch
    from offbeat_engine.fsdp2 import Fsdp2Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One kind of model of the conformance suite: a transformers model type and what is special in its config."""

    name: str
    model_type: str
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    dense: bool = True


_UNTIED = {"tie_word_embeddings": False}
_ADAPTIVE_POSITIONS = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 32}

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(name="qwen2", model_type="qwen2"),
        Family(name="qwen2_untied", model_type="qwen2", settings=_UNTIED),
        # Rotary embeddings tell differences of positions only, so running on through a packed row would not show;
        # scaled ones that adapt to the largest position do, where all sequences fit below the limit.
        Family(name="llama", model_type="llama", settings={**_UNTIED, **_ADAPTIVE_POSITIONS}),
        Family(name="llama_tied", model_type="llama"),
        Family(name="qwen3", model_type="qwen3"),
        # Gemma scales its embeddings and has heads wider than hidden / heads.
        Family(name="gemma", model_type="gemma", settings={"head_dim": 16}),
        # A window shorter than the sequences: attention that forgets it shows.
        Family(name="mistral", model_type="mistral", settings={**_UNTIED, "sliding_window": 7}),
        Family(
            name="mixtral",
            model_type="mixtral",
            settings={**_UNTIED, "num_local_experts": 4, "num_experts_per_tok": 2},
            dense=False,
        ),
        Family(
            name="qwen3_moe",
            model_type="qwen3_moe",
            settings={**_UNTIED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
            dense=False,
        ),
    )
}
"""The families of the conformance suite: dense and mixture of experts, tied and untied embeddings."""


def make_tiny_model(
    path: str | Path,
    *,
    family: str = "qwen2",
    head: str = "lm",
    vocab_size: int = 64,
    hidden: int = 32,
    seed: int = 0,
    **config: Any,
) -> str:
    """Write a Hugging Face folder `path` with random weights (config and safetensors, no tokenizer); return its path.

    Args:
        path: where.
        family: a transformers model type with a causal language model, such as "qwen2", "llama" or "qwen3".
        head: "lm", or "value" for a token classifier with one label.
        vocab_size: tokens.
        hidden: hidden size, a multiple of 4; there are 4 heads on 2 key-value heads.
        seed: of the weights.
        config: further settings of the family's config, which win over the above; `layers` (2) are its layers.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": config.pop("layers", 2),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **({"num_labels": 1} if head == "value" else {}),
        **config,
    }
    auto: Any = AutoModelForTokenClassification if head == "value" else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]), without_bars():
        torch.manual_seed(seed)
        own = type(AutoConfig.for_model(family))
        shape = {key: value for key, value in shape.items() if not is_computed(own, key)}
        model: Any = auto.from_config(AutoConfig.for_model(family, **shape), dtype=torch.float32)
        for param in model.parameters():
            _exaggerate(param.data)
        model.save_pretrained(Path(path))
    return str(path)


def is_computed(config_class: Any, key: str) -> bool:
    """Return whether the family computes `key` from other settings, so that it cannot be set."""
    place = getattr(config_class, config_class.attribute_map.get(key, key), None)
    return isinstance(place, property) and place.fset is None


def _exaggerate(weight: torch.Tensor) -> None:
    """Make a fresh weight one that shows mistakes.

    At the usual 0.02 a tiny model is all but uniform, and biases of zero and norms of one are all the same: a wrong
    one would look right.
    """
    if weight.dim() > 1:
        weight.mul_(5.0)
    else:
        weight.add_(torch.randn_like(weight), alpha=0.1)


def random_batch(
    num_sequences: int, *, vocab_size: int = 64, max_tokens: int = 24, seed: int = 0, min_tokens: int = 2
) -> TrainBatch:
    """Draw sequences of `min_tokens`..`max_tokens` tokens with loss on a random tail of each, and temperatures."""
    draw = torch.Generator().manual_seed(seed)
    lengths_B = torch.randint(min_tokens, max_tokens + 1, (num_sequences,), generator=draw)
    prompts_B = 1 + (torch.rand(num_sequences, generator=draw) * (lengths_B - 1)).long()
    position_T = torch.arange(max_tokens)
    real_BT = position_T[None] < lengths_B[:, None]
    ids_BT = torch.randint(3, vocab_size, (num_sequences, max_tokens), generator=draw)
    return train_batch(
        input_ids=torch.where(real_BT, ids_BT, 0),
        lengths=lengths_B,
        loss_mask=real_BT & (position_T[None] >= prompts_B[:, None]),
        temperature=0.5 + torch.rand(num_sequences, generator=draw),
    )


def scored_batch(seed: int, num_sequences: int = 9) -> TrainBatch:
    """Return a `random_batch` of the suite: with a weight for each token, a target for each value, and a silent row.

    `advantages` are positive, so that the loss is a sum without cancellation and can be held to 1e-6. The last
    sequence has nothing under its mask.
    """
    batch = random_batch(num_sequences, seed=seed, min_tokens=3)
    draw = torch.Generator().manual_seed(1000 + seed)
    shape = batch["input_ids"].shape
    batch["advantages"] = 0.5 + torch.rand(shape, generator=draw)
    batch["returns"] = 3.0 + torch.randn(shape, generator=draw)
    batch["loss_mask"][-1] = False
    return batch


# Every setting matters within five steps: warm-up, decay, clipping, weight decay. `eps` is large so that Adam's
# first step, g / (|g| + eps), does not turn the rounding of a zero gradient into a full step.
OPTIMIZER = OptimizerConfig(
    lr=1e-3,
    eps=1e-4,
    weight_decay=0.1,
    max_grad_norm=0.5,
    warmup_steps=2,
    schedule=Schedule.LINEAR,
    total_steps=8,
)

FROZEN = ("model.embed_tokens.weight", "model.layers.0.*", "*norm.weight")
"""The patterns of the case `frozen`: a weight that may be tied, a whole layer, and all norms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run the same training: changed settings, the features they exercise, the ranks they need.

    Fewer than `num_ranks` will do unless `exact`. `changes` are fields of the engine's `Config`, `features` may be names of
    its own.
    """

    name: str
    changes: dict[str, Any] = field(default_factory=dict[str, Any])
    features: frozenset[str] = frozenset()
    num_ranks: int = 2
    exact: bool = False
    slow: bool = False
    head: str = "lm"
    families: tuple[str, ...] | None = None  # None: all


def _variant(name: str, *features: Feature, **rest: Any) -> Variant:
    return Variant(name=name, features=frozenset(features), **rest)


VARIANTS = (
    _variant("one_rank", num_ranks=1),
    _variant("two_ranks", exact=True),
    _variant("four_ranks", num_ranks=4, exact=True, slow=True),
    _variant("unpacked", Feature.PACKING, changes={"packing": False}),
    _variant("one_at_a_time", Feature.DYNAMIC_MICRO_BATCHES, changes={"micro_batch_tokens": 1}),
    _variant("all_at_once", Feature.DYNAMIC_MICRO_BATCHES, changes={"micro_batch_tokens": 1 << 20}),
    _variant("checkpointed", Feature.ACTIVATION_CHECKPOINTING, changes={"activation_checkpointing": True}),
    _variant("activations_away", Feature.ACTIVATION_OFFLOAD, changes={"activation_offload": True}),
    _variant(
        "activations_away_checkpointed",
        Feature.ACTIVATION_OFFLOAD,
        Feature.ACTIVATION_CHECKPOINTING,
        changes={"activation_offload": True, "activation_checkpointing": True},
        families=("qwen2",),
    ),
    _variant("offloaded", Feature.OFFLOAD, changes={"offload_parameters": True, "offload_optimizer": True}),
    _variant("replicated", Feature.HYBRID_SHARDING, changes={"shard_size": 1}, exact=True),
    _variant(
        "two_copies_of_two",
        Feature.HYBRID_SHARDING,
        changes={"shard_size": 2},
        exact=True,
        num_ranks=4,
        slow=True,
    ),
    _variant("sequence_2", Feature.SEQUENCE_PARALLEL, changes={"sequence_parallel_size": 2}, exact=True),
    _variant(
        "sequence_2_of_4",
        Feature.SEQUENCE_PARALLEL,
        changes={"sequence_parallel_size": 2},
        exact=True,
        num_ranks=4,
        slow=True,
    ),
    # The tiny models have four heads on two key-value heads: fewer than the ranks of a sequence here.
    _variant(
        "sequence_4",
        Feature.SEQUENCE_PARALLEL,
        changes={"sequence_parallel_size": 4},
        exact=True,
        num_ranks=4,
        slow=True,
    ),
    _variant("frozen", Feature.FREEZING, changes={"freeze": FROZEN}),
    _variant("values", Feature.VALUE_HEAD, head="value"),
    _variant(
        "compiled", Feature.COMPILE, changes={"compile": True}, num_ranks=1, families=("qwen2",), slow=True
    ),
    _variant("deterministic", Feature.DETERMINISTIC, changes={"deterministic": True}, families=("qwen2",)),
)


class FakeCuda:
    """While it is entered, what is on the CPU is real and computed, and what is on `cuda` is only shaped.

    A value that comes back from the device is zero. Each time that the host waits for the device it is written down: for
    a value, or until it has taken a copy that is not `non_blocking`. `waits` holds the module and function of this
    project that did, and "backward" for each backward pass between. Such a pass is not run, for autograd's threads want a driver; whatever it would give a gradient gets one of its shape.
    """

    def __init__(self) -> None:
        self.waits: list[str] = []
        self._stack = ExitStack()

    def __enter__(self) -> FakeCuda:
        """Begin."""
        grad, backward = torch.autograd.grad, torch.Tensor.backward
        self._stack.callback(setattr, torch.autograd, "grad", grad)
        self._stack.callback(setattr, torch.Tensor, "backward", backward)
        torch.autograd.grad = _shaped_gradients
        setattr(torch.Tensor, "backward", self._shaped_backward)  # noqa: B010 pyright takes methods for constants
        self._stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        self._stack.enter_context(_Sorting(self.waits))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End."""
        self._stack.close()

    @property
    def _shaped_backward(self) -> Callable[[torch.Tensor], None]:
        waits = self.waits

        def backward(loss: torch.Tensor) -> None:
            waits.append("backward")
            for leaf in _leaves(loss):
                leaf.grad = torch.zeros_like(leaf)

        return backward


def _shaped_gradients(
    _: torch.Tensor, inputs: Sequence[torch.Tensor], *, allow_unused: bool = False
) -> tuple[torch.Tensor, ...]:
    """Stand in for `torch.autograd.grad`."""
    return tuple(torch.zeros_like(tensor) for tensor in inputs)


def _leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield what a backward pass from `loss` would leave a gradient on."""
    seen, todo = set[Any](), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        todo += [before for before, _ in node.next_functions]


class _Sorting(TorchDispatchMode):
    """Sends what touches the device to the fake mode below, and lets the rest be computed."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, _ = tree_flatten((args, kwargs))
        fakes = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        there = any(isinstance(leaf, torch.device) and leaf.type == "cuda" for leaf in leaves)
        if not fakes and not there:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:  # noqa: SLF001 `item`, `tolist` and `float`
            self._waits.append(_where())
            return 0.0 if fakes[0].dtype.is_floating_point else fakes[0].dtype is not torch.bool and 0
        copies = func is torch.ops.aten._to_copy.default and not fakes  # noqa: SLF001 what `to` comes to
        if copies and not kwargs.get("non_blocking"):
            self._waits.append(_where())
        return tree_map(self._back, func(*args, **kwargs))

    def _back(self, result: object) -> object:
        """Return a tensor that came to the CPU as a real one."""
        if not isinstance(result, FakeTensor) or result.device.type != "cpu":
            return result
        self._waits.append(_where())
        with unset_fake_temporarily():
            return torch.zeros(result.shape, dtype=result.dtype)


def _where() -> str:
    for frame, _ in traceback.walk_stack(None):
        module = str(frame.f_globals.get("__name__"))
        if module.startswith("offbeat_") and module != __name__:
            return f"{module}:{frame.f_code.co_name}"
    return "elsewhere"


def pretend_on_cuda(engine: Fsdp2Engine) -> None:
    """Send the model of an initialised engine of one rank to the device, inside `FakeCuda`."""
    # Not `engine.to`, which moves between the host and the device an engine was built on: this one has none.
    parts = engine._state  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    assert parts is not None
    parts.scorer.to("cuda")
    updater = Updater(engine.config.optimizer, dict(parts.scorer.hf.named_parameters()), engine.world)
    engine._state = replace(parts, updater=updater)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    engine.world = replace(engine.world, device="cuda")
