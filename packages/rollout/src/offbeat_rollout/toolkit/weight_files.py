"""Names, shapes and dtypes of a model folder's weights, from the headers of its safetensors files; torch is not needed.

Which weights low-rank matrices lie over, and what they are called.

Names are those of peft's `adapter_model.safetensors` (huggingface.co/docs/peft, "Checkpoint format").
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# transformers' auto classes are typed loosely.

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from offbeat_rollout.config import read_json
from offbeat_rollout.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from offbeat_rollout.config import LoraConfig, RolloutConfig


_PREFIX = "base_model.model."


def names_of(module: str) -> tuple[str, str]:
    """Return the names of A and of B over the weight of `module`."""
    return f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"


def lora_layers(model: PreTrainedModel, lora: LoraConfig) -> dict[str, torch.nn.Linear]:
    """Return the linear layers of the base model that `lora` lies over, by module name, in the model's order.

    Raises:
        ConfigError: a target is no linear layer there, or there is none at all.
    """
    from torch.nn import Linear

    inside = {id(module) for module in model.base_model.modules()}
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Linear) and id(module) in inside
    }
    for target in lora.targets:
        if not any(_ends(name, target) for name in linear):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise ConfigError(f"`lora.targets`: no linear layer is called {target!r}; there are {known}")
    chosen = {
        name: module
        for name, module in linear.items()
        if not lora.targets or any(_ends(name, target) for target in lora.targets)
    }
    if not chosen:
        raise ConfigError(f"{type(model).__name__} has no linear layer that low-rank matrices could lie over")
    return chosen


def lora_specs(
    layers: dict[str, torch.nn.Linear], rank: int, dtype: str
) -> list[tuple[str, tuple[int, ...], str]]:
    """Return (name, shape, dtype name) of A [rank, in] and B [out, rank] of every layer."""
    specs: list[tuple[str, tuple[int, ...], str]] = []
    for module, layer in layers.items():
        a, b = names_of(module)
        specs += [(a, (rank, layer.in_features), dtype), (b, (layer.out_features, rank), dtype)]
    return specs


def folder_lora_specs(config: RolloutConfig) -> list[tuple[str, tuple[int, ...], str]]:
    """Return `lora_specs` for the model folder and the `lora` of `config`; loads no weights.

    Raises:
        ConfigError: the folder is no causal language model, or a target is no linear layer of it.
    """
    from torch import device
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        shape = AutoConfig.from_pretrained(
            config.model_path, local_files_only=True, trust_remote_code=config.trust_remote_code
        )
        with device("meta"):
            model = AutoModelForCausalLM.from_config(shape, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the model in {config.model_path!r}: {error}") from error
    return lora_specs(lora_layers(model, config.lora), config.lora.rank, config.dtype)


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_TORCH_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip
_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})


def folder_specs(model_path: str, served_dtype: str) -> list[tuple[str, tuple[int, ...], str]]:
    """Return (name, shape, dtype name) of every weight in a Hugging Face folder, in name order.

    What `model.safetensors` holds are those, else what the folder's index lists, as `from_pretrained` takes them: other files
    beside them (a second set of weights, adapters) are not the model's. Left out is what a folder lists and no trainer exports: rotary
    frequencies, which every model computes, and layers that predict further tokens. Floating-point weights are named in
    `served_dtype`: the engine casts them when it loads.

    Raises:
        ConfigError: there is no config.json, no such file, or one that is damaged.
    """
    folder = Path(model_path)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{model_path!r} holds no config.json; `model_path` must be a local Hugging Face folder"
        )
    aside = _left_out(folder)
    specs: list[tuple[str, tuple[int, ...], str]] = []
    for file, names in _files(folder).items():
        for name, shape, stored in _read(folder / file, names):
            dtype = _TORCH_NAMES.get(stored, stored.lower())
            specs.append((name, shape, served_dtype if dtype in _FLOATS else dtype))
    return sorted(
        spec for spec in specs if not (spec[0].startswith(aside) or spec[0].endswith("rotary_emb.inv_freq"))
    )


def _left_out(folder: Path) -> tuple[str, ...]:
    """Return how the names of layers begin that only predict further tokens."""
    config = read_json(folder / "config.json")
    config = config.get("text_config", config)
    first = config.get("num_hidden_layers", 0)
    further = range(first, first + (config.get("num_nextn_predict_layers") or 0))
    return ("mtp.", *(f"model.layers.{layer}." for layer in further))


def _files(folder: Path) -> dict[str, list[str] | None]:
    """Return the files of the model with the names to take from each; None is all."""
    if (folder / _WHOLE).is_file():
        return {_WHOLE: None}
    index = folder / _INDEX
    if not index.is_file():
        raise ConfigError(
            f"{str(folder)!r} holds neither {_WHOLE} nor {_INDEX}; write weights there first (`save_pretrained` "
            "does), random ones too"
        )
    try:
        places = cast("dict[str, str]", json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{str(index)!r} is no index of safetensors files: {error!r}") from error
    files: dict[str, list[str] | None] = {}
    for name, file in places.items():
        names = files.setdefault(file, [])
        assert names is not None
        names.append(name)
    return files


def _read(path: Path, names: list[str] | None) -> list[tuple[str, tuple[int, ...], str]]:
    from safetensors import SafetensorError, safe_open

    try:
        # The library's stub knows neither names nor slices.
        with cast("Any", safe_open)(path, framework="np") as file:
            parts = {name: file.get_slice(name) for name in (file.keys() if names is None else names)}
            return [(name, tuple(part.get_shape()), str(part.get_dtype())) for name, part in parts.items()]
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as the index or its name says: {error}") from error
