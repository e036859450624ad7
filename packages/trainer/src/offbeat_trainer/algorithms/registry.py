"""Algorithms by name: an entry point of the group `offbeat.algorithms`, or the path of a class (`mine.py:Mine`).

An algorithm's module imports torch, and its settings are read long before. So a package may name its config class in a
second group, `offbeat.algorithm_configs`, in a module that imports little; one that does not is asked for its `Config`.
"""

from __future__ import annotations

import inspect
import tomllib
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from offbeat_trainer.data.loading import load_object
from offbeat_trainer.errors import LoadError

if TYPE_CHECKING:
    from offbeat_engine import LossFn
    from offbeat_trainer.algorithms.interface import Algorithm
    from offbeat_trainer.config import AlgorithmConfig

ENTRY_POINT_GROUP = "offbeat.algorithms"
CONFIG_GROUP = "offbeat.algorithm_configs"


def algorithm_names() -> list[str]:
    """Return the names of all installed algorithms, sorted."""
    return sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)})


def algorithm_class(name: str) -> type[Algorithm[AlgorithmConfig]]:
    """Return the algorithm that is registered as `name`, or that `name` is the path of, importing it now and not before.

    Raises:
        LoadError: there is none, it cannot be imported, or it lacks something of an algorithm, which is named.
    """
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            return _checked(name, point.load())
    if ":" in name:
        return _checked(name, load_object(name))
    raise LoadError(
        f"no algorithm named {name!r}; installed: {', '.join(algorithm_names()) or 'none, install offbeat-trainer anew'}. One of your own is given as "
        f"file.py:Class or package.module:Class; a package adds one through the entry-point group {ENTRY_POINT_GROUP!r}."
    )


def algorithm_config_class(name: str) -> type[AlgorithmConfig]:
    """Return the class that the settings of algorithm `name` are read by, importing as little as the algorithm lets.

    Raises:
        LoadError: see `algorithm_class`.
    """
    for point in entry_points(group=CONFIG_GROUP):
        if point.name == name:
            return cast("type[AlgorithmConfig]", point.load())
    return algorithm_class(name).Config


def loss_by_name(name: str, own: Algorithm[AlgorithmConfig]) -> LossFn:
    """Return a loss: "cross_entropy", that of an algorithm called `name` with its default settings, or, for "", that of `own`.

    Raises:
        LoadError: there is no such algorithm, or it has no loss that one batch can be trained by.
    """
    from offbeat_engine.batch import SftLoss

    if name == "cross_entropy":
        return SftLoss()
    algorithm = own
    if name:
        cls = algorithm_class(name)
        algorithm = cls(config=cls.Config(), step=own.step)
    loss_fn = getattr(algorithm, "loss_fn", None)
    if loss_fn is None:
        raise LoadError(
            f"{name or type(own).__name__} has no `loss_fn` to train one batch by; name another algorithm, or give a function"
        )
    return cast("LossFn", loss_fn())


@cache
def peer_recipes() -> dict[str, dict[str, Any]]:
    """Return by recipe, then by algorithm, what reproduces another library's number, or a text: why nothing does; see `peers.toml`."""
    return tomllib.loads(Path(__file__).with_name("peers.toml").read_text(encoding="utf-8"))


def peer_entry(recipe: str, algorithm: str) -> dict[str, Any]:
    """Return what makes `algorithm` give the number of the library that `recipe` names: its `settings`, and what `differs` even so.

    Raises:
        LoadError: there is no such recipe, or it has nothing for the algorithm.
    """
    recipes = peer_recipes()
    if recipe not in recipes:
        raise LoadError(f"no recipe {recipe!r}; there are {', '.join(sorted(recipes))}")
    found = recipes[recipe].get(algorithm, "nothing was recorded")
    if isinstance(found, str):
        others = sorted(name for name, entry in recipes[recipe].items() if isinstance(entry, dict))
        raise LoadError(
            f"{recipe} has nothing for algorithm={algorithm}: {found}; it has {', '.join(others)}"
        )
    return {"settings": {}, "differs": "", **found}


def _checked(name: str, found: object) -> type[Algorithm[AlgorithmConfig]]:
    """Return `found` if it is an algorithm with everything that one needs."""
    from offbeat_trainer.algorithms.interface import Algorithm, OfflineAlgorithm
    from offbeat_trainer.config import AlgorithmConfig

    if not (inspect.isclass(found) and issubclass(found, Algorithm)):
        raise LoadError(f"{name} is no class of `offbeat_trainer.Algorithm`: {found!r:.80}")
    missing = sorted(found.__abstractmethods__)
    if missing:
        raise LoadError(f"{name} lacks {', '.join(f'`{method}`' for method in missing)}")
    settings = cast("object", found.Config)
    if not (inspect.isclass(settings) and issubclass(settings, AlgorithmConfig)):
        raise LoadError(f"{name}: its `Config` must be a subclass of AlgorithmConfig, got {settings!r:.80}")
    if issubclass(found, OfflineAlgorithm) is not bool(settings.written_rows):
        raise LoadError(
            f"{name}: `Config.written_rows` is {settings.written_rows}; it is 0 for an algorithm that learns from what is "
            "generated, and how many sequences a row makes for an `OfflineAlgorithm`"
        )
    return cast("type[Algorithm[AlgorithmConfig]]", found)
