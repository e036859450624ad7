"""Where a run reports to, as the settings say.

`report.trackers` names ours, those of other packages by entry points of the group `offbeat.reporters`, or functions,
"package.module:function" or "file.py:function": called with the run folder, the run's name and its settings, each returns a `Reporter`.
"""

from __future__ import annotations

from contextlib import ExitStack
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, cast

from offbeat_recipes.errors import SettingError
from offbeat_recipes.plan.machine import REPORTERS, kept_prompts, tracker_refusals
from offbeat_recipes.run.failures import describe_error
from offbeat_recipes.settings.reading import to_dict
from offbeat_trainer.errors import LoadError
from offbeat_trainer.loading import load_object
from offbeat_trainer.watch.reporters.console import ConsoleReporter
from offbeat_trainer.watch.reporters.fanout import FanOut
from offbeat_trainer.watch.reporters.silent import Silent
from offbeat_trainer.watch.reporters.tensorboard import TensorBoardReporter
from offbeat_trainer.watch.reporters.trackio import TrackioReporter
from offbeat_trainer.watch.reporters.trajectories import TrajectoryReporter
from offbeat_trainer.watch.reporters.wandb import WandbReporter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from offbeat_recipes.run.folder import RunFolder
    from offbeat_recipes.settings.tree import RunConfig
    from offbeat_trainer import Reporter
    from offbeat_trainer.watch.reporters.jsonl import JsonlReporter


def make_reporter(
    config: RunConfig, jsonl: JsonlReporter | None, folder: RunFolder, *, steps: int = 0
) -> Reporter:
    """Return where this run of `steps` reports to: `jsonl` unless None, and what the settings ask for. Where one of them fails, none stays open."""
    if jsonl is None:
        return ConsoleReporter(title=config.name) if config.report.console else Silent()
    with ExitStack() as undo:
        undo.callback(jsonl.close)
        reporters: list[Reporter] = [jsonl]
        for make in _asked_for(config, folder, steps):
            reporters.append(make())
            undo.callback(reporters[-1].close)
        undo.pop_all()  # from here on they are the run's to close
    return FanOut(reporters, describe_error=lambda error: describe_error(config, error))


def _asked_for(config: RunConfig, folder: RunFolder, steps: int) -> Iterator[Callable[[], Reporter]]:
    told, settings = config.report, to_dict(config)
    if told.console:
        yield lambda: ConsoleReporter(title=config.name, steps=steps)
    named: dict[str, Any] = {"project": told.project, "name": config.name, "config": settings}
    ours: dict[str, Callable[[], Reporter]] = {
        "tensorboard": lambda: TensorBoardReporter(folder.path / "tensorboard", config=settings),
        "wandb": lambda: WandbReporter(folder.path, **named),
        "wandb_online": lambda: WandbReporter(folder.path, **named, offline=False),
        "trackio": lambda: TrackioReporter(folder.path, **named),
    }
    for name in told.trackers:
        kept = kept_prompts(name)
        if kept is None:
            yield ours.get(name) or (
                lambda name=name: _other_reporter(name)(folder.path, config.name, settings)
            )
        else:
            yield lambda kept=kept: TrajectoryReporter(folder.path, groups_per_step=kept or None)


def _other_reporter(name: str) -> Callable[[Path, str, Mapping[str, object]], Reporter]:
    if ":" in name:
        try:
            return cast("Any", load_object(name))
        except LoadError as error:
            raise SettingError([f"report.trackers: {error}"]) from error
    for refusal in tracker_refusals((name,)):
        raise SettingError([str(refusal)])
    [point] = entry_points(group=REPORTERS, name=name)
    return point.load()
