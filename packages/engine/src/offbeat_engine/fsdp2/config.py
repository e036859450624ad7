"""The settings that the FSDP2 engine has of its own."""

# No `from __future__ import annotations` here: pydantic reads these annotations at run time. No torch either: settings
# are read long before anything is trained.
from dataclasses import dataclass, field
from typing import Literal

from offbeat_engine.config import SPEED, Dtype, EngineConfig, bounded


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp2Config(EngineConfig):
    """Everything the FSDP2 engine is told.

    `activation_offload` keeps what backward needs in host memory.
    `sequence_parallel_size` ranks share the tokens of each sequence (Ulysses, arXiv 2309.14509). `shard_size` ranks
    hold one copy of the weights among them, the copies are replicas of each other (hybrid sharding); 0 = all ranks.
    `compile` compiles every layer. `attention` picks the kernel.

    `reshard` says when a rank lets go of the weights that it gathered: "always" after each layer, forward and backward;
    "never" before the mini-batch ends (faster, at the memory of the whole model in the compute dtype); "auto" is "always", but a model of at most
    256 MiB, and one that each rank holds and trains as a whole, is gathered once. `reduce_dtype` is the precision in which gradients are added up over ranks; micro-batches are
    added up in float32. In bfloat16 every micro-batch is reduced by itself, which sends half the bytes, but more often where `reshard`
    or `shard_size` would else reduce once.
    """

    packing: bool = field(default=True, metadata=SPEED)
    """sequences of a micro-batch are one row without padding"""
    share_prefixes: bool = field(default=True, metadata=SPEED)
    """what several sequences begin with is computed once"""
    activation_offload: bool = field(default=False, metadata=SPEED)
    sequence_parallel_size: int = bounded(1, at_least=1, speed=True)
    shard_size: int = bounded(0, at_least=0, speed=True)
    compile: bool = field(default=False, metadata=SPEED)
    reshard: Literal["auto", "always", "never"] = field(default="auto", metadata=SPEED)
    reduce_dtype: Dtype = Dtype.FLOAT32
    checkpoint_keeps: Literal["inputs", "products"] = field(default="inputs", metadata=SPEED)
    """what activation_checkpointing keeps of a layer: its inputs, or matrix products and attention too"""
    attention: Literal["auto", "eager", "sdpa", "varlen"] = field(default="auto", metadata=SPEED)

    @property
    def model_parallel_size(self) -> int:
        """As in `EngineConfig`: those of Ulysses."""
        return self.sequence_parallel_size

    def shard_ranks(self, num_ranks: int) -> int:
        """As in `EngineConfig`: `shard_size`, or all."""
        return self.shard_size or num_ranks
