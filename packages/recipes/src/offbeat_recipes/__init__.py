"""Hydra entrypoints, tasks and rewards: where Offbeat is composed."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat_recipes.errors import DataError, RecipeError, RunFolderError, SettingError, TaskError
    from offbeat_recipes.plan.facts import Facts, gather_facts
    from offbeat_recipes.plan.plan import Plan, plan_run
    from offbeat_recipes.settings.reading import parse, to_dict
    from offbeat_recipes.settings.tree import RunConfig
    from offbeat_recipes.tasks.base import RunnableTask, make_task

# Public names and the module each lives in: importing the package stays cheap, torch comes with the first use.
_HOMES = {
    "RunConfig": "settings.tree",
    "DataError": "errors",
    "RecipeError": "errors",
    "RunFolderError": "errors",
    "SettingError": "errors",
    "TaskError": "errors",
    "Facts": "plan.facts",
    "gather_facts": "plan.facts",
    "Plan": "plan.plan",
    "plan_run": "plan.plan",
    "parse": "settings.reading",
    "to_dict": "settings.reading",
    "RunnableTask": "tasks.base",
    "make_task": "tasks.base",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = [
    "DataError",
    "Facts",
    "Plan",
    "RecipeError",
    "RunConfig",
    "RunFolderError",
    "RunnableTask",
    "SettingError",
    "TaskError",
    "gather_facts",
    "make_task",
    "parse",
    "plan_run",
    "to_dict",
]
