"""Low-rank adapters (arXiv 2106.09685) by peft: found again in a model that has them, and described to peft."""

# transformers and peft are typed in part: modules and configs answer with unknown types.
# pyright: reportMissingImports=false

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from offbeat_engine.batch import WeightKind
from offbeat_engine.config import LoraExport
from offbeat_engine.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from offbeat_engine.config import LoraConfig

ADAPTER = "default"
"""peft's name of the one adapter; it stands in names in memory, not in files."""

_PEFT_PREFIX = "base_model.model."  # as `adapter_model.safetensors` has it
_BASE_LAYER = ".base_layer."


@dataclass(frozen=True, slots=True)
class Adapter:
    """What is added to one weight W [out, in]: scale * B [out, r] @ A [r, in]."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


def has_peft() -> bool:
    """Return whether the peft package is installed."""
    return find_spec("peft") is not None


def kind_of(config: LoraConfig) -> WeightKind:
    """Return what `named_weights` yields under `config`."""
    alone = config.rank > 0 and config.export == LoraExport.ADAPTER
    return WeightKind.ADAPTER if alone else WeightKind.FULL


@contextmanager
def left_out(hf: Any) -> Generator[None]:
    """Let the base of `hf` answer alone inside.

    Raises:
        StateError: there are no adapters, or a value head is trained beside them, of which there is no base.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    if ADAPTER not in getattr(hf, "peft_config", {}) or hf.peft_config[ADAPTER].task_type == "TOKEN_CLS":
        raise StateError("`base_mode` is for a language model with adapters; use `eval_mode`")
    layers = [module for module in hf.modules() if isinstance(module, BaseTunerLayer)]
    # Not by `enable_adapters`, which takes gradients away from adapters as well.
    for layer in layers:
        layer._disable_adapters = True  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def plain_name(name: str) -> str:
    """Return the name that a weight has without adapters around it."""
    return name.replace(_BASE_LAYER, ".")


def is_adapter(name: str) -> bool:
    """Return whether `name` is one of the matrices A and B, not a weight of the base."""
    return name.endswith((f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"))


def peft_name(name: str) -> str:
    """Return the name of a trained weight in `adapter_model.safetensors`."""
    return _PEFT_PREFIX + name.replace(f".{ADAPTER}.", ".")


def adapter_of(hf: Any, held: dict[str, torch.Tensor], name: str) -> Adapter | None:
    """Return what is added to the weight `name` of `held`, or None."""
    module, found, parameter = name.rpartition(_BASE_LAYER)
    if not found or parameter != "weight":
        return None
    return Adapter(
        a=held[f"{module}.lora_A.{ADAPTER}.weight"],
        b=held[f"{module}.lora_B.{ADAPTER}.weight"],
        scale=float(hf.get_submodule(module).scaling[ADAPTER]),
    )


def write_config(folder: Path, hf: Any) -> None:
    """Write `adapter_config.json`, by which peft knows what the adapter belongs to."""
    from copy import copy

    description = copy(hf.peft_config[ADAPTER])
    description.inference_mode = True
    if description.task_type == "TOKEN_CLS":
        description.modules_to_save = ["score"]
    description.save_pretrained(str(folder))


def described(hf: Any) -> dict[str, Any]:
    """Return what gives A and B their meaning, JSON-ready, under the names of `LoraConfig`; {} without adapters.

    `targets` are the last parts of the adapted modules' names.
    """
    if ADAPTER not in getattr(hf, "peft_config", {}):
        return {}
    config, mark = hf.peft_config[ADAPTER], f".lora_A.{ADAPTER}.weight"
    adapted = {
        name.removesuffix(mark).rpartition(".")[2] for name, _ in hf.named_parameters() if name.endswith(mark)
    }
    return {"rank": int(config.r), "alpha": float(config.lora_alpha), "targets": sorted(adapted)}


def fingerprint(tensor: torch.Tensor, first_row: int = 0) -> int:
    """Return a number that changes with any value of a frozen float32 weight, or with the order of its rows.

    Those of parts of a weight, each from its `first_row` on, add up to that of the whole (in 64 bits).
    """
    # Integers add up to the same whatever the order of addition.
    bits_RC = tensor.detach().cpu().contiguous().view(torch.int32).reshape(max(1, tensor.shape[0]), -1)
    rows_R = bits_RC.sum(1, dtype=torch.int64)
    return int((rows_R * torch.arange(first_row + 1, first_row + len(rows_R) + 1)).sum())
