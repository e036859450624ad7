"""megatron-core's own settings that pass through `megatron_args`: what is listed was read in its source (0.16.1), what is not is refused.

`overlap_grad_reduce` and the sizes of buckets were run on gloo. **Nobody has run the others yet**: they are kernels of GPUs.
"""

from __future__ import annotations

import difflib
from enum import Enum
from typing import TYPE_CHECKING, Any

from offbeat_engine.capabilities import Refusal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat_engine.megatron.config import MegatronConfig


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


def refusals(config: MegatronConfig) -> Iterator[Refusal]:
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
