"""Which tensors a vLLM model takes: from its checkpoint's headers, else from an empty transformers model."""

# vLLM and transformers type their interfaces in part.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from offbeat_ckptsync.member.sinks import distinct_tensors
from offbeat_ckptsync.plan.manifest import dtype_name, make_manifest, manifest_of
from offbeat_ckptsync.transports.weight_files import folder_specs
from offbeat_ckptsync.values import Manifest, TensorSpec

# Parameters of routers that vLLM holds in float32, and which transformers does not list (afmoe, laguna, longcat_flash).
_ROUTERS = r"\.(expert_bias|e_score_correction_bias|router\.classifier\.weight)$"

if TYPE_CHECKING:
    from vllm.config import ModelConfig


def expected_manifest(model_config: ModelConfig) -> Manifest | None:
    """Return names and shapes of the checkpoint, floating tensors in the dtype that vLLM serves.

    Buffers, and the parameters that transformers keeps in float32, are expected in float32: vLLM computes with them in that (routers:
    rounded, they would choose other experts). None for a quantized model: its checkpoint does not hold what a trainer has. A tied
    output embedding is expected under the input embedding's name only, as `save_pretrained` writes it.
    """
    if model_config.quantization is not None:
        return None
    unrounded = _unrounded(model_config)

    def served(spec: TensorSpec) -> str:
        if not getattr(torch, spec.dtype).is_floating_point:
            return spec.dtype
        return "float32" if unrounded.search(spec.name) else dtype_name(model_config.dtype)

    folder = Path(model_config.model)
    specs = folder_specs(folder) if folder.is_dir() else ()
    if not specs:
        specs = manifest_of(distinct_tensors(empty_model(model_config))).specs
    tied = bool(getattr(model_config.hf_config.get_text_config(), "tie_word_embeddings", False))
    return make_manifest(
        TensorSpec(name=spec.name, shape=spec.shape, dtype=served(spec))
        for spec in specs
        if not (tied and spec.name == "lm_head.weight")
    )


def empty_model(model_config: ModelConfig) -> torch.nn.Module:
    """Return the transformers model of this configuration, without weights."""
    import transformers

    architecture = getattr(transformers, next(iter(model_config.hf_config.architectures or ())))
    with torch.device("meta"):
        return cast("torch.nn.Module", architecture(model_config.hf_config))


def _unrounded(model_config: ModelConfig) -> re.Pattern[str]:
    """Return what matches the names of tensors that stay float32; of a family that transformers lacks, routers alone."""
    import transformers

    patterns = [_ROUTERS]
    if hasattr(transformers, next(iter(model_config.hf_config.architectures or ()), "")):
        model = empty_model(model_config)
        params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        patterns += [f"^{re.escape(name)}$" for name in {*model.state_dict()} - params]
        strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
        patterns += [pattern.replace("*", ".*") for pattern in strict]
    return re.compile("|".join(patterns))
