"""Which weights low-rank matrices lie over, and what they are called.

Names are those of peft's `adapter_model.safetensors` (huggingface.co/docs/peft, "Checkpoint format").
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# transformers' auto classes are typed loosely.

from __future__ import annotations

from typing import TYPE_CHECKING

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
        shape = AutoConfig.from_pretrained(config.model_path, local_files_only=True)
        with device("meta"):
            model = AutoModelForCausalLM.from_config(shape)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the model in {config.model_path!r}: {error}") from error
    return lora_specs(lora_layers(model, config.lora), config.lora.rank, config.dtype)


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
