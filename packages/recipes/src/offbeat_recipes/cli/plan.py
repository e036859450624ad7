"""`offbeat-plan`: what a run would do, and why it could not; starts nothing."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from offbeat_recipes.cli._environment import prepare_environment, without_collector
from offbeat_recipes.cli._hydra import USAGE, complain, parser, read_command_line
from offbeat_recipes.errors import RecipeError

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan of a run; return 0 when it can run, 2 when something is refused."""
    made = parser(
        "offbeat-plan", "Print placement, batch arithmetic, memory and refusals of a run; start nothing."
    )
    made.add_argument("--json", action="store_true", help="one line of JSON instead of tables")
    read = read_command_line(made, argv)
    if isinstance(read, int):
        return read
    config, options = read
    prepare_environment()
    if not options.json:
        sys.stderr.write(f"{made.prog}: checking settings, data and model ...\n")  # imports take seconds
    try:
        with without_collector():
            from offbeat_recipes.plan.facts import gather_facts  # torch from here on
            from offbeat_recipes.plan.plan import plan_run
            from offbeat_recipes.plan.view import plan_json, print_plan
            from offbeat_recipes.run.folder import resume_refusals

            plan = plan_run(config, gather_facts(config, opens_data=True))
        plan = replace(plan, refusals=(*plan.refusals, *resume_refusals(config)))
    except RecipeError as error:
        complain(made.prog, error)
        return USAGE
    if options.json:
        sys.stdout.write(plan_json(plan) + "\n")
    else:
        print_plan(plan, sys.stdout)
    return USAGE if plan.refusals else 0


if __name__ == "__main__":
    sys.exit(main())
