"""Sections that read the settings of a plug-in by its own config class: found by name, when settings are read.

The section has fields of its own (the plug-in's name above all, and what follows from other settings); everything else
in it is a field of the class that the plug-in brings. So a plug-in's setting is given, checked, printed and compared as any
other is, and nobody lists it here.
"""

# No `from __future__ import annotations` here: pydantic reads these annotations at run time.
import difflib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, make_dataclass
from functools import cache
from typing import Any, cast, get_type_hints

from offbeat_engine import ConfigError as EngineConfigError
from offbeat_engine.interface import engine_config_class, engine_names
from offbeat_recipes.errors import SettingError, TaskError
from offbeat_recipes.settings.tree import (
    AlgorithmSection,
    EngineSection,
    RolloutSection,
    RunConfig,
    TaskSection,
)
from offbeat_recipes.tasks.registry import task_config_class, task_names
from offbeat_rollout.errors import ConfigError as RolloutConfigError
from offbeat_rollout.toolkit.registry import adapter_names, rollout_config_class
from offbeat_trainer.algorithms.registry import algorithm_config_class, algorithm_names
from offbeat_trainer.errors import LoadError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlugIn:
    """One such section: its own fields, the plug-in it names where settings name none, and how a name is looked up.

    `names` returns those that are installed. `refusals` are what `find` raises for a name that nothing can be found under.
    """

    section: type
    default: str
    find: Callable[[str], type]
    names: Callable[[], list[str]]
    refusals: type[Exception]


PLUG_INS: dict[str, PlugIn] = {
    "task": PlugIn(
        section=TaskSection,
        default="arithmetic",
        find=task_config_class,
        names=task_names,
        refusals=TaskError,
    ),
    "engine": PlugIn(
        section=EngineSection,
        default="fsdp2",
        find=engine_config_class,
        names=engine_names,
        refusals=EngineConfigError,
    ),
    "rollout": PlugIn(
        section=RolloutSection,
        default="vllm",
        find=rollout_config_class,
        names=adapter_names,
        refusals=RolloutConfigError,
    ),
    "algorithm": PlugIn(
        section=AlgorithmSection,
        default="grpo",
        find=algorithm_config_class,
        names=algorithm_names,
        refusals=LoadError,
    ),
}


def run_class(names: Mapping[str, str]) -> type[RunConfig]:
    """Return `RunConfig` with each section of a plug-in as the plug-in of that name in `names` has it.

    Raises:
        SettingError: nothing is registered under a name.
    """
    return _run_class(tuple(names.get(section, plug_in.default) for section, plug_in in PLUG_INS.items()))


@cache
def _run_class(names: tuple[str, ...]) -> type[RunConfig]:
    sections: list[tuple[str, type, Any]] = []
    for path, name in zip(PLUG_INS, names, strict=True):
        section = plug_in_section(path, name)
        sections.append((path, section, field(default_factory=section)))
    made = make_dataclass(
        "RunConfig",
        sections,
        bases=(RunConfig,),
        frozen=True,
        slots=True,
        kw_only=True,
        namespace={"__module__": __name__},
    )
    return cast("type[RunConfig]", made)


@cache
def plug_in_section(path: str, name: str) -> type:
    """Return the section at `path` as the plug-in `name` has it.

    Raises:
        SettingError: nothing is registered under that name.
    """
    return section_class(PLUG_INS[path].section, _settings_class(path, name))


def replaced_fields(path: str, before: str | None, now: str | None) -> set[str]:
    """Return the settings of the plug-in `before` of a section that `now` has not, or has by a field of its own.

    What both have of one class stays: it means the same for both. None: the default.

    Raises:
        SettingError: nothing is registered under a name.
    """
    one, other = (_declared(_settings_class(path, name or PLUG_INS[path].default)) for name in (before, now))
    return {name for name, home in one.items() if other.get(name) is not home}


def _declared(cls: type) -> dict[str, type]:
    """Return the fields of `cls` with the class that declares each."""
    lines = [(home, vars(home).get("__annotations__", {})) for home in cls.__mro__]
    return {item.name: next(home for home, own in lines if item.name in own) for item in fields(cls)}


def _settings_class(path: str, name: str) -> type:
    plug_in = PLUG_INS[path]
    try:
        return plug_in.find(name)
    except plug_in.refusals as error:
        near = difflib.get_close_matches(name, plug_in.names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise SettingError([f"`{path}.name`: {str(error).rstrip('.')}{hint}"]) from None


def section_class(section: type, settings: type) -> type:
    """Return a subclass of `settings` that has, over its fields, those that `section` declares itself."""
    hints = get_type_hints(section, include_extras=True)
    own = [
        (item.name, hints[item.name], _copied(item))
        for item in fields(section)
        if item.name in vars(section)["__annotations__"]
    ]
    return make_dataclass(
        f"{settings.__name__}Section", own, bases=(settings,), frozen=True, slots=True, kw_only=True, namespace={"__module__": __name__}
    )  # fmt: skip


def _copied(item: "Field[Any]") -> Any:  # noqa: ANN401 what `field` answers
    """Return the field anew: one object cannot be a field of two classes."""
    if item.default_factory is not MISSING:
        return field(default_factory=item.default_factory, metadata=item.metadata)
    return field(default=item.default, metadata=item.metadata)
