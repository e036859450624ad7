"""Offbeat on the bench's work: the command people run, on a folder of its own, read from the metrics it writes."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, cast

from runner import BenchError, run_within, tail

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from workload import Work

PHASES = ("generate", "reward", "train", "sync")
WARM_UP = 2  # first steps that do not count: allocators, caches and lazy imports
RUN_TIMEOUT_S = 3600.0
REWARD = "reward.py:share_of_good"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the cores are shared. Training and generation take turns, so each may use them all."""

    ranks: int
    threads_per_rank: int
    replicas: int
    threads_per_replica: int
    micro_batch_tokens: int = 16384  # what a run takes unless told otherwise

    def __str__(self) -> str:
        return (
            f"{self.ranks} rank(s) x {self.threads_per_rank} thread(s), "
            f"{self.replicas} replica(s) x {self.threads_per_replica} thread(s), "
            f"micro-batches of {self.micro_batch_tokens} tokens"
        )


def layouts(adapter: str, threads: int, *, every: bool) -> list[Layout]:
    """Return the layouts to try with `adapter`: those that have been best somewhere, or `every` one."""
    # Narrow replicas: a vLLM scheduler knows one thread, and threads that never wait for each other suffer least
    # from whatever else the machine does.
    narrow = Layout(ranks=1, threads_per_rank=threads, replicas=threads, threads_per_replica=1)
    wide = replace(narrow, replicas=1, threads_per_replica=threads)
    if not every:
        return (
            [narrow]
            if adapter == "vllm"
            else list(dict.fromkeys([wide, replace(narrow, ranks=threads, threads_per_rank=1)]))
        )
    tried = [
        narrow,
        replace(narrow, micro_batch_tokens=4096),  # more calls, each near the caches
        replace(narrow, ranks=threads, threads_per_rank=1),
        wide,
    ]
    return list(dict.fromkeys(tried))


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """What a run reads: model folder, prompts, work."""

    model: Path
    prompts: Path
    work: Work


def run(
    given: Input, adapter: str, layout: Layout, steps: int, folder: Path, more: Sequence[str] = ()
) -> dict[str, object]:
    """Train `steps` steps into `folder`, with `more` settings, and return median seconds of a step and of its phases.

    Raises:
        BenchError: the command failed, or its completions are not as long as the work says.
    """
    settings = [*_settings(given, adapter, layout, folder), f"trainer.steps={steps}", *more]
    command = [sys.executable, "-m", "offbeat_recipes.cli.train", *settings]
    log = folder.with_suffix(".log")
    with log.open("wb") as output:
        code = run_within(RUN_TIMEOUT_S, command, output)
    if code:
        raise BenchError(f"offbeat train with rollout={adapter} ended with code {code}:\n{tail(log)}")
    return {**_read(folder / "metrics.jsonl", given.work), "layout": str(layout)}


def _settings(given: Input, adapter: str, layout: Layout, folder: Path) -> list[str]:
    work = given.work
    settings: dict[str, object] = {
        "task": "file",
        "rollout": adapter,
        "algorithm": "grpo",
        "run_dir": folder,
        "seed": work.seed,
        "model.path": given.model,
        "task.train_path": given.prompts,
        "task.validation_path": given.prompts,
        "task.reward": given.prompts.parent / REWARD,
        "task.max_prompt_tokens": work.prompt_tokens,
        "trainer.prompts_per_step": work.prompts_per_step,
        "trainer.group_size": work.group_size,
        "trainer.validate_every": 0,
        "trainer.validation_prompts": 1,
        "trainer.save_every": 0,
        "trainer.sample_every": 0,
        "sampling.max_tokens": work.completion_tokens,
        "algorithm.clip_low": work.clip_low,
        "algorithm.clip_high": work.clip_high,
        "engine.optimizer.lr": work.lr,
        "engine.optimizer.beta1": work.beta1,
        "engine.optimizer.beta2": work.beta2,
        "engine.optimizer.max_grad_norm": work.max_grad_norm,
        "engine.num_ranks": layout.ranks,
        "engine.threads_per_rank": layout.threads_per_rank,
        "engine.micro_batch_tokens": layout.micro_batch_tokens,
        "rollout.num_replicas": layout.replicas,
        "rollout.cpu_threads": layout.threads_per_replica,
        "rollout.max_model_len": work.prompt_tokens + work.completion_tokens,
        "report.console": "false",
        "report.trackers": "[]",
    }
    return [f"{key}={value}" for key, value in settings.items()]


def _read(path: Path, work: Work) -> dict[str, object]:
    lines = [cast("dict[str, float]", json.loads(line)) for line in path.read_text().splitlines()]
    wanted = work.completions * work.completion_tokens
    for line in lines:
        if line["tokens/generated"] > wanted or (line["tokens/generated"] < wanted and not work.end_tokens):
            raise BenchError(
                f"step {line['step']} made {line['tokens/generated']} tokens, the work has {wanted}"
            )
    # A step lasts from one line of metrics to the next. The last one validates before its line: it does not count.
    walls = [after["time_s"] - before["time_s"] for before, after in pairwise(lines)]
    counted = lines[WARM_UP:-1]
    return {
        "step_s": median(walls[WARM_UP - 1 : -1]),
        "steps": len(counted),
        "phases": {name: median(line[f"time/{name}_s"] for line in counted) for name in PHASES},
    }
