"""The model behind the Transformers adapter: loading it, naming its weights, and taking new ones whole or not at all.

Where the tensors of a checkpoint lie in a model that holds them otherwise: transformers 5 fuses the experts of a mixture.

Transformers undoes that in `save_pretrained`. The same undoing, of numbers that name places, tells where in a live weight each tensor
of the checkpoint lies; if that is a lattice, it is a view of the live weight, and what is written into it is served.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# transformers' models and conversions are typed loosely.

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from offbeat_rollout.errors import ConfigError, UpdateRefused
from offbeat_rollout.hf.cache import ATTENTION_NAME, register_attention

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from transformers import PretrainedConfig, PreTrainedModel

    from offbeat_rollout.config import RolloutConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A tensor of the checkpoint in the live weight `held`: `torch.as_strided` of that, whole and in order."""

    held: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def view(self, live: torch.Tensor) -> torch.Tensor:
        """Return what of `live` it is."""
        assert live.is_contiguous()
        return live.as_strided(self.shape, self.strides, live.storage_offset() + self.offset)


def places_of(model: PreTrainedModel, live: Mapping[str, torch.Tensor]) -> dict[str, Place]:
    """Return the place of each tensor of a checkpoint of `model` in `live`; empty where those are the live weights themselves.

    Raises:
        ConfigError: one is no view of a live weight.
    """
    if not _converts(model):
        return {}
    return {
        name: place for held, weight in live.items() for name, place in _within(model, held, weight).items()
    }


def _converts(model: PreTrainedModel) -> bool:
    if find_spec("transformers.conversion_mapping") is None:
        return False
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(get_model_conversion_mapping(model, add_legacy=False))


def _within(model: PreTrainedModel, held: str, weight: torch.Tensor) -> dict[str, Place]:
    from transformers.core_model_loading import revert_weight_conversion

    revert: Any = revert_weight_conversion
    with torch.no_grad():
        parts: dict[str, torch.Tensor] = revert(model, {held: weight})
        if len(parts) == 1:
            ((name, only),) = parts.items()
            if (
                only.data_ptr() == weight.data_ptr() and only.shape == weight.shape
            ):  # another name, if anything
                return {name: Place(held=held, shape=tuple(weight.shape), strides=weight.stride(), offset=0)}
        numbered = torch.arange(weight.numel()).view(weight.shape)
        return {
            name: _lattice(held, name, part, numbered)
            for name, part in revert(model, {held: numbered}).items()
        }


def _lattice(held: str, name: str, part: torch.Tensor, numbered: torch.Tensor) -> Place:
    """Return the place of a tensor whose numbers are `part` among those of the live weight."""
    first = int(part.flatten()[0])
    strides = tuple(
        int(part.select(dim, 1).flatten()[0]) - first if size > 1 else 1
        for dim, size in enumerate(part.shape)
    )
    place = Place(held=held, shape=tuple(part.shape), strides=strides, offset=first)
    if min(strides) < 0 or not torch.equal(place.view(numbered), part):
        raise ConfigError(
            f"{name!r} of the checkpoint is no part of {held!r} that lies in order: the hf adapter cannot update it; use vllm"
        )
    return place


_NAMES_SHOWN = 20


def load_model(config: RolloutConfig) -> PreTrainedModel:
    """Load the causal language model in `config.model_path`, ready to generate.

    Raises:
        ConfigError: the folder is no such model, or the model uses attention this adapter does not do.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    register_attention()
    try:
        model_config = AutoConfig.from_pretrained(
            config.model_path, local_files_only=True, trust_remote_code=config.trust_remote_code
        )
        _check_attention(model_config, config.max_model_len)
        model = AutoModelForCausalLM.from_pretrained(
            config.model_path,
            config=model_config,
            dtype=getattr(torch, config.dtype),
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            trust_remote_code=config.trust_remote_code,
        )
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"cannot load a causal language model from {config.model_path!r}: {error!r}"
        ) from error
    return cast("PreTrainedModel", model).to(config.device).eval()  # pyright: ignore[reportArgumentType] # a device name


def check_model(config: RolloutConfig) -> None:
    """Refuse a model that this adapter cannot serve, by its config.json alone; a folder without one is not looked at.

    Raises:
        ConfigError: the model uses attention this adapter does not do, or has fewer positions than are asked for.
    """
    if not (Path(config.model_path) / "config.json").is_file():
        return
    from transformers import AutoConfig

    try:
        shape = AutoConfig.from_pretrained(
            config.model_path, local_files_only=True, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot read the config.json in {config.model_path!r}: {error}") from error
    _check_attention(shape.get_text_config(), config.max_model_len)


def _check_attention(config: PretrainedConfig, max_model_len: int) -> None:
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None) or []
    sliding = "sliding_attention" in layer_types or (not layer_types and window is not None)
    if sliding and window is not None and window < max_model_len:
        raise ConfigError(
            f"the model attends through a window of {window} tokens and `max_model_len` is {max_model_len}; "
            "the hf adapter has full attention only: lower `max_model_len` to the window, or use vllm"
        )
    other = set(layer_types) - {"full_attention", "sliding_attention"}
    softcap = getattr(config, "attn_logit_softcapping", None)
    if other or softcap is not None:
        what = sorted(other) or f"attention soft-capping ({softcap})"
        raise ConfigError(f"the hf adapter does not do {what}; use vllm for this model")
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and max_model_len > positions:
        raise ConfigError(
            f"`max_model_len` is {max_model_len} and the model was made for {positions} positions"
        )


def named_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the live weights: tied tensors once, under the name `save_pretrained` keeps."""
    tied = getattr(model, "_tied_weights_keys", None)
    secondary: set[str] = set(cast("Iterable[str]", tied)) if tied else set()
    state = cast("dict[str, torch.Tensor]", model.state_dict(keep_vars=True))
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in state.items():
        # Distinct empty tensors all have data pointer 0: only a real address says "the same memory".
        groups.setdefault(_memory_of(tensor) if tensor.numel() else (name,), []).append(name)
    kept = {next((name for name in names if name not in secondary), names[0]) for names in groups.values()}
    return {name: tensor for name, tensor in state.items() if name in kept}


def _memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the torch name of the dtype without its prefix, say "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


def check_given(
    specs: Iterable[tuple[str, tuple[int, ...], str]], tensors: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Return `tensors` by name if they are exactly those of `specs`; touch nothing.

    Raises:
        UpdateRefused: naming everything that is unknown, missing, given twice, or of another shape or dtype.
    """
    live = {name: (shape, dtype) for name, shape, dtype in specs}
    given: dict[str, torch.Tensor] = {}
    wrong: list[str] = []
    for name, tensor in tensors:
        if name in given:
            wrong.append(f"{name} came twice")
        elif name not in live:
            wrong.append(f"{name} is unknown to the model")
        elif tuple(tensor.shape) != live[name][0]:
            wrong.append(f"{name} has shape {tuple(tensor.shape)}, expected {live[name][0]}")
        elif dtype_name(tensor) != live[name][1]:
            wrong.append(f"{name} has dtype {dtype_name(tensor)}, expected {live[name][1]}")
        given[name] = tensor
    wrong += [f"{name} is missing" for name in live if name not in given]
    if wrong:
        more = f"; and {len(wrong) - _NAMES_SHOWN} more" if len(wrong) > _NAMES_SHOWN else ""
        raise UpdateRefused(
            f"weight update refused, nothing was changed: {'; '.join(wrong[:_NAMES_SHOWN])}{more}. "
            "Send every tensor that `specs` lists, once"
        )
    return given


class WholeWeights:
    """Updates that bring every weight of the model, by the names and shapes of its checkpoint."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Write into `model`.

        Raises:
            ConfigError: it holds weights in a way that they cannot be written into.
        """
        self._model = model
        self._places = places_of(model, named_weights(model))

    @property
    def adopts(self) -> bool:
        """Whether what an update brings can be the live weights: a mixture's experts, which are one tensor there, cannot."""
        return not self._places

    def specs(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Return what an update must bring, in the model's order."""
        return [(name, tuple(tensor.shape), dtype_name(tensor)) for name, tensor in self._live().items()]

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Check all, then copy all into the live weights (tied ones change together, they share memory)."""
        given = check_given(self.specs(), tensors)
        with torch.no_grad():
            for name, tensor in self._live().items():
                tensor.copy_(given[name])

    def adopt(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Check all, then point the model at the tensors themselves, in host memory (tied weights at the same one)."""
        given = check_given(self.specs(), tensors)
        state = cast("dict[str, torch.Tensor]", self._model.state_dict(keep_vars=True))
        fresh = {
            _memory_of(tensor): given[name].contiguous()
            for name, tensor in named_weights(self._model).items()
            if tensor.numel()
        }
        assert self.adopts
        for tensor, data in [(each, fresh[_memory_of(each)]) for each in state.values() if each.numel()]:
            tensor.data = data

    def _live(self) -> dict[str, torch.Tensor]:
        """Return the live weights, or their parts, by the names of the checkpoint."""
        live = named_weights(self._model)
        return {name: place.view(live[place.held]) for name, place in self._places.items()} or live
