"""The three modes through the command people run, with real generation and real training: tokens per second."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import ours
from failures import BenchError
from modes_paced import TimedJournal
from workload import SHAPES, Work, make_model, write_prompts

from offbeat_trainer import SqliteJournal

if TYPE_CHECKING:
    from collections.abc import Callable

MODES = ("sync", "one_step_off", "fully_async")
STALENESS = 2
MODEL = "medium"
# One in 48 tokens ends its completion: most are short, and a step of the sync mode waits for those of full length.
WORK = {"spread": Work(completion_tokens=192, end_tokens=8), "equal": Work()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """What each run is: `steps` of the work with these `lengths`, on `threads` cores; `every` layout or the usual one."""

    adapter: str
    lengths: str
    steps: int
    threads: int
    every: bool


def layouts(runs: Runs, mode: str) -> list[ours.Layout]:
    """Return the layouts to try for `mode`, the usual best one first.

    In turns, both sides may use every core. Side by side, each has its own, or all are left to the scheduler.
    """
    if mode == "sync":
        return ours.layouts(runs.adapter, runs.threads, every=runs.every)
    threads = runs.threads
    half = max(1, threads // 2)
    apart = ours.Layout(ranks=1, threads_per_rank=threads - half or 1, replicas=half, threads_per_replica=1)
    shared = replace(apart, threads_per_rank=threads, replicas=threads)
    wide_rank = replace(apart, threads_per_rank=threads)  # where training is the longer half
    many_replicas = replace(apart, replicas=threads)  # where generation is
    return list(dict.fromkeys([apart, shared, wide_rank, many_replicas])) if runs.every else [apart]


def measure(folder: Path, runs: Runs, say: Callable[[str], None]) -> dict[str, object]:
    """Return the tokens per second of each mode in its best layout, and what the journal took of the fastest.

    Raises:
        BenchError: a run failed, or its completions are not as long as the work says.
    """
    given = _input(folder, WORK[runs.lengths], runs.steps)
    best: dict[str, tuple[float, ours.Layout, Path]] = {}
    for mode in MODES:
        for number, layout in enumerate(layouts(runs, mode)):
            where = folder / f"{mode}{number}"
            settings = [f"mode={mode}"]
            if mode == "fully_async":
                settings.append(f"mode.max_staleness={STALENESS}")
            say(f"  {mode}: {layout} ...")
            ours.run(given, runs.adapter, layout, runs.steps, where, settings)
            speed = _tokens_per_s(where / "metrics.jsonl")
            say(f"    {speed:.0f} tokens/s")
            if mode not in best or speed > best[mode][0]:
                best[mode] = (speed, layout, where)
    speeds = {mode: speed for mode, (speed, _, _) in best.items()}
    return {
        "lengths": runs.lengths,
        "tokens_per_s": {mode: round(speed, 1) for mode, speed in speeds.items()},
        "async_over_sync": round(speeds["fully_async"] / speeds["sync"], 4),
        "one_step_off_over_sync": round(speeds["one_step_off"] / speeds["sync"], 4),
        "layouts": {mode: str(layout) for mode, (_, layout, _) in best.items()},
        "journal_share_real": round(_journal_share(best["fully_async"][2], folder), 5),
    }


def _input(folder: Path, work: Work, steps: int) -> ours.Input:
    make_model(folder / "model", SHAPES[MODEL], work)
    write_prompts(folder / "prompts.jsonl", work, steps)
    shutil.copyfile(Path(__file__).with_name("reward.py"), folder / "reward.py")
    return ours.Input(model=folder / "model", prompts=folder / "prompts.jsonl", work=work)


def _lines(path: Path) -> list[dict[str, float]]:
    return [cast("dict[str, float]", json.loads(line)) for line in path.read_text().splitlines()]


def _tokens_per_s(path: Path) -> float:
    """Return the trained tokens per second of wall time. Not counted: the first steps, and those that nothing follows.

    A mean, not a median: what runs ahead makes some steps short at the cost of others.
    """
    lines = _lines(path)
    first, last = ours.WARM_UP, len(lines) - 1 - STALENESS - 1
    if last - first < 2:
        raise BenchError(f"{len(lines)} steps leave nothing to count; use more --steps")
    tokens = sum(line["tokens/generated"] for line in lines[first : last + 1])
    return tokens / (lines[last]["time_s"] - lines[first - 1]["time_s"])


def _journal_share(run: Path, scratch: Path) -> float:
    """Return what writing the run's events again takes, as a share of the run's steps."""
    kept = SqliteJournal(run / "checkpoints" / "journal.sqlite")
    again = TimedJournal(SqliteJournal(scratch / f"again-{time.time_ns()}.sqlite"))
    for event in kept.events():
        again.write(event)
    again.forget(1 << 30)
    kept.close()
    again.close()
    lines = _lines(run / "metrics.jsonl")
    steps_s = (lines[-1]["time_s"] - lines[0]["time_s"]) * len(lines) / (len(lines) - 1)
    return again.seconds / steps_s
