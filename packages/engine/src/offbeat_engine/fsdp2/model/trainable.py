"""What of a model is trained: all but the weights that patterns name, or low-rank adapters over it alone.

The model as the loss sees it: what it says of chosen tokens, instead of logits.
"""

# transformers and peft are typed in part: modules and configs answer with unknown types.
# pyright: reportMissingImports=false

from __future__ import annotations

from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from offbeat_engine.config import LoraExport
from offbeat_engine.errors import ConfigError
from offbeat_engine.fsdp2 import families
from offbeat_engine.fsdp2.weights import lora
from offbeat_engine.fsdp2.weights.export import exported
from offbeat_engine.toolkit.hf.probing import sequence_limit
from offbeat_engine.toolkit.step.logprobs import chosen_logprobs, token_logprobs, top_tokens

if TYPE_CHECKING:
    from collections.abc import Generator

    from offbeat_engine.fsdp2.config import Fsdp2Config
    from offbeat_engine.fsdp2.weights.loading import OnMeta
    from offbeat_engine.toolkit.hf.layouts import Layout


_HELD = "hf"
_HEADS = frozenset({"lm_head", "score"})


def freeze(hf: Any, patterns: tuple[str, ...]) -> None:
    """Take every weight whose exported name matches one of `patterns` (fnmatch, upper and lower case differ).

    Raises:
        ConfigError: a pattern matches nothing or only a part of what the model holds as one weight, or nothing
            is left to train.
    """
    sources = exported(hf)
    names = [name for source in sources for name, _ in source.parts]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
            raise ConfigError(
                f"`freeze`: no weight matches {pattern!r} (tied weights go by one name); near it are "
                + ", ".join(near)
            )
    for source in sources:
        frozen = [name for name, _ in source.parts if any(fnmatchcase(name, pattern) for pattern in patterns)]
        if frozen and len(frozen) < len(source.parts):
            left = next(name for name, _ in source.parts if name not in frozen)
            raise ConfigError(
                f"`freeze`: the model holds `{frozen[0]}` and `{left}` as one weight; freeze both or neither"
            )
        if frozen and isinstance(source.tensor, torch.nn.Parameter):
            source.tensor.requires_grad_(False)
    if patterns and not any(param.requires_grad for param in hf.parameters()):
        raise ConfigError(f"`freeze`: {list(patterns)} leave nothing to train; name fewer weights")


def attach(hf: Any, config: Fsdp2Config) -> None:
    """Freeze `hf` and give it adapters, drawn from the model's seed; a value head goes on being trained.

    Raises:
        ConfigError: a target is no linear layer of the base model, or peft could not load the adapter that is to leave.
    """
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    settings, value = config.lora, config.model.head == "value"
    targets = targets_of(hf, settings.targets)
    description = PeftConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType] annotated int, but a factor like any
        lora_dropout=settings.dropout,
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
        inject_adapter_in_model(description, holder, adapter_name=lora.ADAPTER)
    description.target_modules = set(targets.names)  # pyright: ignore[reportAttributeAccessIssue] a list before, a set after: as peft itself has it
    hf.peft_config = {lora.ADAPTER: description}
    if settings.export == LoraExport.ADAPTER:
        _check_loadable(hf, description)
    if value:
        families.head_of(hf).requires_grad_(True)  # pyright: ignore[reportOptionalMemberAccess] refused where it is missing


@contextmanager
def _stand_ins(hf: Any) -> Generator[None]:
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
        # As peft left all but adapters.
        getattr(layer, "base_layer", layer).weight = weight.requires_grad_(False)


def _check_loadable(hf: Any, description: Any) -> None:
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


def targets_of(hf: Any, endings: tuple[str, ...]) -> _Targets:
    """Return the targets; by last parts of names where these mean the same.

    Raises:
        ConfigError: an ending is that of no linear layer of the base model.
    """
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


class Scorer(torch.nn.Module):
    """A Hugging Face model that answers with what the loss needs instead of logits.

    Only the base model and the head run, so a mixture of experts adds no auxiliary loss for its router.
    """

    def __init__(
        self, hf: Any, head: str, base: dict[str, int] | None = None, on_meta: OnMeta | None = None
    ) -> None:
        super().__init__()
        self.hf = hf
        self.head = head
        # In a tuple, so that they stay children of `hf` alone.
        self.sequence_limit = sequence_limit(hf.config.get_text_config())
        self._ends = (families.decoder_of(hf), families.head_of(hf))
        self.base = {} if base is None else base  # fingerprints of what checkpoints leave out
        self.on_meta = on_meta  # where the weights are, while `hf` does not hold them

    def forward(self, layout: Layout, entropy_gradient: bool, top_k: int = 0) -> tuple[torch.Tensor, ...]:
        """Return `(logprobs_M, entropy_M)`, or `(values_M,)` with a value head; float32.

        With `top_k` then `(top_logprobs_MK, top_ids_MK)`, without a gradient, else `(top_logprobs_MK,)` where the layout has ids.
        """
        decoder, head = self._ends
        assert decoder is not None, "families.refusals let it pass"
        assert head is not None, "families.refusals let it pass"
        states = decoder(**layout.model_inputs, use_cache=False).last_hidden_state
        hidden_MH = states.flatten(0, 1).index_select(0, layout.select_M)
        if self.head == "value":
            return (head(hidden_MH).float().sum(-1),)  # of one: no view, of which FSDP2 warns
        answers = token_logprobs(hidden_MH, head, layout.targets_M, layout.temperature_M, entropy_gradient)
        if top_k:
            return (*answers, *top_tokens(hidden_MH, head, top_k, layout.temperature_M))
        if layout.top_ids_MK is None:
            return answers
        return (*answers, chosen_logprobs(hidden_MH, head, layout.top_ids_MK, layout.temperature_M))

    def plain(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Return what Hugging Face's own forward makes of `inputs`, float32 [B, T, V], or [B, T, 1] with a value head."""
        return self.hf(**inputs, use_cache=False).logits.float()
