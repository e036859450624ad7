"""The model behind the Transformers adapter: loading it, naming its weights, and taking new ones whole or not at all."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# transformers' auto classes are typed loosely.

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from offbeat_rollout.errors import ConfigError, UpdateRefused
from offbeat_rollout.hf.cache import ATTENTION_NAME, register_attention
from offbeat_rollout.hf.places import places_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PretrainedConfig, PreTrainedModel

    from offbeat_rollout.config import RolloutConfig

_NAMES_SHOWN = 20


def load_model(config: RolloutConfig) -> PreTrainedModel:
    """Load the causal language model in `config.model_path`, ready to generate.

    Raises:
        ConfigError: the folder is no such model, or the model uses attention this adapter does not do.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    register_attention()
    try:
        model_config = AutoConfig.from_pretrained(config.model_path, local_files_only=True)
        _check_attention(model_config, config.max_model_len)
        model = AutoModelForCausalLM.from_pretrained(
            config.model_path,
            config=model_config,
            dtype=getattr(torch, config.dtype),
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
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
        shape = AutoConfig.from_pretrained(config.model_path, local_files_only=True)
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
