"""Several runs that differ in some settings, one after the other, and one report of all."""

from __future__ import annotations

import itertools
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from offbeat_recipes.errors import RecipeError, SettingError
from offbeat_recipes.report.build import REPORT, write_report

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


def choices(settings: Sequence[str]) -> list[list[str]]:
    """Return the settings of each run: one for each combination of values that are written with commas or as a range.

    The grammar is Hydra's: `seed=1,2,3`, `trainer.group_size=range(4,17,4)`, `algorithm=grpo,rloo`.

    Raises:
        SettingError: no setting has several values.
    """
    read = OverridesParser.create()
    each: list[list[str]] = []
    for text in settings:
        each.append([text])
        with suppress(HydraException):  # the run itself says what is wrong with it
            override = read.parse_override(text)
            if override.is_sweep_override():
                each[-1] = [f"{override.key_or_group}={value}" for value in override.sweep_string_iterator()]
    if all(len(values) == 1 for values in each):
        raise SettingError(["--multirun: no setting has several values; write them with commas, seed=1,2,3"])
    return [list(one) for one in itertools.product(*each)]


def sweep(
    runs: Sequence[Sequence[str]], common: Sequence[str], folder: Path, say: Callable[[str], object]
) -> int:
    """Start `offbeat train` with each of `runs` in turn, each in a folder of its own below `folder`; return 0, or 1 if one failed.

    Each run has its own deadlines, so none is set on it here. A run that fails does not keep the others from being made. Ctrl-C ends the run under way, as it does alone, and the rest.
    """
    folders = [folder / _name(number, one, runs) for number, one in enumerate(runs)]
    failed: list[str] = []
    for number, (one, place) in enumerate(zip(runs, folders, strict=True)):
        say(f"multirun: {number + 1} of {len(runs)}, {place}\n")
        command = [sys.executable, "-m", "offbeat_recipes.cli.train", *common, *one, f"run_dir={place}"]
        with subprocess.Popen(command) as process:
            try:
                code = process.wait()
            except KeyboardInterrupt:  # the run heard it, too, and ends in order
                process.wait()
                failed.append(f"{place}: stopped, and {len(runs) - number - 1} were not begun")
                break
        if code:
            failed.append(f"{place}: exit code {code}")
    there = [place for place in folders if (place / "config.yaml").exists()]
    if there:
        try:
            say(f"multirun: report of all: {write_report(there, folder / REPORT)}\n")
        except RecipeError as error:
            say(f"multirun: no report: {error}\n")
    for line in failed:
        say(f"multirun: {line}\n")
    return 1 if failed else 0


def _name(number: int, run: Sequence[str], runs: Sequence[Sequence[str]]) -> str:
    """Return the name of a run's folder: its number, and the settings in which runs differ."""
    differing = [text for place, text in enumerate(run) if len({one[place] for one in runs}) > 1]
    return "_".join([str(number), *(text.rpartition("/")[2] for text in differing)])
