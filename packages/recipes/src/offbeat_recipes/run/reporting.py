"""Where a run reports to, as the settings say.

`report.trackers` names ours, those of other packages by entry points of the group `offbeat.reporters`, or functions,
"package.module:function" or "file.py:function": called with the run folder, the run's name and its settings, each returns a `Reporter`.
"""

from __future__ import annotations

import errno
from contextlib import ExitStack
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, cast

from offbeat_recipes.errors import SettingError
from offbeat_recipes.planning.machine import REPORTERS, kept_prompts, tracker_refusals
from offbeat_recipes.settings.reading import to_dict
from offbeat_trainer.data.loading import load_object
from offbeat_trainer.errors import LoadError
from offbeat_trainer.watch.console import ConsoleReporter
from offbeat_trainer.watch.fanout import FanOut
from offbeat_trainer.watch.jsonl import Silent, TrajectoryReporter
from offbeat_trainer.watch.trackers import TensorBoardReporter, TrackioReporter, WandbReporter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from offbeat_recipes.run.folder import RunFolder
    from offbeat_recipes.settings.tree import RunConfig
    from offbeat_trainer import Reporter
    from offbeat_trainer.watch.jsonl import JsonlReporter


# Not every library raises an OSError: tokenizers, SQLite and Ray put the system's words into errors of their own.
_ROOM = ("No space left on device", "Disk quota exceeded", "database or disk is full")
_FILES = ("Too many open files",)
_MEMORY = ("can't allocate memory", "Cannot allocate memory")


def describe_error(config: RunConfig, error: BaseException) -> str:
    """Say what ran out, where and what to do about it, if that is what `error` came of; else return nothing."""
    if _is_of(error, _ROOM, errno.ENOSPC, errno.EDQUOT):
        return (
            f"no room is left: {_where(error)}. Free bytes, or files where those ran out (df -h and df -i on "
            f"{config.folder.absolute()} and on the temporary folder tell), or choose another run_dir. What was saved is whole"
        )
    if _is_of(error, _FILES, errno.EMFILE, errno.ENFILE):
        return f"too many files are open: {_where(error)}. Allow more (ulimit -n 65536)"
    ran_out = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if not ran_out and not _is_of(error, _MEMORY, errno.ENOMEM):
        return ""
    return (
        f"memory ran out: {_where(error)}. What takes less: engine.micro_batch_tokens (now {config.engine.micro_batch_tokens}), "
        f"engine.activation_checkpointing=true, engine.offload_optimizer=true, more ranks (engine.num_ranks, now "
        f"{config.engine.num_ranks}), fewer replicas (rollout.num_replicas, now {config.rollout.num_replicas}) or less for each "
        "(rollout.gpu_memory_fraction, rollout.kv_cache_gib). A run may go on with any of these changed"
    )


def _is_of(error: BaseException, words: tuple[str, ...], *numbers: int) -> bool:
    return any(
        (isinstance(one, OSError) and one.errno in numbers) or any(word in str(one) for word in words)
        for one in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and what it came of, each once."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def _where(error: BaseException) -> str:
    said = str(error).strip()
    return "; ".join(
        [said.splitlines()[0] if said else type(error).__name__, *getattr(error, "__notes__", [])]
    )


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
    named: dict[str, Any] = {"name": config.name, "config": settings}
    ours: dict[str, Callable[[], Reporter]] = {
        "tensorboard": lambda: TensorBoardReporter(folder.path / "tensorboard", config=settings),
        "wandb": lambda: WandbReporter(folder.path, **named),
        "wandb_online": lambda: WandbReporter(folder.path, **named, offline=False),
        "trackio": lambda: TrackioReporter(folder.path, project="offbeat", **named),
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
