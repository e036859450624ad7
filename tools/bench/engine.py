#!/usr/bin/env python3
"""What the training engine costs and saves: beside a plain PyTorch loop, a bare `fully_shard` loop, padding, whole logits.

    uv run tools/bench/engine.py --json
    uv run tools/bench/engine.py --engine megatron --json

Two sides of a comparison take turns in one process (or one set of ranks), step by step, in changing
order: what else the machine does falls on both. The answer is the ratio of their median speeds; `*_of_neighbours` is
the median of the ratios of neighbouring steps. Peaks of memory come from processes of their own. Progress goes to stderr. With --json the last line of stdout is one JSON object, else a table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the entrypoints do; read when torch is imported

import torch
from engine_checkpoint import checkpointing
from engine_load import loading
from engine_loops import BareShards, Plain, Size, Turns, batch_of, engine_on, make_model, take_turns
from runner import guarded

from offbeat_engine import World
from offbeat_engine.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).resolve().parent
SMALLEST = Size(
    hidden=48, layers=1, intermediate=64, heads=4, vocab=64, sequences=4, tokens=8, micro_batch_tokens=64, rounds=1,
    scale=16,
)  # fmt: skip
AIMS = {
    "overhead_ratio": (0.95, "at least"),
    "fsdp_ratio": (0.95, "at least"),
    "packing_speedup": (2.5, "at least"),
    "logprob_peak_ratio": (0.4, "at most"),
    "load_peak_ratio": (1.5, "at most"),
    "engine_export_peak_ratio": (1.5, "at most"),
    "save_peak_ratio": (1.5, "at most"),
    "resume_peak_ratio": (1.5, "at most"),
}


def overhead(size: Size, model: str) -> dict[str, Any]:
    """Equal lengths, one rank: the engine beside a plain loop."""
    engine = engine_on(World(device=size.device), model, size)
    turns = take_turns(
        engine, Plain(model, size), batch_of(size, [size.tokens] * size.sequences), size.rounds
    )
    return {
        "overhead_ratio": turns.ratio,
        "overhead_of_neighbours": turns.of_neighbours,
        "engine_tokens_per_s": turns.ours,
        "plain_tokens_per_s": turns.theirs,
    }


def sharded(size: Size, model: str) -> dict[str, Any]:
    """Equal lengths, two gloo ranks of one thread: the engine beside a bare `fully_shard` loop."""
    turns: Turns = run_ranks(_sharded_rank, 2, model, size, timeout_s=900.0)[0]
    return {
        "fsdp_ratio": turns.ratio,
        "fsdp_of_neighbours": turns.of_neighbours,
        "fsdp_tokens_per_s": turns.ours,
        "bare_tokens_per_s": turns.theirs,
    }


def _sharded_rank(world: World, model: str, size: Size) -> Turns:
    engine = engine_on(world, model, size)
    return take_turns(
        engine, BareShards(model, size), batch_of(size, [size.tokens] * size.sequences), size.rounds
    )


def packing(size: Size, model: str) -> dict[str, Any]:
    """Long-tailed lengths, mean a quarter of the longest: packed, beside rows padded to the longest of the batch.

    `packing_over_sorted` is beside this engine's own padded rows, whose micro-batches hold similar lengths.
    """
    lengths = long_tail(size.sequences, 4 * size.tokens)
    batch, rounds = batch_of(size, lengths), max(3, size.rounds // 2)
    packed = engine_on(World(device=size.device), model, size)
    padded = take_turns(packed, Plain(model, size), batch, rounds)
    in_order = take_turns(
        packed, engine_on(World(device=size.device), model, size, packing=False), batch, rounds
    )
    return {
        "packing_speedup": padded.ratio,
        "packing_over_sorted": in_order.ratio,
        "mean_over_max_length": sum(lengths) / len(lengths) / max(lengths),
    }


def long_tail(number: int, longest: int) -> list[int]:
    """Return log-normal lengths with maximum `longest` and a mean of about a quarter of it, the same each time."""
    draws = torch.randn(number, generator=torch.Generator().manual_seed(0)).mul(1.0).exp()
    power = 1.0
    for _ in range(40):  # flatten or sharpen the tail until the mean is what is wanted
        share = float((draws / draws.max()).pow(power).mean())
        power *= 1.05 if share > 0.25 else 0.95
    return [max(4, int(longest * float(x))) for x in (draws / draws.max()).pow(power)]


def peaks(size: Size, model: str) -> dict[str, Any]:
    """Peaks of memory, each in a process of its own."""
    plain, chunked = _part("logprobs", "plain", size, model), _part("logprobs", "chunked", size, model)
    resident, offloaded = _part("offload", "off", size, model), _part("offload", "on", size, model)
    return {
        "logprob_peak_ratio": chunked["peak_mib"] / plain["peak_mib"],
        "logprob_peak_mib": {"plain": plain["peak_mib"], "chunked": chunked["peak_mib"]},
        "logprob_seconds": {"plain": plain["seconds"], "chunked": chunked["seconds"]},
        "offload_ok": resident["bits"] == offloaded["bits"],
        "peak_mib_resident": resident["peak_mib"],
        "peak_mib_offloaded": offloaded["peak_mib"],
        "idle_mib_resident": resident["idle_mib"],
        "idle_mib_offloaded": offloaded["idle_mib"],
    }


def _part(what: str, how: str, size: Size, model: str) -> dict[str, Any]:
    settings = json.dumps({name: getattr(size, name) for name in Size.__dataclass_fields__})
    command = [sys.executable, str(HERE / "engine_peaks.py"), what, how, model, settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"{what} ({how}) ended with code {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def load(size: Size, _model: str, engine: str = "fsdp2") -> dict[str, Any]:
    """Two ranks that load a model of 1.1 GB and export it: the worst peaks of host memory, mapped pages of files included."""
    with tempfile.TemporaryDirectory() as folder:
        return loading(Path(folder), engine, size.scale)


def checkpoint(size: Size, _model: str) -> dict[str, Any]:
    """Two ranks that save and load 1.5 GiB of training state: peaks of host memory, mapped pages of files included."""
    with tempfile.TemporaryDirectory() as folder:
        return checkpointing(Path(folder), size.scale)


def megatron(size: Size, model: str) -> dict[str, Any]:
    """Equal lengths, one rank: the Megatron engine beside a bare loop of megatron-core."""
    from engine_megatron import BareMegatron, megatron_on

    turns = take_turns(
        megatron_on(model, size),
        BareMegatron(model, size),
        batch_of(size, [size.tokens] * size.sequences),
        size.rounds,
    )
    return {
        "overhead_ratio": turns.ratio,
        "overhead_of_neighbours": turns.of_neighbours,
        "engine_tokens_per_s": turns.ours,
        "bare_tokens_per_s": turns.theirs,
    }


PARTS: dict[str, Callable[[Size, str], dict[str, Any]]] = {
    "overhead": overhead,
    "fsdp": sharded,
    "packing": packing,
    "peaks": peaks,
    "load": load,
    "checkpoint": checkpoint,
}

OF_MEGATRON: dict[str, Callable[[Size, str], dict[str, Any]]] = {
    "overhead": megatron,
    "load": partial(load, engine="megatron"),
}


def main() -> int:
    """Measure what was asked for and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--engine", choices=("fsdp2", "megatron"), default="fsdp2")
    parser.add_argument("--only", choices=sorted(PARTS), action="append", help="one part, may be repeated")
    parser.add_argument("--rounds", type=int, default=Size().rounds, help="pairs of steps that count")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of each side; one never waits for another")
    parser.add_argument(
        "--smallest", action="store_true", help="as little as runs every part: a check, no figures"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    size = Size(rounds=options.rounds, device=options.device)
    if options.smallest:
        size = replace(SMALLEST, device=options.device)
    answer: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", size)
        parts = PARTS if options.engine == "fsdp2" else OF_MEGATRON
        for name in options.only or parts:
            started = time.perf_counter()
            part = parts[name](size, model)
            print(f"{name}: {part} ({time.perf_counter() - started:.0f} s)", file=sys.stderr, flush=True)
            answer |= part
    answer["missed"] = [
        f"{key}: {answer[key]:.3f}, aim {word} {aim}"
        for key, (aim, word) in AIMS.items()
        if answer.get(key) is not None and (answer[key] < aim if word == "at least" else answer[key] > aim)
    ]
    answer["versions"] = {name: version(name) for name in ("torch", "transformers", "offbeat-engine")}
    answer["machine"] = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    if options.json:
        print(json.dumps({key: round(v, 4) if isinstance(v, float) else v for key, v in answer.items()}))
    else:
        print("\n".join(f"{key:22} {value}" for key, value in answer.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(guarded(main))
