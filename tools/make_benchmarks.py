"""Write docs/benchmarks.md from docs/figures: answers of `all.py`, of `algorithms.py` (algorithms/) and of `gpu.py` (gpu/).

Of each kind of machine (CPU and cores) the newest file counts. A figure that no file has is not on the page. Run without
arguments to write the page; with --check to fail where the committed one is not what would be written.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from statistics import mode as mode_of
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools" / "bench"))

from figures import PARTS, Figure, Part  # noqa: E402 -- the bench is a folder of scripts, not a package

HEAD = """# Benchmarks

Written by `tools/make_benchmarks.py` from [figures/](figures/), the answers of `tools/bench/all.py`; do not edit this page.

    uv run tools/bench/all.py --json > docs/figures/NAME.json    # about 40 minutes on a quiet machine
    python tools/make_benchmarks.py

A value is the median of its repeats; the noise is their range. An aim in bold was missed. Compare figures of one table only: machines
differ, and virtual ones change their speed by the hour. Ratios of two sides that take turns are the steadiest.
What a GPU did, `tools/bench/gpu.py` measured ([figures/gpu/](figures/gpu/)). [The benches' own page](../tools/bench/README.md) says how each measures, and names two more that take longer and whose result is a count: `chaos.py` and `soak.py`.
"""

LEARNED_HEAD = """## Algorithms

`uv run tools/bench/algorithms.py --out docs/figures/algorithms/NAME.json`: the accuracy on held-out sums that {steps} steps bring a warmed-up tiny model to, the median over seeds; of algorithms that learn from
pairs, the share of held-out pairs whose chosen completion is preferred. The mark is 0.9; what did not reach it with every seed is in bold.
"""

GPU_HEAD = """## One GPU

`python tools/bench/gpu.py > docs/figures/gpu/NAME.json`: training beside a plain PyTorch loop on the same batch in turns, and a weight sync between two processes. MFU counts
forward and backward of the model alone, of the bfloat16 peak. A commit stands with each part: parts of an older one were not measured since. What no file has was never measured: two GPUs
(NCCL), SGLang on a GPU, Transformer Engine, FlashAttention 3.
"""
# Parts of `gpu.py`, what each is, and the figures of it that are shown, with their units.
GPU_PARTS = {
    "train_1_5b": "FSDP2, 1.8 B parameters, micro-batches of 4,096 tokens",
    "train_1_5b_8k": "the same, 8,192 tokens",
    "train_1_5b_compiled": "the same, 4,096 tokens, `compile: true`",
    "train_7b": "FSDP2, adapters of rank 16 on about 7 B frozen parameters, activation checkpointing",
    "train_megatron": "Megatron without Transformer Engine, 1.1 B parameters, 4,096 tokens",
    "cuda_ipc": "CUDA IPC, 2 GiB from one process to another, compared by digest at the end",
}
GPU_FIGURES = {
    "mfu": "MFU",
    "mfu_plain": "MFU of the plain loop",
    "mfu_fsdp2": "MFU of FSDP2",
    "ratio": "of its tokens/s",
    "tokens_per_s": "tokens/s",
    "peak_gib": "GiB at most",
    "plain_peak_gib": "GiB of the plain loop",
    "max_logprob_difference": "largest difference of a log-prob from FSDP2's, both bfloat16",
    "loss_difference_relative": "relative difference of the loss",
    "seconds": "s a sync",
    "gb_per_s": "GB/s",
}


def newest(folder: Path) -> list[dict[str, Any]]:
    """Return the newest answer of each kind of machine; of one day the last by name."""
    kinds: dict[tuple[str, int], dict[str, Any]] = {}
    found = [(json.loads(path.read_text()), path.name) for path in folder.glob("*.json")]
    for answer, _ in sorted(found, key=lambda each: (each[0]["date"], each[1])):
        kinds[answer["machine"]["cpu"], answer["machine"]["cores"]] = answer
    return list(kinds.values())


def page(
    answers: list[dict[str, Any]],
    gpu_answers: list[dict[str, Any]],
    learned: list[dict[str, Any]],
) -> str:
    """Return the text of docs/benchmarks.md."""
    lines = [HEAD.rstrip()]
    for part in PARTS:
        tables = [table for answer in answers if (table := _table(part, answer))]
        if tables:
            lines += ["", f"## {part.title}", "", part.about, "", _command(part)]
            lines += [line for table in tables for line in ("", *table)]
    for answer in learned:
        lines += ["", *_learned_table(answer)]
    for answer in gpu_answers:
        lines += ["", *_gpu_table(answer)]
    if len(lines) == 1:
        lines += ["", "No figures have been committed yet."]
    return "\n".join(lines) + "\n"


def _command(part: Part) -> str:
    name, *arguments = part.command
    times = f", {part.repeats} times" if part.repeats > 1 else ""
    return f"`uv run tools/bench/{name}.py {' '.join(arguments)}`{times}"


def _table(part: Part, answer: dict[str, Any]) -> list[str]:
    rows = {row["name"]: row for row in answer["figures"] if row["part"] == part.name}
    shown = [(figure, rows[figure.name]) for figure in part.figures if figure.name in rows]
    if not shown:
        return []
    machine = answer["machine"]
    changed = ", with uncommitted changes" if answer["dirty"] else ""
    return [
        f"{answer['date']}, commit {answer['commit']}{changed}, {machine['cores']} cores of {machine['cpu']}, "
        f"load before {machine['load_before']:g}, torch {answer['versions']['torch']}:",
        "",
        "| figure | what it is | value | noise | repeats | aim |",
        "|---|---|---|---|---|---|",
        *(_row(figure, row) for figure, row in shown),
    ]


def newest_gpu(folder: Path) -> list[dict[str, Any]]:
    """Return the newest answer of each kind of GPU."""
    found = sorted(
        (json.loads(path.read_text()) for path in folder.glob("*.json")), key=lambda each: each["date"]
    )
    return list({answer["device"]: answer for answer in found}.values())


def _gpu_table(answer: dict[str, Any]) -> list[str]:
    versions = answer["versions"]
    rows: list[str] = []
    for name, about in GPU_PARTS.items():
        part = answer["parts"].get(name, {})
        shown = [f"{_number(part[key])} {unit}" for key, unit in GPU_FIGURES.items() if key in part]
        if shown:
            commit = part.get("commit", answer["commit"])
            rows.append(f"| `{name}` | {about} | {'; '.join(shown)} | {commit} |")
    return [
        GPU_HEAD,
        f"{answer['date']}, one {answer['device']}, torch {versions['torch']}, transformers {versions['transformers']}:",
        "",
        "| part | what it is | figures | commit |",
        "|---|---|---|---|",
        *rows,
    ]


def _learned_table(answer: dict[str, Any]) -> list[str]:
    """Return the accuracies of an answer of `algorithms.py`: the median over seeds, and the lowest where there are several."""
    machine, runs = answer["machine"], answer["runs"]
    modes = list(dict.fromkeys(run["mode"] for run in runs))
    rows: list[str] = []
    for name in sorted({run["algorithm"] for run in runs}):
        own = [run for run in runs if run["algorithm"] == name]
        cells = [
            _learned([run["after"] for run in own if run["mode"] == mode], answer["mark"]) for mode in modes
        ]
        told = " ".join(own[0]["settings"])
        later = f" at {own[0]['commit']}" if "commit" in own[0] else ""
        before = median(run["before"] for run in own)
        rows.append(
            f"| `{name}` | {before:.2f} | {' | '.join(cells)} | {f'`{told}`' if told else ''}{later} |"
        )
    return [
        LEARNED_HEAD.format(steps=mode_of(run["steps"] for run in runs)),
        f"{answer['date']}, commit {answer['commit']}{', with uncommitted changes' if answer['dirty'] else ''}, {machine['cores']} cores of "
        f"{machine['cpu']}, {len({run['seed'] for run in runs})} seed(s):",
        "",
        f"| algorithm | before | {' | '.join(modes)} | settings besides its defaults |",
        f"|---|---|{'---|' * len(modes)}---|",
        *rows,
        *([""] if answer["failed"] else []),
        *(f"Failed: {label}." for label in answer["failed"]),
    ]


def _learned(after: list[float], mark: float) -> str:
    if not after:
        return ""
    value = f"{median(after):.2f}" + (f" (lowest {min(after):.2f})" if len(after) > 1 else "")
    return value if min(after) >= mark else f"**{value}**"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _row(figure: Figure, row: dict[str, Any]) -> str:
    unit = f" {figure.unit}" if figure.unit else ""
    noise = "" if row["noise"] is None else f"{row['noise']:g}"
    aim = "" if figure.aim is None else f"{'at least' if figure.higher else 'at most'} {figure.aim:g}{unit}"
    aim = f"**{aim}**" if figure.misses(row["value"]) else aim
    count = len(row["repeats"])
    return f"| `{figure.name}` | {figure.about} | {row['value']:g}{unit} | {noise} | {count} | {aim} |"


def main() -> None:
    """Write the page, or with --check exit 1 where it is not current."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where the page is not current"
    )
    parser.add_argument("--figures", type=Path, default=ROOT / "docs" / "figures", help="the folder to read")
    parser.add_argument(
        "--page", type=Path, default=ROOT / "docs" / "benchmarks.md", help="the file to write or check"
    )
    options = parser.parse_args()
    text = page(
        newest(options.figures), newest_gpu(options.figures / "gpu"), newest(options.figures / "algorithms")
    )
    if not options.check:
        options.page.write_text(text)
        print(f"wrote {options.page}")
    elif not options.page.is_file() or options.page.read_text() != text:
        sys.exit(
            f"{options.page} is not what {options.figures} holds; run tools/make_benchmarks.py and commit it"
        )


if __name__ == "__main__":
    main()
