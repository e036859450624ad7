"""Low-rank adapters (arXiv 2106.09685) by peft: put into the model in place, found again, described to peft."""

# transformers and peft are typed in part: modules and configs answer with unknown types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false, reportMissingTypeStubs=false

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from offbeat_engine.config import LoraExport
from offbeat_engine.errors import ConfigError, StateError
from offbeat_engine.fsdp2 import families
from offbeat_engine.values import WeightKind

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from offbeat_engine.config import LoraConfig
    from offbeat_engine.fsdp2.config import Fsdp2Config

ADAPTER = "default"
"""peft's name of the one adapter; it stands in names in memory, not in files."""

_PEFT_PREFIX = "base_model.model."  # as `adapter_model.safetensors` has it
_BASE_LAYER = ".base_layer."
_HELD = "hf"
_HEADS = frozenset({"lm_head", "score"})


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
    alone = config.rank > 0 and config.export is LoraExport.ADAPTER
    return WeightKind.ADAPTER if alone else WeightKind.FULL


def attach(hf: Any, config: Fsdp2Config) -> None:  # noqa: ANN401
    """Freeze `hf` and give it adapters, drawn from the model's seed; a value head goes on being trained.

    Raises:
        ConfigError: a target is no linear layer of the base model, or peft could not load the adapter that is to leave.
    """
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    lora, value = config.lora, config.model.head == "value"
    targets = _targets(hf, lora.targets)
    description = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType] annotated int, but a factor like any
        lora_dropout=lora.dropout,
        target_modules=[f"{_HELD}.{name}" for name in targets.modules],
        task_type="TOKEN_CLS" if value else "CAUSAL_LM",
        base_model_name_or_path=config.model.path,
    )
    with torch.random.fork_rng(devices=[]), _stand_ins(hf):
        torch.manual_seed(config.model.seed)
        # In a holder that is no transformers model: in one, peft takes `gate_proj` and its like in families that have
        # experts for the experts' fused weights, and leaves dense layers of that name without an adapter.
        holder = torch.nn.Module()
        holder.add_module(_HELD, hf)
        inject_adapter_in_model(description, holder, adapter_name=ADAPTER)
    description.target_modules = set(targets.names)  # pyright: ignore[reportAttributeAccessIssue] a list before, a set after: as peft itself has it
    hf.peft_config = {ADAPTER: description}
    if lora.export is LoraExport.ADAPTER:
        _check_loadable(hf, description)
    if value:
        families.head_of(hf).requires_grad_(True)  # pyright: ignore[reportOptionalMemberAccess] refused where it is missing


@contextmanager
def _stand_ins(hf: Any) -> Generator[None]:  # noqa: ANN401
    """Let linear layers that have no values yet seem to have some: peft puts adapters where their layer is."""
    empty = {
        name: module.weight
        for name, module in hf.named_modules()
        if isinstance(module, torch.nn.Linear) and module.weight.is_meta
    }
    for name, weight in empty.items():  # one number, in the shape of all
        stand_in = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
        hf.get_submodule(name).weight = torch.nn.Parameter(stand_in, requires_grad=False)
    yield
    for name, weight in empty.items():
        layer = hf.get_submodule(name)
        getattr(layer, "base_layer", layer).weight = weight.requires_grad_(
            False
        )  # as peft left all but adapters


@contextmanager
def left_out(hf: Any) -> Generator[None]:  # noqa: ANN401
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


def adapter_of(hf: Any, held: dict[str, torch.Tensor], name: str) -> Adapter | None:  # noqa: ANN401
    """Return what is added to the weight `name` of `held`, or None."""
    module, found, parameter = name.rpartition(_BASE_LAYER)
    if not found or parameter != "weight":
        return None
    return Adapter(
        a=held[f"{module}.lora_A.{ADAPTER}.weight"],
        b=held[f"{module}.lora_B.{ADAPTER}.weight"],
        scale=float(hf.get_submodule(module).scaling[ADAPTER]),
    )


def write_config(folder: Path, hf: Any) -> None:  # noqa: ANN401
    """Write `adapter_config.json`, by which peft knows what the adapter belongs to."""
    from copy import copy

    description = copy(hf.peft_config[ADAPTER])
    description.inference_mode = True
    if description.task_type == "TOKEN_CLS":
        description.modules_to_save = ["score"]
    description.save_pretrained(str(folder))


def described(hf: Any) -> dict[str, Any]:  # noqa: ANN401
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


def _check_loadable(hf: Any, description: Any) -> None:  # noqa: ANN401
    """Refuse an adapter that peft would lay over other weights than those it was trained on."""
    from copy import deepcopy

    from peft.utils import transformers_weight_conversion as conversion

    seen = deepcopy(description)
    convert = getattr(conversion, "convert_peft_config_for_transformers", None)
    if convert is not None:
        convert(seen, model=hf, conversions=None)
    if getattr(seen, "target_parameters", None):
        raise ConfigError(
            f"`lora.export: adapter`: peft lays adapters of {', '.join(sorted(description.target_modules))} over the fused "
            f"experts of {type(hf).__name__} ({', '.join(sorted(seen.target_parameters))}), which are not trained here; use "
            "`lora.export: merged`, or name other layers in `lora.targets`"
        )


class _Targets(NamedTuple):
    """Which layers get an adapter: by `modules`, their whole names, and by `names` as peft's file shall have them."""

    modules: list[str]
    names: list[str]


def _targets(hf: Any, endings: tuple[str, ...]) -> _Targets:  # noqa: ANN401
    """Return the targets; by last parts of names where these mean the same."""
    modules = dict(hf.named_modules())
    inside = {id(module) for module in hf.base_model.modules()}
    linear = {
        name
        for name, module in modules.items()
        if isinstance(module, torch.nn.Linear) and id(module) in inside
    }
    chosen = set(linear)
    if endings:
        chosen = set[str]()
        for ending in endings:
            found = {name for name in modules if name == ending or name.endswith(f".{ending}")}
            _check_target(ending, found, linear)
            chosen |= found
    if not chosen:
        raise ConfigError(f"`lora.targets`: {type(hf).__name__} has no linear layer to adapt")
    last = {name.rpartition(".")[2] for name in chosen}
    same = {name for name in modules if name.rpartition(".")[2] in last} == chosen
    return _Targets(modules=sorted(chosen), names=sorted(last if same else chosen))


def _check_target(ending: str, found: set[str], linear: set[str]) -> None:
    known = sorted({name.rpartition(".")[2] for name in linear})
    if not found:
        near = get_close_matches(ending, known) or known
        raise ConfigError(f"`lora.targets`: no module is called `{ending}`; did you mean {', '.join(near)}?")
    if _HEADS & {name.rpartition(".")[2] for name in found}:
        raise ConfigError(
            f"`lora.targets`: the head `{ending}` takes no adapter; name layers of the base model"
        )
    odd = sorted(found - linear)
    if odd:
        raise ConfigError(f"`lora.targets`: `{odd[0]}` is no linear layer; choose among {', '.join(known)}")
