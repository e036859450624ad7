"""What a command imports before it does anything, in the environment it would set first. Imported by the fork server."""

from __future__ import annotations

from importlib import import_module

from offbeat_recipes.cli._environment import prepare_environment

prepare_environment()

for _name in (
    "transformers.models.auto.modeling_auto",
    "offbeat_recipes.cli._checked",
    "offbeat_recipes.run.commands",
):
    import_module(_name)
