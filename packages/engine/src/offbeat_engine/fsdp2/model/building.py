"""Build the Hugging Face model and put a head on it."""

# transformers is typed in part: auto classes and configs answer with unknown types.
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from offbeat_engine.config import Dtype
from offbeat_engine.errors import ConfigError
from offbeat_engine.fsdp2 import families
from offbeat_engine.fsdp2.attention import kernels
from offbeat_engine.fsdp2.attention import packed as attention
from offbeat_engine.fsdp2.model import compilation, recomputing, trainable
from offbeat_engine.fsdp2.model.scorer import Scorer
from offbeat_engine.fsdp2.weights import export as weights
from offbeat_engine.fsdp2.weights import hf_names, loading, lora

if TYPE_CHECKING:
    from offbeat_engine.fsdp2.config import Fsdp2Config


def build_scorer(config: Fsdp2Config) -> Scorer:
    """Build the model, ready to be sharded: with its weights on the CPU in float32, or with none yet (`on_meta`).

    Raises:
        ConfigError: the folder holds no such model, or the family does not fit the config.
    """
    attention.register()
    name = kernels.implementation(config)
    hf, on_meta = loading.load(config.model, "sdpa" if name == attention.NAME else name)
    refused = "; ".join(map(str, families.refusals(hf, config)))
    if refused:
        raise ConfigError(refused)
    if name == attention.NAME:
        hf.set_attn_implementation(name)
    hf_names.check(hf, {name: tuple(tensor.shape) for name, tensor in weights.named_tensors(hf).items()})
    trainable.freeze(hf, config.freeze)
    if config.activation_checkpointing:
        recomputing.compute_again(hf, config)
    if config.inference_only:
        hf.requires_grad_(False)
        _cast(hf, dict(hf.named_parameters()), compute_dtype(config))
    base = _add_adapters(hf, config, on_meta) if config.lora.rank else {}
    scorer = Scorer(hf, config.model.head, base, on_meta)
    if config.compile:
        compilation.compile_layers(scorer)
    return scorer


def _add_adapters(hf: Any, config: Fsdp2Config, on_meta: loading.OnMeta | None) -> dict[str, int]:
    """Put adapters into `hf`; return the fingerprints of the base, which checkpoints do not hold (0: not yet read)."""
    trainable.attach(hf, config)
    frozen = {name: param for name, param in hf.named_parameters() if not param.requires_grad}
    base = {name: 0 if param.is_meta else lora.fingerprint(param) for name, param in frozen.items()}
    if on_meta is not None:
        on_meta.initialised.update(
            (name, param.detach().clone()) for name, param in hf.named_parameters() if lora.is_adapter(name)
        )
    _cast(hf, frozen, compute_dtype(config))  # never stepped, so float32 would only be memory
    return base


def _cast(hf: Any, params: dict[str, torch.nn.Parameter], dtype: torch.dtype) -> None:
    for name, param in params.items():
        if not families.stays_float32(hf, lora.plain_name(name)):
            param.data = param.data.to(dtype)


def compute_dtype(config: Fsdp2Config) -> torch.dtype:
    """Return the dtype in which the model computes and its weights leave."""
    return torch.bfloat16 if config.dtype == Dtype.BFLOAT16 else torch.float32
