"""Activation checkpointing: layers compute again in backward, and what of them is kept all the same."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

if TYPE_CHECKING:
    from offbeat_engine.fsdp2.config import Fsdp2Config

# Operators of matrix products and of fused attention, by namespace: most of a layer's work, little of its memory.
_COSTLY = {
    "aten": (
        "mm", "addmm", "bmm", "baddbmm", "_grouped_mm",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    ),
    "torch_attn": ("_varlen_attn",),
}  # fmt: skip


def compute_again(hf: Any, config: Fsdp2Config) -> None:
    """Let every layer of `hf` keep its input alone, or its costly results besides."""
    settings: dict[str, Any] = {"use_reentrant": False}
    if config.checkpoint_keeps == "products":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    hf.gradient_checkpointing_enable(settings)


def _policy(_ctx: object, operator: Any, *_args: object, **_settings: object) -> CheckpointPolicy:
    name = operator._schema.name.partition("::")[2]  # noqa: SLF001 it has no public name
    keeps = name in _COSTLY.get(operator.namespace, ())
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
