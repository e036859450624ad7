"""`offbeat-sft`: supervised training alone, `warmup.steps` steps of the task's examples."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from offbeat_recipes.cli._hydra import USAGE, parser, read_command_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat_recipes.settings.tree import RunConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line, refuse what cannot run, then do it; return the exit code."""
    made = parser("offbeat-sft", "Train on supervised examples alone.")
    read = read_command_line(made, argv)
    if isinstance(read, int):
        return read
    config, _ = read
    if told := _refused(config):
        sys.stderr.write(f"{made.prog}: refused: {told}\n")
        return USAGE
    from offbeat_recipes.cli._checked import checked  # torch from here on

    return checked(made.prog, config, "sft")


def _refused(config: RunConfig) -> str:
    """Say what this command alone cannot do with `config`, or nothing."""
    if config.warmup.steps < 1:
        return "warmup.steps: 0; supervised training takes that many steps, set it"
    if config.resume == "auto":
        return (
            "resume: supervised training begins anew each time; leave it out (an earlier run is moved aside)"
        )
    return ""


if __name__ == "__main__":
    sys.exit(main())
