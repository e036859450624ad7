"""Tasks by name: one of this package, an entry point of the group `offbeat.tasks`, or the path of a class (`reverse.py:Reverse`).

A task's settings are read long before the task is made, so those of this package are listed apart. A class of your own is asked
for its `Config`.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, cast

from offbeat_recipes.errors import TaskError
from offbeat_recipes.tasks.config import (
    ArithmeticConfig,
    CalculatorConfig,
    CodeConfig,
    CountdownConfig,
    FileConfig,
    Gsm8kConfig,
    PairsConfig,
    SqlConfig,
    TaskConfig,
    WordGameConfig,
)
from offbeat_trainer.data.loading import load_object
from offbeat_trainer.errors import LoadError

ENTRY_POINT_GROUP = "offbeat.tasks"
_BUILT_IN: dict[str, tuple[str, str, type[TaskConfig]]] = {
    "arithmetic": ("arithmetic", "ArithmeticTask", ArithmeticConfig),
    "calculator": ("calculator", "CalculatorTask", CalculatorConfig),
    "code": ("tiny.code", "CodeTask", CodeConfig),
    "countdown": ("tiny.countdown", "CountdownTask", CountdownConfig),
    "file": ("file", "FileTask", FileConfig),
    "gsm8k": ("gsm8k", "Gsm8kTask", Gsm8kConfig),
    "pairs": ("file", "PairsTask", PairsConfig),
    "sql": ("tiny.sql", "SqlTask", SqlConfig),
    "word_game": ("tiny.word_game", "WordGameTask", WordGameConfig),
}
"""Module, class and settings."""
_NEEDED = (
    "prompts", "validation_prompts", "examples", "decode", "stop_token_ids", "tokenizer", "model_folder"
)  # fmt: skip


def task_names() -> list[str]:
    """Return the names of all installed tasks, sorted."""
    return sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)} | set(_BUILT_IN))


def task_class(name: str) -> type[Any]:
    """Return the class of the `RunnableTask` that is registered as `name`, or that `name` is the path of, importing it now and not before.

    Raises:
        TaskError: there is none, it cannot be imported, or it lacks something of a task, which is named.
    """
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            return _checked(name, point.load())
    if name in _BUILT_IN:
        module, attribute, _ = _BUILT_IN[name]
        return cast("type[Any]", getattr(import_module(f"offbeat_recipes.tasks.{module}"), attribute))
    if ":" in name:
        try:
            return _checked(name, load_object(name))
        except LoadError as error:
            raise TaskError(str(error)) from error
    raise TaskError(
        f"no task named {name!r}; installed: {', '.join(task_names())}. One of your own is given as file.py:Class or "
        f"package.module:Class; a package adds one through the entry-point group {ENTRY_POINT_GROUP!r}."
    )


def task_config_class(name: str) -> type[TaskConfig]:
    """Return the class that the settings of task `name` are read by.

    Raises:
        TaskError: see `task_class`.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name][2]
    return cast("type[TaskConfig]", getattr(task_class(name), "Config", TaskConfig))


def _checked(name: str, found: Any) -> type[Any]:  # noqa: ANN401 whatever the user wrote
    if not inspect.isclass(found):
        raise TaskError(f"{name} is no class: {found!r:.80}")
    missing = [member for member in _NEEDED if not hasattr(found, member)]
    missing += sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise TaskError(
            f"{name} lacks {', '.join(f'`{member}`' for member in missing)}; a subclass of `offbeat_recipes.GeneratedTask` has them all"
        )
    settings = getattr(found, "Config", TaskConfig)
    if not (inspect.isclass(settings) and issubclass(settings, TaskConfig)):
        raise TaskError(f"{name}: its `Config` must be a subclass of TaskConfig, got {settings!r:.80}")
    return found
