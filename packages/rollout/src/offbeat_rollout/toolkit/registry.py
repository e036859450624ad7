"""Adapters by name, open to third parties through the entry-point group `offbeat.rollouts`."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, cast

from offbeat_rollout.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat_rollout.config import RolloutConfig
    from offbeat_rollout.interface import RolloutEngine

ENTRY_POINT_GROUP = "offbeat.rollouts"

CONFIG_GROUP = "offbeat.rollout_configs"
"""Optional: the config class alone, for an adapter whose module is dear to import."""

# Those of this package need no installed metadata; an entry point of the same name goes first.
_BUILT_IN = {
    "hf": "offbeat_rollout.hf:HfEngine",
    "sglang": "offbeat_rollout.sglang:SglangEngine",
    "vllm": "offbeat_rollout.vllm:VllmEngine",
}
_BUILT_IN_CONFIGS = {
    "hf": "offbeat_rollout.config:RolloutConfig",
    "sglang": "offbeat_rollout.sglang.config:SglangConfig",
    "vllm": "offbeat_rollout.vllm.config:VllmConfig",
}


def adapter_names() -> list[str]:
    """Return the names of all installed adapters, sorted."""
    return sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)} | set(_BUILT_IN))


def adapter_class(name: str) -> type[RolloutEngine]:
    """Return the adapter registered as `name`; its generation library is imported at `start`, not here.

    Raises:
        ConfigError: nothing is registered under that name.
    """
    points = [*entry_points(group=ENTRY_POINT_GROUP, name=name)]
    if name in _BUILT_IN:
        points.append(EntryPoint(name, _BUILT_IN[name], ENTRY_POINT_GROUP))
    if points:
        return cast("type[RolloutEngine]", points[0].load())
    raise ConfigError(
        f"no rollout adapter named {name!r}; installed: {', '.join(adapter_names())}. "
        f"A package adds one through the entry-point group {ENTRY_POINT_GROUP!r}."
    )


def rollout_config_class(name: str) -> type[RolloutConfig]:
    """Return the class that the settings of adapter `name` are read by, importing as little as the adapter lets.

    Raises:
        ConfigError: nothing is registered under that name.
    """
    points = [*entry_points(group=CONFIG_GROUP, name=name)]
    replacing = entry_points(group=ENTRY_POINT_GROUP, name=name)
    if name in _BUILT_IN_CONFIGS and all(point.value == _BUILT_IN[name] for point in replacing):
        points.append(EntryPoint(name, _BUILT_IN_CONFIGS[name], CONFIG_GROUP))
    if points:
        return cast("type[RolloutConfig]", points[0].load())
    return adapter_class(name).Config


def adapter_environment(name: str, config: RolloutConfig, cores: Sequence[int] = ()) -> dict[str, str]:
    """Return the environment a process needs before it imports anything, to hold an engine of adapter `name`.

    `cores` are the CPU cores the replica should keep to, where its library takes such a wish. An adapter that needs
    variables says so by a class method `environment(config, cores)`; see `RolloutEngine`.

    Raises:
        ConfigError: nothing is registered under that name.
    """
    return adapter_class(name).environment(config, cores)
