"""Build the Hugging Face model and put a head on it."""

# transformers is typed in part: auto classes and configs answer with unknown types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from offbeat_engine.config import Dtype
from offbeat_engine.errors import ConfigError
from offbeat_engine.fsdp2 import attention, compilation, freezing, hf_names, lora, weights
from offbeat_engine.fsdp2.packing import (
    flash_inputs,
    flash_rows_inputs,
    packed_inputs,
    padded_inputs,
    shared_inputs,
)
from offbeat_engine.fsdp2.scorer import Scorer

if TYPE_CHECKING:
    from offbeat_engine.config import ModelConfig
    from offbeat_engine.fsdp2.config import Fsdp2Config
    from offbeat_engine.fsdp2.packing import MakeInputs

# Settings by which some families change logits after the head; we take logits ourselves, so we must not ignore them.
_LOGIT_SETTINGS = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}


def build_scorer(config: Fsdp2Config) -> Scorer:
    """Load or draw the model on the CPU in float32, ready to be sharded.

    Raises:
        ConfigError: the folder holds no such model, or the family does not fit the config.
    """
    attention.register()
    name = attention_name(config)
    hf = _load(config.model, "sdpa" if name == attention.NAME else name)
    if name == attention.NAME:
        if not getattr(hf, "_supports_attention_backend", False):
            raise ConfigError(f"{type(hf).__name__} has its own attention; set `packing: false`")
        hf.set_attn_implementation(name)
    for setting, neutral in _LOGIT_SETTINGS.items():
        if getattr(hf.config, setting, None) not in (None, neutral):
            raise ConfigError(f"{type(hf).__name__} uses `{setting}`, which this engine does not apply")
    if name == attention.NAME and getattr(hf.config, "attn_logit_softcapping", None) is not None:
        raise ConfigError(
            f"{type(hf).__name__} uses `attn_logit_softcapping`, which packed attention does not apply; set "
            "`packing: false` and `attention: eager`"
        )
    hf_names.check(hf, {name: tuple(tensor.shape) for name, tensor in weights.held(hf).items()})
    freezing.freeze(hf, config.freeze)
    if config.activation_checkpointing:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    scorer = Scorer(hf, config.model.head, _add_adapters(hf, config) if config.lora.rank else None)
    if config.compile:
        compilation.compile_layers(scorer)
    return scorer


def _add_adapters(hf: Any, config: Fsdp2Config) -> dict[str, int]:  # noqa: ANN401
    """Put adapters into `hf`; return the fingerprints of the base, which checkpoints do not hold."""
    lora.attach(hf, config)
    frozen = {name: param for name, param in hf.named_parameters() if not param.requires_grad}
    base = {name: lora.fingerprint(param) for name, param in frozen.items()}
    if config.dtype is Dtype.BFLOAT16:
        for param in frozen.values():  # never stepped, so float32 would only be memory
            param.data = param.data.bfloat16()
    return base


def compute_dtype(config: Fsdp2Config) -> torch.dtype:
    """Return the dtype in which the model computes and its weights leave."""
    return torch.bfloat16 if config.dtype is Dtype.BFLOAT16 else torch.float32


def attention_name(config: Fsdp2Config) -> str:
    """Return the transformers attention implementation that `config` comes to."""
    chosen = _kernel(config)
    # Flash-attention goes through ours where transformers' own knows no cut rows, no determinism, no graph's end.
    special = config.sequence_parallel_size > 1 or config.deterministic or config.compile
    ours = chosen == "sdpa" or (chosen == "flash_attention_2" and special)
    return attention.NAME if ours and config.packing else chosen


def wants_flash(config: Fsdp2Config) -> bool:
    """Return whether attention comes to flash-attention's kernels, through transformers or through ours."""
    return _kernel(config) == "flash_attention_2"


def _kernel(config: Fsdp2Config) -> str:
    if config.attention != "auto":
        return config.attention
    flash = config.device == "cuda" and config.dtype is Dtype.BFLOAT16 and has_flash_attention()
    return "flash_attention_2" if flash else "sdpa"


def inputs_maker(config: Fsdp2Config) -> MakeInputs:
    """Return the arrangement of tokens that goes with the attention of `config`."""
    if not config.packing:
        return padded_inputs
    if attention_name(config) != attention.NAME:
        return flash_inputs
    if wants_flash(config):
        return flash_rows_inputs
    # Ranks that share a row cut it where they like, which a shared beginning does not survive.
    alone = config.sequence_parallel_size == 1
    return shared_inputs if config.share_prefixes and alone else packed_inputs


def has_flash_attention() -> bool:
    """Return whether the flash-attn package is installed."""
    return find_spec("flash_attn") is not None


def _load(config: ModelConfig, attn: str) -> Any:  # noqa: ANN401
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification
    from transformers.utils import logging

    auto: Any = AutoModelForTokenClassification if config.head == "value" else AutoModelForCausalLM
    remote: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        extra: dict[str, Any] = {"num_labels": 1} if config.head == "value" else {}
        shape = AutoConfig.from_pretrained(config.path, local_files_only=True, **remote, **extra)
        common: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": attn, **remote}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)  # also decides a value head that the folder does not hold
            if config.random_init:
                return auto.from_config(shape, **common)
            hf, report = auto.from_pretrained(
                config.path, config=shape, local_files_only=True, output_loading_info=True, **common
            )
            return _complete(hf, report, config)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(
            f"no model for a {config.head} head in {config.path!r}: expected a local Hugging Face folder with "
            f"config.json{'' if config.random_init else ' and safetensors'} ({error})"
        ) from error
    finally:
        if bars:
            logging.enable_progress_bar()


def _complete(hf: Any, report: dict[str, Any], config: ModelConfig) -> Any:  # noqa: ANN401
    """Return `hf` unless weights were drawn that the folder should have held; a value head may be new."""
    missing = sorted(report["missing_keys"])
    if config.head == "value":
        missing = [name for name in missing if not name.startswith("score.")]
    if missing:
        raise ValueError(
            f"its safetensors lack {len(missing)} of the model's weights, such as `{missing[0]}`"
        )
    return hf
