"""A model from its folder: built without memory for weights, which each rank later reads from the files by itself.

What transformers would load whole on every rank is put on the meta device: shapes without values. `filling` gives
the values after sharding. What no file holds (a value head that is new, rotary frequencies and other buffers that
are computed) is made here, whole, as transformers itself makes it: from the same seed the same bits.

How tensors of a checkpoint become those that a model holds, worked out on shapes alone.

transformers 5 renames weights as it loads them, and fuses or splits some (the experts of a mixture are one tensor in
memory). Its own rules run here for one group of tensors at a time, and where a group is experts put one upon the
other, for a range of experts, so that no rank needs what it will not keep.
"""

# transformers is typed in part: auto classes and configs answer with unknown types.
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

import logging
import re
from copy import deepcopy
from dataclasses import dataclass
from importlib.metadata import requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from offbeat_engine.errors import ConfigError
from offbeat_engine.toolkit.hf.probing import without_bars
from offbeat_engine.toolkit.hf.weight_files import WeightFiles
from offbeat_engine.toolkit.state.slices import Region, Shape

if TYPE_CHECKING:
    from offbeat_engine.config import ModelConfig


Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tensors `targets` of the model that are made of the same `sources` (pattern to names in files, in order).

    Without a `converter` the one target is the one source. `by_rows`: rows of the one target are made of as many
    of each pattern's sources.
    """

    targets: Shapes
    sources: dict[str, tuple[str, ...]]
    converter: Any | None = None
    by_rows: bool = False

    @property
    def names(self) -> list[str]:
        """Return all sources' names in files."""
        return [name for names in self.sources.values() for name in names]

    def source_dim(self, dim: int) -> int | None:
        """Return which dimension of each source becomes `dim` of the target, `by_rows` from 1 on; None where sources lie along it."""
        from transformers.core_model_loading import Transpose

        assert self.by_rows
        assert self.converter is not None
        for step in reversed(self.converter.operations[1:]):
            if type(step) is Transpose:
                dim = {step.dim0: step.dim1, step.dim1: step.dim0}.get(dim, dim)
            elif step.dim == dim:
                return None
        return dim - 1

    def source_region(self, region: Region, source: Shape) -> Region:
        """Return the part of a source of shape `source` that `region` of the target is made of, `by_rows`."""
        (target,) = self.targets.values()
        offsets, shape = [0] * len(source), [*source]
        for dim in range(1, len(target)):
            if region.shape[dim] != target[dim]:
                place = self.source_dim(dim)
                assert place is not None, "it is not cut along such a dimension"
                offsets[place], shape[place] = region.offsets[dim], region.shape[dim]
        return Region(tuple(offsets), tuple(shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All groups, what in the files nothing is made of, and transformers' rules that were used."""

    groups: tuple[Group, ...]
    unused: tuple[str, ...]
    rules: tuple[Any, ...]

    @property
    def targets(self) -> Shapes:
        """Return the shapes that the tensors of the model will have."""
        return {name: shape for group in self.groups for name, shape in group.targets.items()}


def make_plan(hf: Any, files: Shapes) -> Plan:
    """Match the tensors of `files` with those of `hf`.

    Raises:
        ValueError: some cannot be put together as the family wants them.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key

    rules: list[Any] = get_model_conversion_mapping(hf)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    of_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    held = hf.state_dict()
    made_of: dict[str, tuple[Any | None, dict[str, list[str]]]] = {}
    unused: list[str] = []
    # In transformers' order: experts by number, and rules that wait for the first of several names.
    for name in sorted(files, key=dot_natural_key):
        target, pattern = _renamed(hf, held, name, renamings, converters)
        if target not in held:
            unused.append(name)
            continue
        converter = None if pattern is None else of_pattern[pattern]
        made_of.setdefault(target, (converter, {}))[1].setdefault(pattern or name, []).append(name)
    groups = tuple(_group(hf, files, target, *parts) for target, parts in made_of.items())
    used = tuple(rule for rule in rules if rule.was_used())
    return Plan(groups=groups, unused=tuple(unused), rules=used)


def _renamed(
    hf: Any, held: dict[str, Any], name: str, renamings: list[Any], converters: list[Any]
) -> tuple[str, str | None]:
    from transformers.core_model_loading import rename_source_key

    target, pattern = rename_source_key(name, renamings, converters, hf.base_model_prefix, held)
    if target not in held and name in held:  # the rules are for checkpoints of another age
        return rename_source_key(name, [], [], hf.base_model_prefix, held)
    return target, pattern


def _group(
    hf: Any, files: Shapes, target: str, converter: Any | None, sources: dict[str, list[str]]
) -> Group:
    named = {pattern: tuple(names) for pattern, names in sources.items()}
    if converter is None:
        first = next(iter(named))  # where two names come to the same weight, transformers takes the first
        return Group(targets={target: files[first]}, sources={first: (first,)})
    empty = {
        pattern: [torch.empty(files[name], device="meta") for name in names]
        for pattern, names in named.items()
    }
    try:
        made = _converted(converter, target, empty, hf)
    except (ValueError, RuntimeError, KeyError, IndexError) as error:
        raise ValueError(
            f"`{target}` cannot be made of `{next(iter(named.values()))[0]}` ({error})"
        ) from error
    targets = {name: tuple(tensor.shape) for name, tensor in made.items()}
    by_rows = (
        len(targets) == 1 and _keeps_rows(converter) and len({len(names) for names in named.values()}) == 1
    )
    return Group(targets=targets, sources=named, converter=converter, by_rows=by_rows)


def _keeps_rows(converter: Any) -> bool:
    """Return whether row i of what comes out is made of source i of each pattern, and of nothing else."""
    from transformers.core_model_loading import Concatenate, Interleave, MergeModulelist, Transpose

    first, *rest = converter.operations
    if type(first) is not MergeModulelist or first.dim != 0:
        return False
    for step in rest:
        dims = (step.dim0, step.dim1) if type(step) is Transpose else (getattr(step, "dim", 0),)
        if type(step) not in (Concatenate, Interleave, Transpose) or min(dims) < 1:
            return False
        if getattr(step, "check_dims", False):  # looks at the shape of the whole
            return False
    return True


def convert(group: Group, tensors: dict[str, list[torch.Tensor]], hf: Any) -> dict[str, torch.Tensor]:
    """Return the targets of `group` made of `tensors`, which go by pattern like its sources."""
    return _converted(group.converter, next(iter(group.targets)), tensors, hf)


def _converted(
    converter: Any, target: str, tensors: dict[str, list[torch.Tensor]], hf: Any
) -> dict[str, torch.Tensor]:
    working = deepcopy(converter)
    for pattern, parts in tensors.items():
        working.collected_tensors[pattern].extend(parts)
    made = working.convert(target, model=hf, config=hf.config)
    return {name: part[0] if isinstance(part, list) else part for name, part in made.items()}


_log = logging.getLogger(__name__)
_COMPARED_ROWS = 4096
_MAX_NAMED = 5
# What the code of a family raises over a config.json, or files, that do not fit it.
_UNFIT = (
    OSError, ValueError, RuntimeError, SafetensorError, LookupError, ArithmeticError, AssertionError, TypeError,
    AttributeError,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class OnMeta:
    """Where the values of a model's weights are: in `files`, by `plan`; or `initialised`, in memory, whole."""

    files: WeightFiles
    plan: Plan
    initialised: dict[str, torch.Tensor]


def load(config: ModelConfig, attn: str) -> tuple[Any, OnMeta | None]:
    """Return the model, and what it is to be filled from: None where it holds its weights already.

    Raises:
        ConfigError: the folder holds no such model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

    auto: Any = AutoModelForTokenClassification if config.head == "value" else AutoModelForCausalLM
    remote: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    extra: dict[str, Any] = {"num_labels": 1} if config.head == "value" else {}
    common: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": attn, **remote}
    try:
        with without_bars():
            shape = AutoConfig.from_pretrained(config.path, local_files_only=True, **remote, **extra)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(config.seed)  # also decides a value head that the folder does not hold
                if config.random_init:
                    return auto.from_config(shape, **common), None
                return _from_files(auto, shape, common, config) or (_whole(auto, shape, common, config), None)
    except _UNFIT as error:
        raise ConfigError(
            _other_transformers(error)
            or f"no model for a {config.head} head in {config.path!r}: expected a local Hugging Face folder with "
            f"config.json{'' if config.random_init else ' and safetensors'} ({error})"
        ) from error


def empty_model(config: ModelConfig) -> Any:
    """Return the model of a folder without its weights, which need not be there: its parameters are meta tensors.

    Raises:
        ConfigError: transformers makes no model of it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

    auto: Any = AutoModelForTokenClassification if config.head == "value" else AutoModelForCausalLM
    extra: dict[str, Any] = {"num_labels": 1} if config.head == "value" else {}
    try:
        shape = AutoConfig.from_pretrained(config.path, local_files_only=True, **extra)
        return _empty(auto, shape, {"attn_implementation": "eager"})
    except _UNFIT as error:
        said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        reason = f"no model for a {config.head} head in {config.path!r} ({said})"
        raise ConfigError(_other_transformers(error) or reason) from error


def _other_transformers(error: Exception) -> str | None:
    """Return in words that a call of this package does not fit the installed transformers, or None where `error` says something else."""
    where = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    module = "" if where is None else str(where.tb_frame.f_globals.get("__name__"))
    if not isinstance(error, TypeError | AttributeError) or not module.startswith("offbeat_engine."):
        return None
    return (
        f"transformers {version('transformers')} is not one that this package was made for ({error}); install one within "
        f"{next(filter(lambda each: each.startswith('transformers'), requires('offbeat-engine') or ()), 'its bounds')}"
    )


def check_files(hf: Any, config: ModelConfig) -> None:
    """Hold what the headers of a folder's safetensors say against the `empty_model` of it; reads no weights.

    Raises:
        ConfigError: a file is not there, cut off or damaged, or a tensor is missing, one too many or of another shape.
    """
    try:
        files = WeightFiles.find(Path(config.path))
        if files is None or _obstacle(config, hf.config) is not None:
            return
        plan = make_plan(hf, files.shapes)
        _check(hf, plan, config)
        tied = hf.all_tied_weights_keys
        # One of several tied weights is enough, and who is tied to whom goes either way.
        there = {*plan.targets} | {
            name for pair in tied.items() if {*pair} & {*plan.targets} for name in pair
        }
        _check_missing(hf, sorted({*hf.state_dict()} - there), config)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"the weights in {config.path!r} cannot be used: {error}") from error


def _from_files(
    auto: Any, shape: Any, common: dict[str, Any], config: ModelConfig
) -> tuple[Any, OnMeta] | None:
    """Return an empty model and where its weights are, or None (and say why) where this cannot be done."""
    files = WeightFiles.find(Path(config.path))
    reason = _obstacle(config, shape)
    if reason is None and files is None:
        reason = "the folder has no safetensors"
    hf = None
    if reason is None:
        try:
            hf = _empty(auto, shape, common)
        except (
            NotImplementedError,
            RuntimeError,
        ) as error:  # code of its own that wants values as it is built
            reason = f"the model cannot be built without values ({error})"
    if hf is None or files is None:
        _log.warning("%s: every rank loads the whole model into host memory: %s", config.path, reason)
        return None
    hf.eval()
    plan = make_plan(hf, files.shapes)
    hf._weight_conversions = list(plan.rules)  # noqa: SLF001 by which transformers names weights as it saves
    _check(hf, plan, config)
    missing = _tie(hf, files, plan)
    _check_missing(hf, missing, config)
    computed = [name for name, _ in hf.named_buffers(remove_duplicate=False) if name not in hf.state_dict()]
    initialised = _initialise(hf, plan, [*missing, *computed], config.seed)
    return hf, OnMeta(files=files, plan=plan, initialised=initialised)


def _obstacle(config: ModelConfig, shape: Any) -> str | None:
    """Return why this folder is transformers' to load, or None."""
    if getattr(shape, "quantization_config", None) is not None:
        return "its weights are quantized"
    if (Path(config.path) / "adapter_config.json").is_file():
        return "the folder holds an adapter"
    return None


def _empty(auto: Any, shape: Any, common: dict[str, Any]) -> Any:
    from transformers import initialization

    # Tying waits until it is known which of two tied weights the files hold.
    with (
        torch.device("meta"),
        initialization.meta_device_safe_creation_ops(),
        initialization.no_tie_weights(),
    ):
        return auto.from_config(shape, **common)


def _check(hf: Any, plan: Plan, config: ModelConfig) -> None:
    """Refuse files that hold weights of other shapes, or more than the model has."""
    held = hf.state_dict()
    odd = [name for name, shape in plan.targets.items() if name in held and tuple(held[name].shape) != shape]
    if odd:
        some = ", ".join(
            f"`{name}` is {list(plan.targets[name])} and should be {list(held[name].shape)}"
            for name in odd[:_MAX_NAMED]
        )
        raise ValueError(f"{len(odd)} weights in its files have other shapes than config.json says: {some}")
    known = [*(hf._keys_to_ignore_on_load_unexpected or ())]  # noqa: SLF001 what the family leaves out on purpose
    # Buffers that older transformers wrote and this one computes.
    known += [r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"]
    if config.head == "value":
        known.append(r"^lm_head\.")  # a value head is usually begun from a language model
    extra = [name for name in plan.unused if not any(re.search(pattern, name) for pattern in known)]
    extra += [name for name in plan.targets if name not in held]
    if extra:
        raise ValueError(
            f"its files hold {len(extra)} weights that {type(hf).__name__} has not, such as "
            f"{', '.join(f'`{name}`' for name in extra[:_MAX_NAMED])}; is config.json of another model?"
        )


def _tie(hf: Any, files: WeightFiles, plan: Plan) -> list[str]:
    """Tie weights as the config and the files have them; return the names that the files lack."""
    held, planned = hf.state_dict(keep_vars=True), plan.targets
    missing = {name for name in held if name not in planned}
    for name, source in list(hf.all_tied_weights_keys.items()):
        if name in planned and source in planned:
            if _equal(files, plan, name, source):
                missing.add(name)  # one of the two is enough
            else:
                hf.all_tied_weights_keys.pop(name)
    hf.tie_weights(missing_keys=missing, recompute_mapping=False)
    given = {id(tensor) for name, tensor in hf.state_dict(keep_vars=True).items() if name in planned}
    return sorted(name for name in missing if id(hf.get_parameter_or_buffer(name)) not in given)


def _equal(files: WeightFiles, plan: Plan, left: str, right: str) -> bool:
    """Compare two planned weights, which as tied ones are each one tensor of the files, some rows at a time."""
    groups = [group for group in plan.groups if left in group.targets or right in group.targets]
    if any(group.converter is not None for group in groups):
        return False
    names = [group.names[0] for group in groups]
    if files.shapes[names[0]] != files.shapes[names[1]]:
        return False
    for start in range(0, files.shapes[names[0]][0], _COMPARED_ROWS):
        with files.opened(names) as read:
            some, others = (read(name, start, start + _COMPARED_ROWS) for name in names)
            if not torch.equal(some.float(), others.float()):
                return False
    return True


def _check_missing(hf: Any, missing: list[str], config: ModelConfig) -> None:
    """Refuse files that lack weights, but for a value head, and what the family computes where it is not there."""
    computed = [*(hf._keys_to_ignore_on_load_missing or ())]  # noqa: SLF001 as transformers does
    if config.head == "value":  # whatever the family calls it, it stands outside the decoder
        computed.append(rf"^(?!{re.escape(hf.base_model_prefix)}\.)")
    lacking = [name for name in missing if not any(re.search(pattern, name) for pattern in computed)]
    if lacking:
        raise ValueError(
            f"its safetensors lack {len(lacking)} of the model's weights, such as "
            + ", ".join(f"`{name}`" for name in lacking[:_MAX_NAMED])
        )


def _initialise(hf: Any, plan: Plan, names: list[str], seed: int) -> dict[str, torch.Tensor]:
    """Return what transformers makes of the tensors `names`, which no file holds, on the CPU.

    Raises:
        ValueError: it leaves one of them as it was, that is, with whatever lay in memory.
    """
    for name in plan.targets:
        hf.get_parameter_or_buffer(name)._is_hf_initialized = True  # noqa: SLF001 so transformers knows it
    # Twice over memory of different contents: what comes out different has not been written.
    first, second = (_initialised_over(hf, names, seed, byte) for byte in (0, 1))
    left = [name for name in names if not torch.equal(_raw(first[name]), _raw(second[name]))]
    if left:
        raise ValueError(
            f"{type(hf).__name__} does not say in `_init_weights` how to compute "
            f"{', '.join(f'`{name}`' for name in left[:_MAX_NAMED])}, which no file holds: transformers would "
            "leave there what happens to lie in memory"
        )
    return second


def _initialised_over(hf: Any, names: list[str], seed: int, byte: int) -> dict[str, torch.Tensor]:
    for module in hf.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    for name in names:
        old = hf.get_parameter_or_buffer(name)
        new = torch.empty_like(old, device="cpu")
        _raw(new).fill_(byte)
        put(hf, name, torch.nn.Parameter(new) if isinstance(old, torch.nn.Parameter) else new)
    torch.manual_seed(seed)
    with torch.no_grad():
        hf.initialize_weights()
    return {name: hf.get_parameter_or_buffer(name).detach().clone() for name in names}


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, sharing its memory."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def put(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Make `tensor` the parameter or buffer `name` of `module`."""
    parent, _, last = name.rpartition(".")
    setattr(module.get_submodule(parent), last, tensor)


def _whole(auto: Any, shape: Any, common: dict[str, Any], config: ModelConfig) -> Any:
    """Load everything into this rank's memory."""
    hf, report = auto.from_pretrained(
        config.path, config=shape, local_files_only=True, output_loading_info=True, **common
    )
    _check_missing(hf, sorted(report["missing_keys"]), config)
    return hf
