"""For tests of whole runs: the commands in processes of their own, which tests stop, kill and read."""

from offbeat_recipes.testing.commands import Command

__all__ = ["Command"]
