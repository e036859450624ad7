"""The commands that read the settings of a run: `offbeat train`, `offbeat sft`, `offbeat eval` and `offbeat plan`."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from offbeat_recipes.cli._environment import prepare_environment, without_collector
from offbeat_recipes.cli._hydra import USAGE, complain, compose_run, of_recipe, parser, read_command_line
from offbeat_recipes.errors import RecipeError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from offbeat_recipes.settings.tree import RunConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line, refuse what cannot run, then train; return the exit code."""
    made = parser("offbeat train", "Train a language model by reinforcement learning.")
    made.add_argument(
        "--multirun",
        action="store_true",
        help="one run for each combination of values: seed=1,2,3; each in a folder below run_dir, with one report of all",
    )
    options = made.parse_intermixed_args(argv)
    if options.multirun:
        return _multirun(made.prog, options)
    read = read_command_line(made, argv)
    if isinstance(read, int):
        return read
    config, _ = read
    return _begin(made.prog, config, "train")


def _multirun(prog: str, options: argparse.Namespace) -> int:
    from offbeat_recipes.run.sweep import choices, sweep

    common = [] if options.config is None else ["--config", options.config]
    try:
        runs = choices(options.settings)
        folder, *_ = [
            compose_run(run, options.config).folder for run in runs
        ]  # all are read before one begins
    except RecipeError as error:
        complain(prog, error)
        return USAGE
    if folder.exists():
        complain(prog, RecipeError(f"run_dir: {folder} exists; give another one, below which the runs go"))
        return USAGE
    runs = [[text for text in run if not text.startswith("run_dir=")] for run in runs]
    return sweep(runs, common, folder, sys.stderr.write)


def _begin(prog: str, config: RunConfig, what: str, *more: object) -> int:
    with without_collector():
        from offbeat_recipes.cli._checked import checked  # torch from here on

    return checked(prog, config, what, *more)


def sft(argv: Sequence[str] | None = None) -> int:
    """Read the command line, refuse what cannot run, then do it; return the exit code."""
    made = parser("offbeat sft", "Train on supervised examples alone.")
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
    return _begin(made.prog, config, "sft_by_loss" if options.loss_only else "sft")


def evaluate(argv: Sequence[str] | None = None) -> int:
    """Read the command line, refuse what cannot run, then do it; return the exit code."""
    made = parser(
        "offbeat eval", "Score a model on held-out prompts. One word without = is the folder of a run."
    )
    made.add_argument(
        "--step",
        type=int,
        default=-1,
        metavar="N",
        help="a checkpoint: -1, the default, the newest, or the exported model where none is as new; 0 the model as it was",
    )
    made.add_argument(
        "--samples",
        type=int,
        default=1,
        metavar="N",
        help="completions a prompt; several give pass@k and maj@n",
    )
    made.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    read = read_command_line(made, argv, takes_run=True)
    if isinstance(read, int):
        return read
    config, options = read
    if options.step < -1 or options.samples < 1 or not 0 <= options.temperature < math.inf:
        sys.stderr.write(
            f"{made.prog}: expected --step of at least -1, --samples of at least 1, --temperature of at least 0\n"
        )
        return USAGE
    asked = {"step": options.step, "num_samples": options.samples, "temperature": options.temperature}
    return _begin(made.prog, config, "evaluate", asked)


def plan(argv: Sequence[str] | None = None) -> int:
    """Print the plan of a run; return 0 when it can run, 2 when something is refused."""
    made = parser(
        "offbeat plan", "Print placement, batch arithmetic, memory and refusals of a run; start nothing."
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
            from offbeat_recipes.planning.facts import gather_facts  # torch from here on
            from offbeat_recipes.planning.plan import plan_run
            from offbeat_recipes.planning.view import plan_json, print_plan
            from offbeat_recipes.run.folder import resume_refusals

            facts = gather_facts(config, opens_data=True)
            config = config.counted(facts.num_train_prompts)
            planned = plan_run(config, facts)
        recipe = of_recipe(options.settings, config)
        notes = (recipe.note, *planned.warnings) if recipe else planned.warnings
        planned = replace(planned, refusals=(*planned.refusals, *resume_refusals(config)), warnings=notes)
    except RecipeError as error:
        complain(made.prog, error)
        return USAGE
    if options.json:
        sys.stdout.write(plan_json(planned) + "\n")
    else:
        print_plan(planned, sys.stdout)
    return USAGE if planned.refusals else 0


if __name__ == "__main__":
    sys.exit(main())
