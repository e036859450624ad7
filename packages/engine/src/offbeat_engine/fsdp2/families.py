"""Which models this engine is exact for, as far as their config and their modules tell."""

from __future__ import annotations

import inspect
import re
import sys
from typing import TYPE_CHECKING, Any

import torch

from offbeat_engine.config import Refusal
from offbeat_engine.errors import ConfigError
from offbeat_engine.toolkit.hf import probing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat_engine.fsdp2.config import Fsdp2Config

# Settings by which some families change logits after the head, and the values that change nothing. The engine takes logits
# itself and does not apply them.
_LOGIT_SETTINGS: dict[str, tuple[object, ...]] = {
    "final_logit_softcapping": (None, 0, 0.0),
    "logits_soft_cap": (None, 0, 0.0),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "lm_head_multiplier": (None, 1.0),
}
# Layers that see no token but through attention with a plain causal mask, perhaps of a window.
_PACKABLE = frozenset({"full_attention", "sliding_attention", "attention"})
_RANDOM = re.compile(r"drop|jitter")
# Parameters of routers with which vLLM, and the family's own code, compute in float32, and which transformers does not list (afmoe,
# laguna, longcat_flash).
_ROUTERS = re.compile(r"\.(expert_bias|e_score_correction_bias|router\.classifier\.weight)$")


def refusals(hf: Any, config: Fsdp2Config) -> Iterator[Refusal]:
    """Yield every reason in the structure of `hf` why it would not be exact under `config`; its weights may be meta tensors."""
    yield from _head_refusals(hf)
    yield from _attention_refusals(hf, packing=config.packing, attention=config.attention)
    yield from probing.refusals(hf.config.get_text_config(), config.max_sequence_tokens)


def _head_refusals(hf: Any) -> Iterator[Refusal]:
    family = type(hf).__name__
    if decoder_of(hf) is None:
        yield _not_for(f"{family} has no decoder apart from its head")
    if head_of(hf) is None:
        yield _not_for(f"{family} has no linear layer as its head")
    for config in (hf.config, hf.config.get_text_config()):
        for setting, neutral in _LOGIT_SETTINGS.items():
            if getattr(config, setting, None) not in neutral:
                yield _not_for(
                    f"{family} changes its logits by `{setting}`: {getattr(config, setting)}, which this engine does not apply"
                )
        if config is hf.config.get_text_config():
            return


def _attention_refusals(hf: Any, *, packing: bool, attention: str) -> Iterator[Refusal]:
    family, config = type(hf).__name__, hf.config.get_text_config()
    if attention != "eager" and not getattr(hf, "_supports_sdpa", False):
        yield Refusal(
            setting="attention",
            reason=f"{family} has no attention but its own (no sdpa)",
            remedy="set `attention: eager` and `packing: false`",
        )
    elif packing and not getattr(hf, "_supports_attention_backend", False):
        yield Refusal(
            setting="packing", reason=f"{family} has its own attention", remedy="set `packing: false`"
        )
    if packing:
        mixing = mixing_layers(hf)
        if mixing is not None:
            yield Refusal(
                setting="packing",
                reason=f"{family} has {mixing}, which would mix tokens of packed sequences",
                remedy="set `packing: false`",
            )
        if _masks_windows(hf):
            yield Refusal(
                setting="packing",
                reason=f"{family} has a window of {config.sliding_window} tokens in its masks alone, which packed rows have not",
                remedy="set `packing: false`",
            )
    if attention != "eager" and getattr(config, "attn_logit_softcapping", None):
        yield Refusal(
            setting="attention",
            reason=f"{family} uses `attn_logit_softcapping`, which only eager attention applies",
            remedy="set `attention: eager` and `packing: false`",
        )


def _masks_windows(hf: Any) -> bool:
    """Return whether layers see a window of tokens, and the family's code tells the mask of it but not attention.

    A probe that is shorter than the window would not show it.
    """
    config, code = hf.config.get_text_config(), sys.modules[type(hf).__module__]
    if not getattr(config, "sliding_window", None) or not hasattr(code, "create_sliding_window_causal_mask"):
        return False
    kinds = getattr(config, "layer_types", None) or ("sliding_attention",)
    return "sliding_attention" in kinds and "sliding_window=" not in inspect.getsource(code)


def _not_for(reason: str) -> Refusal:
    return Refusal(setting="model.path", reason=reason, remedy="use another model, or another engine")


def mixing_layers(hf: Any) -> str | None:
    """Return what mixes tokens outside attention, or through attention of another kind, in words; None if nothing does."""
    config = hf.config.get_text_config()
    for setting in ("layer_types", "layers_block_type", "block_types"):
        found = sorted(set(getattr(config, setting, None) or ()) - _PACKABLE)
        if found:
            return f"layers of type {', '.join(found)}"
    decoder = decoder_of(hf)
    convolutions = (
        () if decoder is None else (each for each in decoder.modules() if isinstance(each, torch.nn.Conv1d))
    )
    return "a convolution over tokens" if any(True for _ in convolutions) else None


def decoder_of(hf: Any) -> Any | None:
    """Return the part of `hf` that makes hidden states, or None where it is not apart from the head."""
    base = hf.base_model
    if base is not hf:
        return base
    return next(
        (
            part
            for name in ("model", "transformer", "decoder")
            if (part := getattr(hf, name, None)) is not None
        ),
        None,
    )


def head_of(hf: Any) -> torch.nn.Linear | None:
    """Return the linear layer that makes logits, or values, of hidden states; None where there is none.

    A value head is the one linear layer outside the decoder.
    """
    embeddings = hf.get_output_embeddings()
    if isinstance(embeddings, torch.nn.Linear):
        return embeddings
    decoder = decoder_of(hf)
    inside = set() if decoder is None else {id(module) for module in decoder.modules()}
    linear = [each for each in hf.modules() if isinstance(each, torch.nn.Linear) and id(each) not in inside]
    return linear[0] if len(linear) == 1 else None


def layers_of(hf: Any) -> Iterator[torch.nn.Module]:
    """Return the decoder layers, by the classes that the model family names as not to be split."""
    names: set[str] = {*(getattr(hf, "_no_split_modules", None) or ())}
    layers = [module for module in hf.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(f"{type(hf).__name__} does not say which of its modules are layers to shard")
    return iter(layers)


def stays_float32(hf: Any, name: str) -> bool:
    """Return whether the family computes with its parameter `name` in float32 whatever the model's dtype is.

    Rounded, a router's weights would choose other experts. `from_pretrained` does the same, by the same list of patterns.
    """
    patterns = getattr(hf, "_keep_in_fp32_modules_strict", None) or ()
    return _ROUTERS.search(name) is not None or any(
        re.search(pattern.replace("*", ".*"), name) for pattern in patterns
    )


def takes_positions(hf: Any) -> bool:
    """Return whether positions can be handed to the model."""
    return "position_ids" in inspect.signature(hf.forward).parameters


class Noise:
    """What a model brings along that answers at random in training: dropout, router jitter. Adapters' own is not among it."""

    def __init__(self, hf: Any) -> None:
        self._found: list[tuple[Any, str, float]] = []
        for holder in [
            *_configs(hf.config),
            *(each for name, each in hf.named_modules() if "lora_" not in name),
        ]:
            names = (
                ["p"]
                if isinstance(holder, torch.nn.Dropout)
                else [name for name in vars(holder) if _RANDOM.search(name)]
            )
            values = ((name, getattr(holder, name)) for name in names)
            self._found += [
                (holder, name, float(value))
                for name, value in values
                if isinstance(value, int | float) and not isinstance(value, bool) and value > 0
            ]

    def __str__(self) -> str:
        values = {
            name: value for holder, name, value in self._found if not isinstance(holder, torch.nn.Module)
        }
        return ", ".join(f"{name}={value:g}" for name, value in sorted(values.items())) or "dropout"

    def __bool__(self) -> bool:
        return bool(self._found)

    def set(self, value: float) -> None:
        """Set everything found to `value`."""
        for holder, name, _ in self._found:
            setattr(holder, name, value)

    def restore(self) -> None:
        """Set everything back."""
        for holder, name, value in self._found:
            setattr(holder, name, value)


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if hasattr(value, "get_text_config"):
            yield from _configs(value)


def restore(written: dict[str, Any], source: dict[str, Any]) -> bool:
    """Give the config.json `written` back what was silenced, as `source` has it; return whether that changed anything."""
    changed = False
    for name, was in source.items():
        if isinstance(was, dict) and isinstance(written.get(name), dict):
            changed |= restore(written[name], was)
        elif _RANDOM.search(name) and name in written and written[name] != was:
            written[name], changed = was, True
    return changed
