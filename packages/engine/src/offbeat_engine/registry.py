"""Engines by name, open to third parties through the entry-point group `offbeat.engines`.

An engine's module may take seconds to import, and its settings are read long before. So it may name its config class in
a second group, `offbeat.engine_configs`, in a module that imports little; one that does not is asked for its `Config`.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, cast

from offbeat_engine.errors import ConfigError

if TYPE_CHECKING:
    from offbeat_engine.config import EngineConfig
    from offbeat_engine.interface import Engine

ENTRY_POINT_GROUP = "offbeat.engines"
CONFIG_GROUP = "offbeat.engine_configs"


def engine_names() -> list[str]:
    """Return the names of all installed engines, sorted."""
    return sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)})


def engine_class(name: str) -> type[Engine]:
    """Return the engine registered as `name`, importing its module now and not before.

    Raises:
        ConfigError: nothing is registered under that name.
    """
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            return cast("type[Engine]", point.load())
    raise ConfigError(
        f"no training engine named {name!r}; installed: {', '.join(engine_names())}. "
        f"A package adds one through the entry-point group {ENTRY_POINT_GROUP!r}."
    )


def engine_config_class(name: str) -> type[EngineConfig]:
    """Return the class that the settings of engine `name` are read by, importing as little as the engine lets.

    Raises:
        ConfigError: nothing is registered under that name.
    """
    for point in entry_points(group=CONFIG_GROUP):
        if point.name == name:
            return cast("type[EngineConfig]", point.load())
    return engine_class(name).Config
