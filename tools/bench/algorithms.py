#!/usr/bin/env python3
"""Does each installed algorithm learn? Accuracy on held-out sums before and after, over seeds, in each mode.

    uv run tools/bench/algorithms.py --out docs/figures/algorithms/NAME.json        # then tools/make_benchmarks.py writes the page
    uv run tools/bench/algorithms.py --only "grpo,grpo algorithm.advantage=opo" --seeds 1 --modes sync

For each seed the tiny model of `task=arithmetic` is warmed up once, by `offbeat sft`, for `WARMUP_STEPS` steps. It is right on a third
of the sums then: those that need no carry. Every algorithm, and each of `VARIANTS`, starts from that model and has `--steps` steps,
with the settings that `SETTINGS` has for it, or its defaults. `--at-once` runs share the machine: accuracies do not depend on it,
the seconds do. Those that learn from pairs get the pairs of `examples/pairs.py`, and their figure is the share of held-out pairs
whose chosen completion is preferred. The teacher of `distill` is what GRPO made of the same model.

A run that fails is named, with the end of its log, and does not end the others. `--out` is written after each run, and runs that
it has, of this commit, are not made again. Progress goes to stderr; with --json the last line of stdout is one JSON object. The exit code is 1 if a run failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

from all import about
from runner import BenchError, guarded, run_within, say, tail

from offbeat_trainer.algorithms.registry import algorithm_config_class, algorithm_names
from offbeat_trainer.config import Advantage

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600.0
MODES = ("sync", "fully_async")
WRITTEN = "written rows"
MARK = 0.9
"""The accuracy that an algorithm is brought to; of a third at the beginning."""
QUIET = ("report.trackers=[]", "trainer.validate_every=0", "trainer.save_every=0", "trainer.sample_every=0")
SMALL_MODEL = ("engine.optimizer.lr=2.0e-4", "engine.optimizer.beta2=0.99", "engine.threads_per_rank=1")
"""What `task=arithmetic` brings along, for `task=pairs`."""
WARMUP_STEPS = 1000
"""Four times the task's default: after that many, seeds 1 and 2 still copy digits wrongly, which takes most algorithms more than 50 steps."""
SETTINGS: dict[str, tuple[str, ...]] = {
    # where most of a group is right its advantages are small
    "grpo algorithm.advantage=pass_at_k": ("engine.optimizer.lr=4.0e-4",),
    # its reference point is the mean over a batch, and of 16 rows too coarse with one seed of three
    "kto": ("trainer.prompts_per_step=32",),
    # where most completions are right advantages vary little, and brought to variance 1 they are noise
    "ppo": ("algorithm.whiten=false",),
}
"""What an algorithm needs on this task besides its defaults; nothing of the others."""
VARIANTS = (
    *(f"grpo algorithm.advantage={name}" for name in Advantage if name not in ("grpo", "dr_grpo", "rloo")),
    "grpo algorithm.kl_estimator=full algorithm.kl_coef=0.01",
)
"""Algorithms that are a setting of another one, and have no name."""


def command(words: list[str], folder: Path) -> dict[str, Any]:
    """Run a command of the recipes into `folder` and return its summary.

    Raises:
        BenchError: it failed; with the end of what it said.
    """
    log = folder.with_suffix(".log")
    with log.open("wb") as output:
        code = run_within(TIMEOUT_S, [sys.executable, "-m", *words, f"run_dir={folder}", *QUIET], output)
    summary = folder / "summary.json"
    if code or not summary.exists():
        raise BenchError(f"exit code {code}: {tail(log)}")
    return json.loads(summary.read_text())


def warm(folder: Path, seed: int, steps: int) -> Path:
    """Return the folder of the model that all runs of `seed` start from."""
    words = [
        "offbeat_recipes.cli.main",
        "sft",
        "task=arithmetic",
        f"seed={seed}",
        "rollout=hf",
        f"warmup.steps={steps}",
        "--loss-only",
    ]
    command(words, folder)
    return folder / "model"


def settings_of(name: str, folder: Path, seed: int, steps: int) -> list[str]:
    """Return what the run of algorithm `name` is told besides its model and its mode."""
    base, *more = name.split()
    config = algorithm_config_class(base)
    told = [f"algorithm={base}", *more, f"seed={seed}", f"trainer.steps={steps}"]
    if config.written_rows:
        files = f"task.train_path={folder / 'train.jsonl'}", f"task.validation_path={folder / 'test.jsonl'}"
        told += [*SMALL_MODEL, "task=pairs", *files]
    else:
        told += ["task=arithmetic"]
    if "teacher_path" in config.__dataclass_fields__:
        told += [f"algorithm.teacher_path={folder / f'grpo-sync-{seed}' / 'final'}"]
    return [*told, *SETTINGS.get(name, ())]


def measured(name: str, mode: str, seed: int, folder: Path, steps: int) -> dict[str, Any]:
    """Return what one run came to."""
    written = mode == WRITTEN
    words = [
        *settings_of(name, folder, seed, steps), f"model.path={folder / f'warm-{seed}' / 'model'}",
        "rollout=hf", "warmup.steps=0", *([] if written else [f"mode={mode}"]),
    ]  # fmt: skip
    own = folder / f"{name.replace(' algorithm.', '-')}-{mode.split()[0]}-{seed}"
    summary = command(["offbeat_recipes.cli.train", *words], own)
    return {
        "algorithm": name, "mode": mode, "seed": seed, "steps": summary["steps"],
        "before": summary["accuracy_before"], "after": summary["accuracy_after"],
        "wall_s": round(summary["wall_s"], 1), "settings": [*(SMALL_MODEL[:1] if written else ()), *SETTINGS.get(name, ())],
    }  # fmt: skip


def wanted(options: argparse.Namespace) -> list[tuple[str, str, int]]:
    """Return the runs to make: (algorithm, mode, seed), GRPO first, of whose run others learn."""
    names = options.only.split(",") if options.only else [*algorithm_names(), *VARIANTS]
    found: list[tuple[str, str, int]] = []
    for seed in range(options.seeds):
        for name in sorted(names, key=lambda one: (one != "grpo", one)):
            written = bool(algorithm_config_class(name.split()[0]).written_rows)
            found += [(name, mode, seed) for mode in ((WRITTEN,) if written else options.modes.split(","))]
    return found


def in_turns(runs: list[tuple[str, str, int]]) -> list[list[tuple[str, str, int]]]:
    """Return `runs` in lists that may be made at once: of a seed GRPO, of whose run others learn, and then all others."""
    return [[*alike] for _, alike in groupby(runs, key=lambda run: (run[2], run[0] == "grpo"))]


def keep(answer: dict[str, Any], label: str, made: dict[str, Any] | str, out: Path | None) -> None:
    """Take a run, or why it failed, into the answer, and write that to `out`."""
    if isinstance(made, str):
        answer["failed"][label] = made
        say(f"{label}: {made}")
    else:
        answer["runs"].append(made)
        answer["failed"].pop(label, None)
        say(f"{label}: {made['before']:.3f} to {made['after']:.3f} in {made['wall_s']:g} s")
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(answer, indent=1) + "\n")


def main() -> int:
    """Measure what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--only", default="", help="algorithms, by commas; all by default")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--modes", default=",".join(MODES), help="by commas")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=1, help="runs beside each other")
    parser.add_argument("--out", type=Path, help="file that is written after each run, and gone on with")
    parser.add_argument("--smallest", action="store_true", help="few steps: a check, no figures")
    options = parser.parse_args()
    answer: dict[str, Any] = {**about(), "mark": MARK, "runs": [], "failed": {}}
    if options.out and options.out.exists():
        before = json.loads(options.out.read_text())
        answer = before if before["commit"] == answer["commit"] else answer
    have = {(run["algorithm"], run["mode"], run["seed"]) for run in answer["runs"]}
    steps = 2 if options.smallest else options.steps
    pool = ThreadPoolExecutor(options.at_once)
    with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as scratch, ExitStack() as stack:
        stack.callback(pool.shutdown, cancel_futures=True)
        folder = Path(scratch)
        script = [str(ROOT / "examples" / "pairs.py"), "2000", str(folder / "train.jsonl"), "256"]
        with (folder / "pairs.log").open("wb") as output:
            run_within(TIMEOUT_S, [sys.executable, *script, str(folder / "test.jsonl")], output)

        def make(run: tuple[str, str, int]) -> dict[str, Any] | str:
            try:
                return measured(*run, folder, steps)
            except BenchError as error:
                return str(error)

        left = [run for run in wanted(options) if run not in have]
        for runs in in_turns(left):
            seed = runs[0][2]
            if not (folder / f"warm-{seed}").exists():
                warm(folder / f"warm-{seed}", seed, 4 if options.smallest else WARMUP_STEPS)
            for (name, mode, _), made in zip(runs, pool.map(make, runs), strict=True):
                keep(answer, f"{name}, {mode}, seed {seed}", made, options.out)
    print(json.dumps(answer, indent=None if options.json else 2))
    return 1 if answer["failed"] else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(guarded(main))
