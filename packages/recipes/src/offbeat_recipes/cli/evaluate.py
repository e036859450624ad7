"""`offbeat-eval`: the score of a model or checkpoint on held-out prompts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from offbeat_recipes.cli._environment import without_collector
from offbeat_recipes.cli._hydra import parser, read_command_line

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line, refuse what cannot run, then do it; return the exit code."""
    made = parser("offbeat-eval", "Score a model on held-out prompts.")
    read = read_command_line(made, argv)
    if isinstance(read, int):
        return read
    config, _ = read
    with without_collector():
        from offbeat_recipes.cli._checked import checked  # torch from here on

    return checked(made.prog, config, "evaluate")


if __name__ == "__main__":
    sys.exit(main())
