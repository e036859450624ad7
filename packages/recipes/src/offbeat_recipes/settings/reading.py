"""Reading settings: plain nested mappings in, one `RunConfig` out, or sentences that say what is wrong.

The dataclasses of `offbeat_recipes.settings.tree` are the only list of settings; everything here walks them.
"""

from __future__ import annotations

import difflib
import json
import operator
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from offbeat_recipes.errors import SettingError
from offbeat_recipes.settings.sections import PLUG_INS, plug_in_section, run_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pydantic_core import ErrorDetails

    from offbeat_recipes.settings.tree import RunConfig

_MEANT = {
    "lr": "engine.optimizer.lr",
    "learning_rate": "engine.optimizer.lr",
    "batch_size": "trainer.prompts_per_step",
    "num_generations": "trainer.group_size",
    "max_tokens": "sampling.max_tokens",
    "max_new_tokens": "sampling.max_tokens",
    "max_completion_length": "sampling.max_tokens",
    "lora_rank": "engine.lora.rank",
    "lora": "engine.lora.rank",
    "gpus": "engine.num_ranks",
    "num_gpus": "engine.num_ranks",
    "data": "task.train_path",
    "dataset": "task.train_path",
    "train_dataset": "task.train_path",
    "validation": "task.validation_path",
    "eval_dataset": "task.validation_path",
    "reward_funcs": "task.reward",
    "reward": "task.reward",
    "model": "model.path",
    "model_name_or_path": "model.path",
    "environment": "environment.path",
}
"""What other libraries, and `Trainer`, call settings that have no such name here."""

_GONE = {
    "evaluation.": "it is an option of `offbeat eval RUN` now: --step, --samples, --temperature",
    "mode.recompute_kv": "it is mode.partial=recompute now",
    "mode.on_stall": "a wait in which nothing moves ends the run, which goes on with resume=auto",
    "mode.max_attempts": "a group is tried once more than reward.max_attempts",
    "cluster.start_timeout_s": "it is trainer.step_timeout_s, and five minutes where that is less",
    "mode.too_old": "what would be older than mode.max_staleness is not begun",
    "task.guess": "it is task.careless now",
    "task.forget_carry": "it is task.careless now",
    **{
        f"task.{key}_key": f"it is task.columns.{key} now"
        for key in ("prompt", "answer", "chosen", "rejected")
    },
    "report.project": "the variable WANDB_PROJECT names it",
}
"""Settings of earlier versions, and what became of them."""

_UNIONS = {"mode": "sync", "environment": "none"}
_DEFAULT_CHOICE = {**_UNIONS, **{path: plug_in.default for path, plug_in in PLUG_INS.items()}}
"""The variant of a section that has several, or the plug-in that it is of, where its `name` is not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One leaf of the tree.

    `derived` names what decides it when it cannot be set; `free` takes any keys below; `variant` is the `name`
    of the section's variant it belongs to, where the section has several. `limits` are those beside its field, which `home` has.
    """

    path: str
    annotation: object
    derived: str = ""
    free: bool = False
    variant: str = ""
    home: type = object
    limits: Mapping[str, float] = field(default_factory=dict[str, float])


def all_settings(chosen: Mapping[str, str] | None = None) -> tuple[Setting, ...]:
    """Return every setting of the tree, those of all modes included; a path may come once for each.

    Of the plug-ins, those of the `chosen` ones, or of the ones that a run has by default.
    """
    return _all_settings(run_class(_DEFAULT_CHOICE if chosen is None else chosen))


@cache
def _all_settings(cls: type[RunConfig]) -> tuple[Setting, ...]:
    return tuple(_walk(cls, "", ""))


@cache
def plug_in_settings(section: str, name: str) -> tuple[Setting, ...]:
    """Return the settings of the section as the plug-in `name` has them; none of one that cannot be found."""
    with suppress(SettingError):
        return tuple(_walk(plug_in_section(section, name), f"{section}.", ""))
    return ()


def text_settings(named: Iterable[tuple[str, str]]) -> set[str]:
    """Return the settings that are or may be a text: of a run, of every installed plug-in, and of those `named` as (section, name)."""
    installed = [(section, name) for section in PLUG_INS for name in PLUG_INS[section].names()]
    others = (item for one in {*installed, *named} for item in plug_in_settings(*one))
    return {item.path for item in (*all_settings(), *others) if str in _kinds(item.annotation)}


def _kinds(annotation: object) -> tuple[object, ...]:
    return get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)


def default_choices() -> dict[str, str]:
    """Return what each section with several variants is, by its `name`, where nothing says so."""
    return dict(_DEFAULT_CHOICE)


def known_paths(chosen: Mapping[str, str] | None = None) -> dict[str, Setting]:
    """Return the settings that can be set, by dotted path: those of the `chosen` variant by section, or all."""
    return {
        item.path: item
        for item in all_settings(chosen)
        if not item.derived
        and (not item.variant or chosen is None or item.variant == _variant_of(item.path, chosen))
    }


def parse(raw: Mapping[str, Any]) -> RunConfig:
    """Validate `raw` (null means: the default) into the settings of a run.

    Raises:
        SettingError: something in it does not exist or is not what it must be; all of it is named.
    """
    values = _without_nulls(raw)
    chosen = _choose(values)
    problems = [line for path in flatten(values) for line in _unknown(path, chosen)]
    if problems:
        raise SettingError(problems)
    if isinstance(values.get("environment"), dict):
        values["environment"]["name"] = chosen["environment"]
    try:
        # JSON mode: strict (no "5" for 5, no true for 1), yet names for enums.
        config = _adapter(run_class(chosen)).validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        raise SettingError([_sentence(item) for item in error.errors()]) from None
    problems = list(_out_of_range(to_dict(config), known_paths(chosen)))
    if problems:
        raise SettingError(problems)
    return replace(config, name=config.name or config.task.name.rpartition(":")[2], task=config.shared_task)


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Return the settings that can be set as plain nested values; `parse` reads them back."""
    settable = known_paths({section: getattr(config, section).name for section in _DEFAULT_CHOICE})

    def keep(values: dict[str, Any], prefix: str) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for key, value in values.items():
            path = f"{prefix}{key}"
            if path in settable:
                kept[key] = value.value if isinstance(value, Enum) else value
            elif isinstance(value, dict) and any(known.startswith(f"{path}.") for known in settable):
                kept[key] = keep(value, f"{path}.")  # pyright: ignore[reportUnknownArgumentType]
        return kept

    return keep(asdict(config), "")


def other_version(
    written: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[dict[str, Any], frozenset[str]]:
    """Compare the settings that another version wrote with those of `now` by their names alone.

    Returns the defaults of those that it did not have, by path, and the paths of those that are no settings any more.
    """
    chosen = _choose(deepcopy(dict(now)))
    paths, named, settable = set(flatten(written)), set(flatten(now)), known_paths(chosen).values()
    gone = frozenset(path for path in paths - named if not any(_covers(item, path) for item in settable))

    def shared(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        return {
            key: shared(cast("dict[str, Any]", value), f"{prefix}{key}.")
            if isinstance(value, dict)
            else value
            for key, value in values.items()
            if isinstance(value, dict) or f"{prefix}{key}" in paths
        }

    try:
        defaults = flatten(to_dict(parse(shared(now))))
    except SettingError:  # one of them has no default
        return {}, gone
    return {path: value for path, value in defaults.items() if path in named - paths and value != {}}, gone


def unknown_setting(path: str, chosen: Mapping[str, str] | None = None) -> str:
    """Return the sentence for a dotted `path` that is no setting."""
    gone = next((told for name, told in _GONE.items() if path.startswith(name)), "")
    if gone:
        return f"unknown setting `{path}`; {gone}"
    hint = suggestion(path, known_paths(chosen))
    return f"unknown setting `{path}`" + (f"; did you mean `{hint}`?" if hint else "; see --cfg job for all")


def suggestion(path: str, known: Iterable[str]) -> str:
    """Return the known dotted path nearest to `path`, or "" when none is near.

    A last part that is right in the wrong place counts too: `steps` is nearest to `trainer.steps`. So does what others call it;
    settings of the warm-up are near to paths of the warm-up alone.
    """
    meant = _MEANT.get(path.rsplit(".", 1)[-1], "")
    names = [name for name in known if path.startswith("warm") or not name.startswith("warmup.")]
    if (meant in names or meant.startswith("task.")) and not path.startswith("warm"):
        return meant
    near = difflib.get_close_matches(path, names, n=1, cutoff=0.75)
    if near:
        return near[0]
    leaf = path.rsplit(".", 1)[-1]
    leaves = {name.rsplit(".", 1)[-1]: name for name in reversed(names)}
    close = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.8)
    return leaves[close[0]] if close else ""


def check_path(path: str, chosen: Mapping[str, str] | None = None) -> list[str]:
    """Return what is wrong with setting or section `path`: nothing, or one sentence.

    Which settings a plug-in has is known only with its name: without `chosen`, none in its section is found wrong.
    """
    known = all_settings(chosen)
    settable = {item.path for item in known if not item.derived}
    if _is_section(path, settable) or any(_covers(item, path) for item in known if not item.derived):
        return []
    for item in known:
        if item.derived and (path == item.path or path.startswith(f"{item.path}.")):
            return [f"`{path}` cannot be set: it follows from {item.derived}; set that instead"]
    if chosen is None and _section(path) in PLUG_INS:
        return []
    return [unknown_setting(path, chosen)]


def _walk(cls: type, prefix: str, variant: str) -> Iterator[Setting]:
    hints = get_type_hints(cls, include_extras=True)
    for item in fields(cls):
        path, annotation = f"{prefix}{item.name}", hints[item.name]
        if "derived" in item.metadata:
            yield Setting(path=path, annotation=annotation, derived=item.metadata["derived"], variant=variant)
        elif get_origin(annotation) is Annotated:
            for choice in get_args(get_args(annotation)[0]):
                yield from _walk(choice, f"{path}.", _variant_name(choice))
        elif is_dataclass(annotation) and isinstance(annotation, type):
            yield from _walk(annotation, f"{path}.", variant)
        else:
            free = bool(item.metadata.get("free"))
            limits = {key: item.metadata[key] for key in _LIMITS if key in item.metadata}
            yield Setting(
                path=path, annotation=annotation, free=free, variant=variant, home=cls, limits=limits
            )


def _variant_name(cls: type) -> str:
    return str(get_args(get_type_hints(cls)["name"])[0])


def _covers(item: Setting, path: str) -> bool:
    return path == item.path or (item.free and path.startswith(f"{item.path}."))


def _is_section(path: str, known: Iterable[str]) -> bool:
    return any(name.startswith(f"{path}.") for name in known)


def _section(path: str) -> str:
    return path.partition(".")[0]


def _variant_of(path: str, chosen: Mapping[str, str]) -> str:
    return {**_DEFAULT_CHOICE, **chosen}[_section(path)]


def _choose(values: dict[str, Any]) -> dict[str, str]:
    """Return the chosen variant of each section that has several; where it is not named, it is from here on."""
    chosen = dict(_DEFAULT_CHOICE)
    for section, default in _DEFAULT_CHOICE.items():
        given = values.get(section)
        if section == "environment":  # its name follows from a path
            chosen[section] = "own" if isinstance(given, dict) and given.get("path") else "none"
        elif isinstance(given, dict):
            chosen[section] = str(given.setdefault("name", default))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    return chosen


def _unknown(path: str, chosen: Mapping[str, str]) -> list[str]:
    wrong = check_path(path, chosen)
    mine, section = known_paths(chosen), _section(path)
    if wrong and section in PLUG_INS:
        owners = [
            name
            for name in PLUG_INS[section].names()
            if any(_covers(item, path) and not item.derived for item in plug_in_settings(section, name))
        ]
        if owners:
            return [
                f"`{path}` belongs to {section}={' or '.join(owners)}; this run has {section}={chosen[section]}"
            ]
    if wrong or _is_section(path, mine) or any(_covers(item, path) for item in mine.values()):
        return wrong
    known = all_settings(chosen)
    if section == "environment":
        if chosen[section] == "own":
            return [f"`{path}` takes the place of an environment; leave `environment.path` out"]
        return [f"`{path}` is for runs with an environment; `environment.path` names one"]
    owners = sorted({item.variant for item in known if _covers(item, path)})
    if chosen[section] not in {item.variant for item in known if _section(item.path) == section}:
        return []  # the choice itself is unknown: pydantic says so, once
    return [f"`{path}` belongs to {section}={' or '.join(owners)}; this run has {section}={chosen[section]}"]


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        str(key): _without_nulls(value) if isinstance(value, dict) else value  # pyright: ignore[reportUnknownArgumentType]
        for key, value in values.items()
        if value is not None
    }


@cache
def _adapter(cls: type[RunConfig]) -> TypeAdapter[RunConfig]:
    return TypeAdapter(cls)


_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text (quote numbers: '\"42\"')",
    "bool_type": "true or false",
    "dataclass_type": "a section with keys of its own",
    "dict_type": "a section with keys of its own",
    "tuple_type": "a list, such as '[a,b]'",
}


def _sentence(error: ErrorDetails) -> str:
    """Turn one pydantic error into: setting, what was expected, what came."""
    loc = [str(part) for part in error["loc"]]
    if len(loc) > 1 and loc[0] in _UNIONS:
        del loc[1]  # pydantic puts the variant's name there
    if loc[-1] == "str" or "[" in loc[-1]:
        del loc[-1]  # pydantic names which of several types it tried
    path, came, kind = ".".join(loc), error.get("input"), error["type"]
    context = error.get("ctx", {})
    if kind == "union_tag_invalid":
        path, came, choices = f"{path}.name", context["tag"], str(context["expected_tags"])
    else:
        choices = str(context.get("expected", ""))
    if choices:
        known = [part.strip("' ") for part in choices.split("'")]
        near = difflib.get_close_matches(str(came), known, n=1)
        if came == "gpu" and "cuda" in known:  # nearer to "cpu", but not meant so
            near = ["cuda"]
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"`{path}`: expected {choices}, got {came!r}{hint}"
    expected = _EXPECTED.get(kind, error["msg"])
    meant = _MEANT.get(path) if kind in ("dataclass_type", "dict_type") and isinstance(came, str) else None
    return f"`{path}`: expected {expected}, got {came!r}" + (f"; did you mean `{meant}`?" if meant else "")


_LIMITS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "at_least": ("at least", operator.ge),
    "more_than": ("more than", operator.gt),
    "at_most": ("at most", operator.le),
}


def _out_of_range(values: dict[str, Any], known: Mapping[str, Setting]) -> Iterator[str]:
    for path, value in flatten(values).items():
        for name, limit in limits_of(path, known.get(path)).items():
            if value not in (None, {}) and not _LIMITS[name][1](value, limit):  # None: left to the code
                yield f"`{path}`: expected {describe_limit(name, limit)}, got {value}"


def limits_of(path: str, setting: Setting | None) -> dict[str, float]:
    """Return every limit of a setting: those beside its field, and that a deadline is more than nothing; none of a free key."""
    if setting is None:
        return {}
    more = {"more_than": 0} if path.endswith("_timeout_s") else {}
    return {**setting.limits, **more}


def describe_limit(name: str, limit: float) -> str:
    """Return a limit as people say it, such as "at least 1"."""
    return f"{_LIMITS[name][0]} {limit if isinstance(limit, int) else f'{limit:g}'}"


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted path; an empty mapping is a value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flatten(cast("dict[str, Any]", value), f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
