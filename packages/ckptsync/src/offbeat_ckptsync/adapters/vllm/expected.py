"""Which tensors a vLLM model takes: from its checkpoint's headers, else from an empty transformers model."""

# vLLM and transformers type their interfaces in part.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from offbeat_ckptsync.member.sinks import distinct_tensors
from offbeat_ckptsync.plan.manifest import dtype_name, make_manifest, manifest_of
from offbeat_ckptsync.transports.weight_files import folder_specs
from offbeat_ckptsync.values import Manifest, TensorSpec

if TYPE_CHECKING:
    from vllm.config import ModelConfig


def expected_manifest(model_config: ModelConfig) -> Manifest | None:
    """Return names and shapes of the checkpoint, floating tensors in the dtype that vLLM serves.

    What is no parameter is expected in float32, in which transformers and vLLM compute with it (a router's bias: rounded, it would
    choose other experts). None for a quantized model: what its checkpoint holds is not what a trainer has. A tied output embedding is
    expected under the input embedding's name only, as `save_pretrained` writes it.
    """
    if model_config.quantization is not None:
        return None
    buffers = _buffers(model_config)

    def served(spec: TensorSpec) -> str:
        if not getattr(torch, spec.dtype).is_floating_point:
            return spec.dtype
        return "float32" if spec.name in buffers else dtype_name(model_config.dtype)

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


def _buffers(model_config: ModelConfig) -> set[str]:
    """Return the names of what is saved and no parameter; nothing for a family that transformers has not."""
    import transformers

    if not hasattr(transformers, next(iter(model_config.hf_config.architectures or ()), "")):
        return set()
    model = empty_model(model_config)
    return {*model.state_dict()} - {name for name, _ in model.named_parameters(remove_duplicate=False)}
