"""`offbeat export`: a checkpoint of a run as a Hugging Face folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat_recipes.cli._environment import USAGE, command_parser, options_of, prepare_environment

if TYPE_CHECKING:
    from collections.abc import Sequence

_EPILOG = """\
  offbeat export runs/demo                        # the newest checkpoint, to runs/demo/exports/step_<n>
  offbeat export runs/demo --step 20 --to models/demo
  offbeat export runs/lora --lora merged          # adapters merged in; --lora adapter for those alone
  offbeat export runs/demo --push me/demo         # to the Hugging Face hub, too; private where it is new
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folder and print its path; return 0, or 2 where that cannot be."""
    made = command_parser(
        "offbeat export",
        "Write a checkpoint of a run as a Hugging Face folder, with a card that says how it was trained.",
        _EPILOG,
    )
    made.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    made.add_argument("--step", type=int, metavar="N", help="by default the newest whole checkpoint")
    made.add_argument("--to", type=Path, metavar="FOLDER", help="by default RUN/exports/step_<n>")
    made.add_argument(
        "--lora", choices=["merged", "adapter"], help="of a model with adapters; by default as the run says"
    )
    made.add_argument("--push", metavar="OWNER/NAME", help="upload the folder to the Hugging Face hub, too")
    options = options_of(made, argv)
    if options.push is not None:
        os.environ.setdefault("HF_HUB_OFFLINE", "0")  # the one command that asks the hub for something
    prepare_environment()
    from offbeat_engine import EngineError  # torch from here on
    from offbeat_engine.config import LoraExport
    from offbeat_recipes.cli._hydra import complain, compose_run
    from offbeat_recipes.errors import RecipeError, RunFolderError
    from offbeat_recipes.run.export import export_checkpoint, push, require_push
    from offbeat_recipes.run.folder import CONFIG

    run: Path = options.run
    try:
        if not (run / CONFIG).is_file():
            raise RunFolderError(f"{run} is no folder of a run: it has no {CONFIG}")
        if options.push is not None:
            require_push(options.push)
        config = compose_run([], str(run / CONFIG))
        lora = None if options.lora is None else LoraExport(options.lora)
        target = export_checkpoint(run, config, options.to, step=options.step, lora=lora)
        sys.stdout.write(f"{target}\n")
        if options.push is not None:
            sys.stdout.write(f"{push(target, options.push)}\n")
    except (RecipeError, EngineError, OSError) as error:
        complain(made.prog, error)
        return USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main())
