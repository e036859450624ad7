"""`offbeat-sft`: supervised training alone, `warmup.steps` steps of the task's examples."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from offbeat_recipes.cli._hydra import parser, read_command_line

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line, refuse what cannot run, then do it; return the exit code."""
    made = parser("offbeat-sft", "Train on supervised examples alone.")
    read = read_command_line(made, argv)
    if isinstance(read, int):
        return read
    config, _ = read
    from offbeat_recipes.cli._checked import checked  # torch from here on

    return checked(made.prog, config, "sft")


if __name__ == "__main__":
    sys.exit(main())
