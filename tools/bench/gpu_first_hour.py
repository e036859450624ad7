"""What the first hour on a GPU must run, in order: cheapest and most telling first.

Each step is a command, what it proves, how many GPUs it needs and how long it may take. `tools/tests/test_gpu_bench.py` holds
the list against the suite's `gpu` markers and against what the sources and pages say was never run.
"""

from __future__ import annotations

from dataclasses import dataclass

_PYTEST = "python -m pytest -m gpu"
_ENGINE, _SYNC = "packages/engine", "packages/ckptsync"
_ROLLOUT, _TRAINER = "packages/rollout", "packages/trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command. `claims`: files that say of what it runs that it was never run; they are to be mended afterwards."""

    command: str
    proves: str
    minutes: int
    gpus: int = 1
    claims: tuple[str, ...] = ()


def _tests(*paths: str, only: str = "", deep: bool = False) -> str:
    chosen = f' -k "{only}"' if only else ""
    return f"{_PYTEST}{' --deep' if deep else ''} {' '.join(paths)}{chosen}"


STEPS = (
    Step(
        command=_tests(
            f"{_ENGINE}/tests/test_parallel_gpu.py",
            f"{_ENGINE}/tests/test_varlen.py",
            only="kernels_of_a_gpu or keys_that_many_share",
        ),
        proves="varlen attention: torch's kernel, forward and backward, is the plain one, with windows and shared prefixes",
        minutes=2,
    ),
    Step(
        command=_tests(f"{_ENGINE}/tests/test_conformance.py", only="OneGpu"),
        proves="FSDP2 on one GPU passes the conformance suite",
        minutes=4,
    ),
    Step(
        command=_tests(
            f"{_ENGINE}/tests/test_offload.py",
            f"{_ENGINE}/tests/test_activations.py",
            f"{_ENGINE}/tests/test_checkpoint_clusters.py",
            f"{_ENGINE}/tests/test_checkpoint_trust.py",
        ),
        proves="offload of weights, moments and activations gives memory back and the same numbers; checkpoints of a GPU",
        minutes=3,
    ),
    Step(
        command="python tools/bench/gpu.py --only train_1_5b,train_1_5b_8k,train_1_5b_compiled,train_7b --limit 290",
        proves="MFU at 1.5B and, with LoRA and recomputation, at 7B; what the plan says of memory",
        minutes=5,
    ),
    Step(
        command=_tests(f"{_SYNC}/tests/member/test_digest.py", f"{_SYNC}/tests/test_pinned.py"),
        proves="sum64's Triton kernel gives the plain digest; host memory is pinned, and copies of it are right",
        minutes=1,
    ),
    Step(
        command=_tests(
            f"{_SYNC}/tests/transports/test_contract.py",
            f"{_SYNC}/tests/faults/test_matrix.py",
            only="cuda_ipc",
        ),
        proves="CUDA IPC between processes: the contract of transports, then every fault of the matrix",
        minutes=4,
    ),
    Step(
        command="python tools/bench/gpu.py --only cuda_ipc,grpo --limit 110",
        proves="2 GiB a sync by CUDA IPC, every element compared; three GRPO steps in bfloat16 on one GPU",
        minutes=2,
    ),
    Step(
        command=_tests(f"{_ROLLOUT}/tests/testing/test_contract.py", only="cuda"),
        proves="the Transformers adapter on a GPU keeps the contract of samplers",
        minutes=2,
    ),
    Step(
        command="offbeat-train device=cuda rollout=vllm cluster.placement=colocated engine.num_ranks=1 "
        "rollout.num_replicas=1 sync=auto trainer.steps=5",
        proves="vLLM sleeps and wakes around each step, and takes weights on the GPU that it shares; log-probs agree",
        minutes=4,
        claims=("docs/asynchrony.md",),
    ),
    Step(
        command=_tests(
            f"{_SYNC}/tests/adapters/sglang/test_proof.py", f"{_ROLLOUT}/tests/sglang/test_families.py"
        ),
        proves="SGLang's own launcher on a GPU; its hash is ours; overlap names every token by its own version",
        minutes=5,
        claims=(f"{_ROLLOUT}/src/offbeat_rollout/sglang/engine.py", "docs/asynchrony.md"),
    ),
    Step(
        command=_tests(f"{_SYNC}/tests/adapters/sglang/test_tensors.py"),
        proves="tensors reach an SGLang server by CUDA IPC handles",
        minutes=2,
        claims=(
            f"{_SYNC}/src/offbeat_ckptsync/adapters/sglang/group.py",
            f"{_SYNC}/src/offbeat_ckptsync/adapters/sglang/__init__.py",
            f"{_SYNC}/README.md",
        ),
    ),
    Step(
        command=_tests(
            f"{_ENGINE}/tests/megatron/test_megatron_gpu.py", only="OneGpu or bfloat16_strays or eight_bits"
        ),
        proves="Megatron on one GPU: the suite, bfloat16 beside FSDP2, Transformer Engine's layers and THD attention, "
        "fp8 (e4m3 and hybrid) where the GPU has it",
        minutes=7,
        claims=(
            f"{_ENGINE}/src/offbeat_engine/megatron/config.py",
            f"{_ENGINE}/src/offbeat_engine/megatron/config.py",
            f"{_ENGINE}/src/offbeat_engine/megatron/layers/transformer_engine.py",
            f"{_ENGINE}/README.md",
        ),
    ),
    Step(
        command="python tools/bench/gpu.py --only train_megatron --limit 80",
        proves="Megatron beside FSDP2 on the same weights: log-probs, loss, MFU",
        minutes=2,
    ),
    Step(
        command=_tests(
            f"{_SYNC}/tests/transports/test_group.py",
            f"{_SYNC}/tests/transports/test_contract.py",
            f"{_SYNC}/tests/faults/test_lost_peer.py",
            only="nccl",
        ),
        proves="NCCL: broadcast, and that neither an abort nor a lost peer ends a process or spoils memory",
        minutes=4,
        gpus=2,
        claims=("README.md", "docs/how-to.md"),
    ),
    Step(
        command=_tests(f"{_ENGINE}/tests/test_parallel_gpu.py", only="two_gpus"),
        proves="FSDP2 and Ulysses over NCCL on two GPUs are one CPU, offloaded too",
        minutes=2,
        gpus=2,
    ),
    Step(
        command=_tests(f"{_ENGINE}/tests/megatron/test_megatron_gpu.py", only="two_gpus"),
        proves="tensor and context parallelism over NCCL, with Transformer Engine and without",
        minutes=3,
        gpus=2,
    ),
    Step(
        command=_tests(f"{_TRAINER}/tests/test_sglang_sync.py"),
        proves="a source sends to an SGLang server over NCCL, of one rank and of two",
        minutes=4,
        gpus=3,
        claims=(
            f"{_SYNC}/src/offbeat_ckptsync/adapters/sglang/group.py",
            f"{_TRAINER}/src/offbeat_trainer/cluster/weights.py",
        ),
    ),
    Step(
        command=_tests(f"{_SYNC}/tests/faults/test_matrix.py", only="nccl"),
        proves="every fault of the matrix over NCCL",
        minutes=4,
        gpus=3,
    ),
)


def printed() -> str:
    """Return the list as it is printed: in order, with the minutes that have gone by."""
    gone = 0
    lines: list[str] = []
    for number, step in enumerate(STEPS, 1):
        needs = f"{step.gpus} GPU{'s' if step.gpus > 1 else ''}"
        lines += [
            f"{number:2}. at most {step.minutes} min, {needs} (after {gone} min): {step.proves}",
            f"    {step.command}",
        ]
        lines += [f"    then mend: {', '.join(step.claims)}"] if step.claims else []
        gone += step.minutes
    return "\n".join([*lines, f"In all at most {gone} minutes."])
