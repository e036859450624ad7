"""For tests: the contract of tasks, replicas without a model, and whole runs, whose commands are processes that tests stop, kill and read."""

from offbeat_recipes.testing.commands import Command
from offbeat_recipes.testing.replicas import ScriptedReplicas
from offbeat_recipes.testing.tasks import check_task

__all__ = ["Command", "ScriptedReplicas", "check_task"]
