"""The three modes through the command people run, with real generation and real training: tokens per second."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import ours
from modes_paced import TimedJournal
from runner import BenchError
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
    """What each run is: `steps` of the work with these `lengths`, on `threads` cores; in `layouts` (pools: in two pools alone)."""

    adapter: str
    lengths: str
    steps: int
    threads: int
    layouts: str
    smallest: bool = False


def apart(runs: Runs) -> ours.Layout:
    """Return the layout of two pools: generation and training have the same number of cores, each its own."""
    half = max(1, runs.threads // 2)
    return ours.Layout(
        ranks=1, threads_per_rank=runs.threads - half or 1, replicas=half, threads_per_replica=1
    )


def layouts(runs: Runs, mode: str) -> list[ours.Layout]:
    """Return the layouts to try for `mode`: two pools first, then those in which some cores are left to the scheduler.

    In turns, as the sync mode goes, both sides may use every core.
    """
    pools = apart(runs)
    if runs.layouts == "pools":
        return [pools]
    every = runs.layouts == "all"
    wide_rank = replace(pools, threads_per_rank=runs.threads)  # where training is the longer half
    tried = [pools, wide_rank]
    if mode == "sync":
        tried += ours.layouts(runs.adapter, runs.threads, every=every)
    elif every:
        tried += [replace(wide_rank, replicas=runs.threads), replace(pools, replicas=runs.threads)]
    return list(dict.fromkeys(tried))


def measure(folder: Path, runs: Runs, say: Callable[[str], None]) -> dict[str, object]:
    """Return the tokens per second of each mode, what running ahead gains, and what the journal took.

    Gains are given twice: in two pools, where only `mode` differs, and of each mode's best layout over the sync mode's.

    Raises:
        BenchError: a run failed, or its completions are not as long as the work says.
    """
    work = (
        Work(prompts_per_step=2, group_size=2, completion_tokens=4) if runs.smallest else WORK[runs.lengths]
    )
    given = _input(folder, "small" if runs.smallest else MODEL, work, runs.steps)
    speeds: dict[str, dict[ours.Layout, float]] = {mode: {} for mode in MODES}
    for mode in MODES:
        for number, layout in enumerate(layouts(runs, mode)):
            where = folder / f"{mode}{number}"
            settings = [f"mode={mode}"]
            if mode == "fully_async":
                settings.append(f"mode.max_staleness={STALENESS}")
            say(f"  {mode}: {layout} ...")
            ours.run(given, runs.adapter, layout, runs.steps, where, settings)
            speeds[mode][layout] = _tokens_per_s(where / "metrics.jsonl")
            say(f"    {speeds[mode][layout]:.0f} tokens/s")
    best = {mode: max(speeds[mode].values()) for mode in MODES}
    pools = {mode: speeds[mode][apart(runs)] for mode in MODES}
    return {
        "lengths": runs.lengths,
        "tokens_per_s": _rounded(pools, 1),
        "best_tokens_per_s": _rounded(best, 1),
        "async_over_sync": round(pools["fully_async"] / pools["sync"], 4),
        "one_step_off_over_sync": round(pools["one_step_off"] / pools["sync"], 4),
        "async_over_best_sync": round(best["fully_async"] / best["sync"], 4),
        "one_step_off_over_best_sync": round(best["one_step_off"] / best["sync"], 4),
        "layouts": {
            mode: {str(layout): round(speed, 1) for layout, speed in tried.items()}
            for mode, tried in speeds.items()
        },
        "journal_share_real": round(_journal_share(folder / "fully_async0", folder), 5),
    }


def _rounded(figures: dict[str, float], digits: int) -> dict[str, float]:
    return {name: round(value, digits) for name, value in figures.items()}


def _input(folder: Path, model: str, work: Work, steps: int) -> ours.Input:
    make_model(folder / "model", SHAPES[model], work)
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
