"""The settings that the Megatron engine has of its own.

`library_refusals` answers for megatron-core's own settings that pass through `megatron_args`: what is listed was read in its source (0.16.1), what is not
is refused. `overlap_grad_reduce` and the sizes of buckets were run on gloo. **Nobody has run the others yet**: they are kernels of GPUs.
"""

# No `from __future__ import annotations` here: pydantic reads these annotations at run time. No torch either: settings
# are read long before anything is trained.

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from offbeat_engine.config import SPEED, EngineConfig, LoraConfig, Refusal, bounded


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronConfig(EngineConfig):
    """Everything the Megatron engine is told.

    Ranks that no setting below divides hold copies. With `sequence_parallel` the ranks of a tensor share what lies between the matrices, too (arXiv 2205.05198).
    `context_parallel_size` ranks share the tokens of every sequence, in attention too: keys and values go to all of them.

    `distributed_optimizer` shares moments and
    master weights among copies. With `activation_checkpointing`, `recompute` says what backward computes again: whole
    layers, or attention alone.

    `transformer_engine` takes its matrices and its attention over packed rows, for bfloat16 on CUDA: where all ranks have it
    (`auto`), or else refused (true). `e4m3` and `hybrid` are true with products in eight bits, whose tensors have a scale
    each: forward in e4m3, and backward in that, too, or in e5m2. It is off by default, since it was never run.

    `megatron_args` are settings of megatron-core's own, by its names: fusions, grouped experts, `overlap_grad_reduce`, with which a
    step takes one training call. `library_args` lists them; all others are refused.
    """

    lora: LoraConfig = field(
        default_factory=LoraConfig,
        metadata={"derived": "`engine` (megatron-core trains no adapters, fsdp2 does)"},
    )
    packing: bool = field(default=True, metadata=SPEED)
    """sequences of a micro-batch are one row without padding"""
    tensor_parallel_size: int = bounded(1, at_least=1, speed=True)  # ranks that share every matrix
    pipeline_parallel_size: int = bounded(1, at_least=1, speed=True)  # groups of ranks that share the layers
    virtual_pipeline_size: int = bounded(1, at_least=1, speed=True)
    """runs of layers that each has (arXiv 2104.04473)"""
    sequence_parallel: bool = field(default=False, metadata=SPEED)
    expert_parallel_size: int = bounded(1, at_least=1, speed=True)
    """copies that share the experts of a mixture"""
    context_parallel_size: int = bounded(1, at_least=1, speed=True)
    dispatcher: Literal["allgather", "alltoall"] = field(default="alltoall", metadata=SPEED)
    """how tokens reach experts"""
    distributed_optimizer: bool = field(default=True, metadata=SPEED)
    recompute: Literal["layers", "attention"] = field(default="layers", metadata=SPEED)
    transformer_engine: Literal["auto", "e4m3", "hybrid", True, False] = False
    megatron_args: dict[str, Any] = field(default_factory=dict[str, Any], metadata={"free": True, **SPEED})

    @property
    def model_parallel_size(self) -> int:
        """How many ranks work on the same sequences; other than in `EngineConfig` they are not neighbours with a pipeline."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def row_tokens(self) -> int:
        """Budget of one micro-batch: a rank has all tokens that pass its stage, unless it shares them."""
        sharing = self.tensor_parallel_size if self.sequence_parallel else 1
        return self.micro_batch_tokens * self.context_parallel_size * sharing

    @property
    def gathers_weights(self) -> bool:
        """As in `EngineConfig`."""
        return False

    def shard_ranks(self, num_ranks: int) -> int:
        """As in `EngineConfig`."""
        return min(num_ranks, self.tensor_parallel_size * self.pipeline_parallel_size)

    def expert_ranks(self, num_ranks: int) -> int:
        """As in `EngineConfig`."""
        held = self.tensor_parallel_size * self.pipeline_parallel_size * self.expert_parallel_size
        return min(num_ranks, held)

    def moment_ranks(self, num_ranks: int) -> int:
        """As in `EngineConfig`; experts, which may lie on more ranks, are not counted without `distributed_optimizer`."""
        return num_ranks if self.distributed_optimizer else self.shard_ranks(num_ranks)


class Needs(Enum):
    """What a setting asks for; the value is the reason to refuse it elsewhere."""

    NOTHING = ""
    CUDA = "its kernels are compiled for GPUs"
    TRANSFORMER_ENGINE = "its kernels are Transformer Engine's (`transformer_engine: true`, on GPUs)"


OF_LAYERS = {
    "bias_activation_fusion": Needs.CUDA,
    "bias_dropout_fusion": Needs.CUDA,
    "apply_rope_fusion": Needs.TRANSFORMER_ENGINE,
    "moe_permute_fusion": Needs.TRANSFORMER_ENGINE,
    "moe_grouped_gemm": Needs.TRANSFORMER_ENGINE,
}
"""Fields of `TransformerConfig`."""

OF_COPIES = {
    "overlap_grad_reduce": Needs.NOTHING,
    "bucket_size": Needs.NOTHING,
    "pad_buckets_for_high_nccl_busbw": Needs.NOTHING,
}
"""Fields of `DistributedDataParallelConfig`."""

_REFUSED = {
    "overlap_param_gather": "weights are read between two steps, and the head's outside of its module: they would be those of the step before",
    "gradient_accumulation_fusion": "the vocabulary's matrix would want Apex, too",
    "masked_softmax_fusion": "attention is PyTorch's or Transformer Engine's, which have no such softmax",
    "moe_router_fusion": "replayed experts are taken in the place of its choice",
}


def passed(config: MegatronConfig, known: dict[str, Needs]) -> dict[str, Any]:
    """Return those of `megatron_args` that are `known`."""
    return {name: value for name, value in config.megatron_args.items() if name in known}


def library_refusals(config: MegatronConfig) -> Iterator[Refusal]:
    """Yield what is not taken, or not here."""
    known = OF_LAYERS | OF_COPIES
    for name, value in config.megatron_args.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean `{near[0]}`" if near else f"; these are: {', '.join(known)}"
            reason = _REFUSED.get(name, f"it is none of megatron-core's settings that pass through{hint}")
            yield _refusal(name, reason, "leave it out")
            continue
        here = {Needs.NOTHING}
        if config.device == "cuda":
            here |= {
                Needs.CUDA,
                *({Needs.TRANSFORMER_ENGINE} if config.transformer_engine not in (False, "auto") else ()),
            }
        if value and known[name] not in here:
            yield _refusal(name, known[name].value, "leave it out there")


def _refusal(name: str, reason: str, remedy: str) -> Refusal:
    return Refusal(setting=f"megatron_args.{name}", reason=reason, remedy=remedy)
