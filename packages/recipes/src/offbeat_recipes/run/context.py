"""One run while it lasts, and its end: summary, errors in plain words, and how to go on."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat_ckptsync import SyncError
from offbeat_engine import EngineError
from offbeat_recipes.errors import RecipeError, RunFolderError, TaskError
from offbeat_recipes.planning.lengths import check_stops, length_refusals
from offbeat_recipes.report.advice import first_advice
from offbeat_recipes.report.build import write_report
from offbeat_recipes.run.folder import (
    RunFolder,
    describe_machine,
    open_run_folder,
    reopen_run_folder,
    speed_settings,
)
from offbeat_recipes.run.reporting import describe_error, make_reporter
from offbeat_recipes.run.terminal import StandingLoop, StopKeys, logs_to
from offbeat_recipes.settings.reading import to_dict
from offbeat_recipes.tasks.base import make_scorer, make_task
from offbeat_recipes.tasks.chars import random_model_folder
from offbeat_rollout import RolloutError
from offbeat_trainer import ResumeError, TrainerError
from offbeat_trainer.data.loading import own_place
from offbeat_trainer.loops.outcome import Outcome
from offbeat_trainer.loops.session import StopRequest
from offbeat_trainer.watch.fanout import FanOut, Screen, Truncating
from offbeat_trainer.watch.jsonl import JsonlReporter

if TYPE_CHECKING:
    from offbeat_recipes.settings.tree import RunConfig
    from offbeat_recipes.tasks.base import RunnableTask
    from offbeat_trainer import Reporter
    from offbeat_trainer.cluster.train_group import TrainGroup
    from offbeat_trainer.loops.run_store import RunStore

HOUSE_ERRORS = (TrainerError, SyncError, EngineError, RolloutError, RecipeError)
TRAIN, SFT, SFT_BY_LOSS = ("offbeat", "train"), ("offbeat", "sft"), ("offbeat", "sft", "--loss-only")
"""Commands that a run may go on with."""
INTERRUPTED = 130
FAILED = 1

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class RunContext:
    """What was asked, where it goes, and what was reached. `startup_s` ends when the first step may begin."""

    config: RunConfig
    folder: RunFolder
    task: RunnableTask
    reporter: Reporter
    jsonl: JsonlReporter | None
    base_model: Path
    started: float
    outcome: Outcome = field(default_factory=Outcome)
    stop: StopRequest = field(default_factory=StopRequest)
    startup_s: float = 0.0
    program: tuple[str, ...] = TRAIN
    prints: bool = True
    extra: dict[str, object] = field(default_factory=dict[str, object])

    def summary(self) -> dict[str, object]:
        """Return everything that is worth keeping about the run, JSON-ready."""
        return {
            "mode": self.config.mode.name,
            "seed": self.config.seed,
            "wall_s": time.perf_counter() - self.started,
            "startup_s": self.startup_s,
            **self.outcome.summary(),
            **(
                {"reports_lost": self.reporter.lost}
                if isinstance(self.reporter, FanOut) and self.reporter.lost
                else {}
            ),
            **self.extra,
        }


Work = Callable[[RunContext], Awaitable[None]]
"""The body of a command: does the run, fills the context."""


@dataclass(slots=True, kw_only=True)
class Caller:
    """Who started a run from Python: it is told how the run ended, and may press Ctrl-C while it lasts."""

    error: str = ""
    press: Callable[[], None] | None = None


def drive(
    config: RunConfig,
    work: Work,
    started: float,
    *,
    reopen: bool = False,
    program: tuple[str, ...] = TRAIN,
    caller: Caller | None = None,
) -> int:
    """Open the run folder, do `work` in it, and end well whatever happens; returns the exit code.

    `program` is the command that goes on where it ends early. With `reopen` the folder must hold a run, whose metrics and
    summary are left as they are.

    Raises:
        RecipeError: the folder or the task cannot be used; nothing was started.
    """
    task = make_task(
        config.task, config.model.path, config.seed, trust_remote_code=config.model.trust_remote_code
    )  # before an earlier run is moved aside
    config = config.counted(getattr(task, "num_train_prompts", 0))
    if reopen:
        _require_scores(config, task)
    else:
        _check_sizes(config, task, supervised_alone=program != TRAIN)
    with ExitStack() as opened:
        try:
            folder = opened.enter_context(closing(_folder(config, reopen=reopen)))
            opened.enter_context(logs_to(folder.logs / "driver.log"))
            context = _open(config, folder, task, started, reopen=reopen, program=program)
            context.prints = caller is None or config.report.console
        except RecipeError:
            raise
        except Exception as error:
            told = describe_error(config, error) or (str(error) if isinstance(error, OSError) else "")
            if not told:
                raise
            raise RunFolderError(f"run_dir: {config.folder} cannot be used: {told}") from error
        with asyncio.Runner(loop_factory=StandingLoop) as runner:
            return runner.run(_guarded(context, work, Caller() if caller is None else caller))


def _folder(config: RunConfig, *, reopen: bool) -> RunFolder:
    if reopen:
        return reopen_run_folder(config.folder)
    return open_run_folder(
        config.folder, to_dict(config), resume=config.resume == "auto", may_change=speed_settings(config)
    )


def _check_sizes(config: RunConfig, task: RunnableTask, *, supervised_alone: bool) -> None:
    """Refuse rows too long for the model, and a step that takes more prompts than there are; tasks that do not count theirs say so when asked."""
    there = getattr(task, "num_train_prompts", None)
    for setting, count in (
        ("trainer.prompts_per_step", config.trainer.prompts_per_step),
        ("warmup.batch_size", config.warmup.batch_size if config.warmup.steps else 0),
    ):
        if there is not None and count > there:
            raise TaskError(
                f"{setting}: a step takes {count} different prompts, and the task has {there}; take fewer"
            )
    if config.trainer.epochs and not supervised_alone:
        raise TaskError(
            "trainer.epochs: the task has no number of prompts (`num_train_prompts`); give trainer.steps"
        )
    for refusal in length_refusals(config, task, supervised_alone=supervised_alone):
        raise TaskError(str(refusal))


def _require_scores(config: RunConfig, task: RunnableTask) -> None:
    """Raise `TaskError` where nothing says what a completion is worth: neither an environment nor the task."""
    if not (config.scored_apart or config.reward.model):
        make_scorer(task, config.reward, Path(os.devnull))  # starts nothing before it is asked


def _open(
    config: RunConfig,
    folder: RunFolder,
    task: RunnableTask,
    started: float,
    *,
    reopen: bool,
    program: tuple[str, ...],
) -> RunContext:
    base = folder.path / "base"
    base_model = task.model_folder(base, config.seed)
    if config.model.random_init:
        base_model = random_model_folder(
            base_model, base, config.seed, trust_remote_code=config.model.trust_remote_code
        )
    check_stops(task, base_model, trust_remote_code=config.model.trust_remote_code)
    if not reopen:
        folder.write_machine(describe_machine(config.device, config.cluster.ray_address))
    jsonl = None if reopen else JsonlReporter(folder.path)
    steps = config.trainer.steps if program == TRAIN else config.warmup.steps
    reporter = make_reporter(config, jsonl, folder, steps=steps)
    for note in task.notes:
        reporter.phase("task", note)
    return RunContext(
        config=config,
        folder=folder,
        task=task,
        reporter=reporter,
        jsonl=jsonl,
        base_model=base_model.absolute(),
        started=started,
        program=program,
    )


async def first_step(
    context: RunContext, train: TrainGroup, store: RunStore, *, steps: int, setting: str
) -> int:
    """Return the first step to be done, of `steps`, whose `setting` that is; the ranks hold its weights then.

    Raises:
        ResumeError: more steps are done already.
    """
    step = await train.load(None) if context.folder.resumed else None
    if step is not None and step > steps:
        raise ResumeError(f"{context.folder.path} has {step} steps already; {setting}={steps} is less")
    # Without a checkpoint all is said again, but what `offbeat sft` said in this folder before reinforcement learning began.
    again = context.folder.resumed and (
        step is not None or setting == "warmup.steps" or not (context.folder.checkpoints / "sft").exists()
    )
    if again and isinstance(context.reporter, Truncating):
        context.reporter.truncate_after(-1 if step is None else step)
    if step is None:
        return 0
    context.outcome.go_on(store.load(step))
    context.reporter.phase("resume", f"from the checkpoint of step {step}")
    return step


async def _guarded(context: RunContext, work: Work, caller: Caller) -> int:
    code = 0
    with StopKeys(context.stop, context.reporter) as keys:
        caller.press = keys.press
        try:
            await work(context)
        except asyncio.CancelledError:
            context.outcome.interrupted = True
        except HOUSE_ERRORS as error:
            log.exception("the run failed")
            code = _failed(context, describe_error(context.config, error) or str(error))
        except Exception as error:
            log.exception("the run failed in a way nobody foresaw")
            code = _failed(context, describe_error(context.config, error) or _unforeseen(error))
    caller.press = None
    if context.outcome.interrupted:
        code = INTERRUPTED
    if context.jsonl is not None:
        summary = context.summary()
        try:
            if (
                context.stop.listening or not context.folder.resumed
            ):  # else it would replace that of what was reached
                context.folder.write_summary(summary)
        except OSError as error:
            code = code or _failed(context, describe_error(context.config, error) or str(error))
        context.reporter.summary(
            {**summary, **_advice(context), **_where_next(context, code, _report(context))}
        )
    context.reporter.close()
    caller.error = str(context.extra.get("error", ""))
    return code


def _unforeseen(error: Exception) -> str:
    """Say what nobody foresaw: where in a file of the user's own, say of an algorithm, or else that it is a defect of ours."""
    place = own_place("".join(traceback.format_exception(error)))
    notes = " ".join(getattr(error, "__notes__", []))
    if place or ", at " in notes:
        return f"{type(error).__name__}: {error} {notes or f'(at {place})'}; the log has the traceback"
    return f"{type(error).__name__}: {error} {notes}".rstrip() + " (a defect; the log has the traceback)"


def _failed(context: RunContext, message: str) -> int:
    context.extra["error"] = message
    if not context.prints:
        return FAILED
    screen = Screen(sys.stderr)
    screen.write(f"\nfailed: {message}\n  full logs: {context.folder.logs}\n")
    if context.stop.listening:  # there is something to go on from
        screen.write(f"  to go on: {_again(context)}\n")
    return FAILED


def _report(context: RunContext) -> dict[str, str]:
    """Write the report and return where it is; what keeps it from being written is for the log."""
    try:
        return {"report": str(write_report([context.folder.path]))}
    except Exception:
        log.exception("no report was written; offbeat report %s may", context.folder.path)
        return {}


def _advice(context: RunContext) -> dict[str, str]:
    """Return what to try first; what keeps it from being found is for the log."""
    try:
        return first_advice(context.folder.path)
    except Exception:
        log.exception("no advice was found")
        return {}


def _where_next(context: RunContext, code: int, report: dict[str, str]) -> dict[str, object]:
    folder = context.folder.path
    if code:
        return {
            "resume_command": _again(context),
            "paths": {"logs": str(context.folder.logs), **report},
        }
    return {
        "paths": {
            **report,
            "trained model": str(
                context.folder.final if context.folder.final.exists() else context.folder.model
            ),
            "metrics": str(folder / "metrics.jsonl"),
            "samples": str(folder / "samples.jsonl"),
            **_curves(context),
            **_judged(context),
        }
    }


def _curves(context: RunContext) -> dict[str, str]:
    folder = context.folder.path / "tensorboard"
    return {"curves": _command("tensorboard", "--logdir", str(folder))} if folder.exists() else {}


def _judged(context: RunContext) -> dict[str, str]:
    """Return the command that scores what was trained; where nothing says what a completion is worth, where the held-out loss is."""
    folder = context.folder.path
    try:
        _require_scores(context.config, context.task)
    except TaskError:
        return {"on held-out rows": str(folder / "summary.json")}
    return {"evaluate": _command("offbeat", "eval", str(folder))}


def _again(context: RunContext) -> str:
    folder = context.folder.path
    config = str(folder / "config.yaml")
    return _command(*context.program, "--config", config, f"run_dir={folder}", "resume=auto")


def _command(program: str, *words: str) -> str:
    """Return what a shell takes in any folder, whether the environment is active, of uv, or neither.

    It goes to the folder of now first: settings may hold paths relative to that.
    """
    beside = Path(sys.executable).parent / program
    line = shlex.join([str(beside) if beside.exists() else program, *words])
    return f"cd {shlex.quote(str(Path.cwd()))} && {line}"
