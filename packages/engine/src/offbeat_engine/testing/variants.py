"""Ways to run the same training that an engine may offer: settings, and what they need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from offbeat_engine.capabilities import Feature
from offbeat_engine.config import OptimizerConfig, Schedule

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
