"""Every published figure, in one table: which command measures it, where it is in the answer, and what is aimed at.

`all.py` measures them, `tools/make_benchmarks.py` writes docs/benchmarks.md from what it measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number in the JSON of a bench; where it is a list, its items are the repeats.

    `higher` says which direction is better. A figure without an aim is shown and compared, and has nothing to miss.
    """

    name: str
    path: tuple[str, ...]
    unit: str
    about: str
    higher: bool = False
    aim: float | None = None

    def misses(self, value: float) -> bool:
        """Say whether `value` is on the wrong side of the aim."""
        return self.aim is not None and (value < self.aim if self.higher else value > self.aim)

    def has(self, answer: dict[str, Any]) -> bool:
        """Say whether a run of the bench found it."""
        try:
            return bool(self.values(answer))
        except KeyError:
            return False

    def values(self, answer: dict[str, Any]) -> list[float]:
        """Return what a run of the bench found; raises `KeyError` with the path where there is nothing."""
        found: Any = answer
        for key in self.path:
            found = cast("dict[str, Any]", found).get(key) if isinstance(found, dict) else None
        if found is None:
            raise KeyError("/".join(self.path))
        return [float(value) for value in (cast("list[Any]", found) if isinstance(found, list) else [found])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One command, how often it runs, and what it measures. `smallest` are its arguments for a check of every path."""

    name: str
    title: str
    about: str
    command: tuple[str, ...]
    figures: tuple[Figure, ...]
    smallest: tuple[str, ...] = ("--smallest",)
    repeats: int = 1
    limit_s: float = 1500.0


def _step(model: str, aim: float) -> tuple[Figure, ...]:
    return (
        Figure(
            name=f"{model}_ratio", path=(model, "ratio"), unit="", aim=aim,
            about=f"{model} model: the faster of our adapters over TRL",
        ),
        *(
            Figure(name=f"{model}_{side}_s", path=(model, f"{side}_s"), unit="s", about=f"{model} model: {who}")
            for side, who in (("vllm", "Offbeat with vLLM"), ("hf", "Offbeat with Transformers"), ("trl", "TRL"))
        ),
    )  # fmt: skip


def _sync(name: str, about: str, *, higher: bool = False, aim: float | None = None) -> tuple[Figure, ...]:
    return tuple(
        Figure(
            name=f"{name}_{tensors}", path=("figures", name, f"{tensors} tensors"), unit="",
            about=f"{about}; {tensors} tensors", higher=higher, aim=aim,
        )
        for tensors in (24, 400)
    )  # fmt: skip


PARTS = (
    Part(
        name="first_step",
        title="The first step",
        about="From the start of `offbeat train task=arithmetic` (no supervised warm-up) to the first line of "
        "metrics.jsonl, on a warm machine: processes start, the model is made and validated, one step is made.",
        command=("first_step", "--json"),
        figures=(
            Figure(name="vllm_first_step_s", path=("runs", "vllm"), unit="s", aim=20.0, about="with vLLM"),
            Figure(name="hf_first_step_s", path=("runs", "hf"), unit="s", aim=8.0, about="with Transformers"),
        ),
    ),
    Part(
        name="step",
        title="One GRPO step beside TRL",
        about="256 completions of 32 tokens in float32, through `offbeat train` and through TRL's `GRPOTrainer` in an "
        "environment of its own: same model folder, prompts, reward and optimizer. `small` has 0.3 M parameters, "
        "`medium` 8.8 M.",
        command=("step", "--json", "--steps", "5"),
        smallest=("--smallest", "--adapters", "hf", "--no-trl"),
        repeats=REPEATS,
        figures=(*_step("small", 0.8), *_step("medium", 0.6)),
    ),
    Part(
        name="engine",
        title="The training engine beside plain loops",
        about="Two sides take turns on the same batch in one process, float32, 8.8 M parameters, one thread each; a figure "
        "is the ratio of their median speeds.",
        command=("engine", "--json", "--rounds", "3", "--only", "overhead", "--only", "fsdp", "--only", "packing"),
        repeats=REPEATS,
        figures=(
            Figure(
                name="overhead_ratio", path=("overhead_ratio",), unit="", higher=True, aim=0.95,
                about="the engine over a plain PyTorch loop, one rank",
            ),
            Figure(
                name="fsdp_ratio", path=("fsdp_ratio",), unit="", higher=True, aim=0.95,
                about="two ranks over a bare `fully_shard` loop",
            ),
            Figure(
                name="packing_speedup", path=("packing_speedup",), unit="", higher=True, aim=2.5,
                about="packed rows over rows padded to the longest of the batch",
            ),
            Figure(
                name="packing_over_sorted", path=("packing_over_sorted",), unit="", higher=True,
                about="packed rows over this engine's padded rows in sorted micro-batches",
            ),
        ),
    ),
    Part(
        name="engine_memory",
        title="The training engine's memory",
        about="Peaks of resident memory, each in a process of its own. `load` and `export`: two ranks, 0.57 B parameters from "
        "1.1 GB of bfloat16 files; `save` and `resume`: two ranks, 1.5 GiB of training state. Each is over what the rank "
        "must hold: its shard and the largest tensor.",
        command=("engine", "--json", "--only", "peaks", "--only", "load", "--only", "checkpoint"),
        figures=tuple(
            Figure(name=name, path=(name,), unit="", aim=aim, about=about)
            for name, aim, about in (
                ("logprob_peak_ratio", 0.4, "chunked log-probabilities over whole logits, 32 k words"),
                ("load_peak_ratio", 1.5, "loading a model"),
                ("engine_export_peak_ratio", 1.5, "handing out every weight to rank 0"),
                ("save_peak_ratio", 1.5, "saving a checkpoint"),
                ("resume_peak_ratio", 1.5, "loading a checkpoint"),
            )
        ),
    ),
    Part(
        name="megatron",
        title="The Megatron engine",
        about="In turns with a bare loop of megatron-core: its model, schedule, wrapper and optimizer, one rank.",
        command=("engine", "--json", "--engine", "megatron", "--only", "overhead"),
        figures=(
            Figure(
                name="megatron_overhead_ratio", path=("overhead_ratio",), unit="", higher=True, aim=0.95,
                about="the engine over the bare loop",
            ),
        ),
    ),
    Part(
        name="sync",
        title="Weight sync beside what the machine can do",
        about="1 GiB from one process to another, every element changed between syncs, verification on, as 24 tensors of up "
        "to 88 MiB and as 400. The limits (one thread of memcpy, plain gloo) are measured in the same run.",
        command=("sync", "--json", "--syncs", "3", "--only", "shm,shm_adopted,broadcast,bound"),
        repeats=REPEATS,
        figures=(
            *_sync("shm_over_memcpy", "`shm` over torch's memcpy", higher=True, aim=0.5),
            *_sync("shm_four_over_one", "`shm`: seconds with four receivers over those with one", aim=2.2),
            *_sync("verify_share", "`shm`: share of the time that verification adds", aim=0.25),
            *_sync("shm_adopted_over_memcpy", "`shm` served from where it was staged, over memcpy", higher=True),
            *_sync("broadcast_over_gloo", "`broadcast` over raw gloo", higher=True, aim=0.75),
            Figure(
                name="bound_verify_share", path=("figures", "bound_verify_share"), unit="",
                about="verification's share in two processes that copy, digest and compare, and do nothing else",
            ),
        ),
    ),
    Part(
        name="sync_vllm",
        title="Weight sync into vLLM",
        about="97 MB in 362 tensors into vLLM with eight requests in flight, beside vLLM's own update cycle over gloo; and "
        "the demo's model into an idle vLLM.",
        command=("sync", "--json", "--mib", "64", "--only", "vllm,small"),
        figures=(
            Figure(
                name="vllm_pause_over_native", path=("figures", "vllm_pause_over_native"), unit="", aim=0.3,
                about="how long generation stands still, over vLLM's own",
            ),
            Figure(
                name="product_over_plain", path=("figures", "product_over_plain"), unit="", aim=1.1,
                about="a whole update, over vLLM's own",
            ),
            Figure(
                name="small_sync_ms", path=("figures", "small_sync_ms"), unit="ms", aim=40.0,
                about="a sync of the demo's model",
            ),
        ),
    ),
    Part(
        name="sync_chaos",
        title="Senders and receivers killed during syncs",
        about="SIGKILL at random bytes of a sync over `shm` and `broadcast`, sender and receiver in turn, 20 kills.",
        command=("sync_chaos", "--json", "--kills", "20", "--carrier", "sockets"),
        smallest=("--kills", "2", "--transport", "shm"),
        figures=tuple(
            Figure(name=name, path=(name,), unit="", aim=0.0, about=about)
            for name, about in (
                ("lost", "receivers, but for the killed, that died or lost their traffic"),
                ("corrupt", "receivers that served bits of no version, or of another than their label"),
                ("stuck", "syncs that did not end, or good ones that did not reach everybody"),
            )
        ),
    ),
    *(
        Part(
            name=f"rollout_{name}",
            title=f"The {title} adapter",
            about=f"The same 64 requests of 64 tokens through the adapter and {beside}, in turns; 8.8 M parameters, float32.",
            command=("rollout", "--json", "--requests", "64", "--pairs", "5", "--only", name),
            smallest=("--requests", "2", "--tokens", "4", "--pairs", "1"),
            figures=(
                Figure(
                    name=f"{name}_over_bare", path=("engines", name, "ratios"), unit="", higher=True, aim=0.9,
                    about="tokens per second, adapter over bare",
                ),
                Figure(
                    name=f"{name}_tokens_per_s", path=("engines", name, "adapter_tokens_per_s"), unit="tokens/s",
                    higher=True, about="of the adapter",
                ),
            ),
        )
        for name, title, beside in (
            ("vllm", "vLLM", "an `AsyncLLM` of its own"),
            ("sglang", "SGLang", "a plain HTTP client of its server"),
        )
    ),
    Part(
        name="paced",
        title="Overlap of generation and training",
        about="Real training beside a generator with log-normal lengths that takes no CPU: the share of time in which the busier "
        "of the two is at work.",
        command=("modes", "--json", "--only", "paced", "--paced-steps", "60"),
        figures=(
            Figure(
                name="utilisation", path=("utilisation",), unit="", higher=True, aim=0.98, about="fully asynchronous"
            ),
            Figure(
                name="one_step_off_utilisation", path=("one_step_off_utilisation",), unit="", higher=True,
                about="one step off",
            ),
            Figure(
                name="journal_share", path=("journal_share",), unit="", aim=0.02,
                about="share of a step that writing the journal takes",
            ),
        ),
    ),
    Part(
        name="driver",
        title="The driver alone",
        about="The real loop, gate, buffer and journal with everything heavy taken away: 10,000 groups of eight short "
        "completions in flight, and completions of 8,192 tokens.",
        command=("modes", "--json", "--only", "driver", "--driver-steps", "60"),
        figures=(
            Figure(
                name="driver_us_per_sample", path=("driver_us_per_sample",), unit="us",
                about="CPU per completion of about 8 tokens",
            ),
            Figure(
                name="driver_us_per_token", path=("driver_us_per_token",), unit="us", aim=0.3,
                about="CPU per token of long completions",
            ),
            Figure(
                name="ready_to_consumed_p99_ms", path=("ready_to_consumed_p99_ms",), unit="ms", aim=8.0,
                about="from a step having its groups to its beginning, 99th percentile",
            ),
        ),
    ),
    Part(
        name="episodes",
        title="Episodes of ten turns",
        about="500 at a time against replicas without a model: through the endpoint of a harness, whose clients are another process, "
        "and with an environment in processes of its own.",
        command=("episodes", "--json", "--episodes", "4000"),
        figures=tuple(
            Figure(name=f"{way}_{name}", path=(way, key), unit=unit, aim=aim, about=f"{way}: {about}")
            for way in ("harness", "environment")
            for name, key, unit, aim, about in (
                ("cpu_cores", "cpu_share", "cores", 0.5, "processor of the driver, where a turn takes a replica 2 s"),
                ("mib_per_10k_episodes", "mib_per_10k_episodes", "MiB", None, "growth of the driver's memory"),
                ("read_per_turn", "read_per_turn", "tokens", None, "what a replica has not of a turn's prompt"),
                ("read_last_over_first", "read_last_over_first", "", 1.0, "of the last turn, over the second"),
            )
        ),
    ),
    Part(
        name="rewards",
        title="Rewards",
        about="The rewards of a step of 256 completions, 100 ms each, with the default settings.",
        command=("modes", "--json", "--only", "rewards"),
        figures=tuple(
            Figure(name=f"reward_{name}_s", path=(f"{name}_s",), unit="s", aim=aim, about=about)
            for name, aim, about in (
                ("sleep", 1.0, "a function that sleeps"),
                ("async", 1.0, "a coroutine that waits"),
                ("cpu", None, "a function that computes: 25.6 s of CPU"),
            )
        ),
    ),
    Part(
        name="modes",
        title="The three modes through the command",
        about="vLLM and training of the 8.8 M model in two pools, half of the cores each; only `mode` differs. One token in 48 "
        "ends its completion, at most 192 tokens.",
        command=("modes", "--json", "--only", "real", "--steps", "8", "--layouts", "pools"),
        smallest=("--smallest", "--rollout", "hf"),
        figures=(
            Figure(
                name="async_over_sync", path=("async_over_sync",), unit="", higher=True, aim=1.3,
                about="tokens per second, fully asynchronous over synchronous",
            ),
            Figure(
                name="one_step_off_over_sync", path=("one_step_off_over_sync",), unit="", higher=True,
                about="tokens per second, one step off over synchronous",
            ),
            *(
                Figure(
                    name=f"{mode}_tokens_per_s", path=("tokens_per_s", mode), unit="tokens/s", higher=True, about=mode
                )
                for mode in ("sync", "one_step_off", "fully_async")
            ),
        ),
    ),
)  # fmt: skip
