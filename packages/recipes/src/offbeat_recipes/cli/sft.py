"""`offbeat-sft`: supervised training alone, `warmup.steps` steps of the task's examples."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from offbeat_recipes.cli._environment import without_collector
from offbeat_recipes.cli._hydra import USAGE, parser, read_command_line

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line, refuse what cannot run, then do it; return the exit code."""
    made = parser("offbeat-sft", "Train on supervised examples alone.")
    made.add_argument(
        "--loss-only",
        action="store_true",
        help="measure the loss of held-out examples alone; start no replicas",
    )
    read = read_command_line(made, argv)
    if isinstance(read, int):
        return read
    config, options = read
    if config.warmup.steps < 1:
        sys.stderr.write(f"{made.prog}: refused: warmup.steps: 0; supervised training needs it, set it\n")
        return USAGE
    with without_collector():
        from offbeat_recipes.cli._checked import checked  # torch from here on

    return checked(made.prog, config, "sft_by_loss" if options.loss_only else "sft")


if __name__ == "__main__":
    sys.exit(main())
