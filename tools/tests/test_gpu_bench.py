"""`tools/bench/gpu.py` where there is no GPU: its arithmetic, its schedule, and each of its parts on a CPU and a tiny model."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"
sys.path.insert(0, str(BENCH))

import gpu  # noqa: E402 a script beside others, not a package
import gpu_first_hour  # noqa: E402
import gpu_parts  # noqa: E402
from engine_loops import Size  # noqa: E402

from offbeat_engine.toolkit.step.throughput import ModelCost  # noqa: E402
from offbeat_recipes.cli._hydra import compose_run  # noqa: E402

TINY = Size(hidden=48, layers=2, intermediate=64, heads=4, vocab=64, micro_batch_tokens=1024, rounds=1)
HALF = replace(TINY, dtype="bfloat16")


def test_operations_per_token_are_those_of_the_engine():
    cost = ModelCost(num_params=1000, num_trained=1000, num_layers=3, attention_width=8)
    assert gpu_parts.flops_per_token(cost, 10) == 6 * 1000 + 12 * 3 * 8 * 10 / 2
    assert gpu_parts.flops_per_token(replace(cost, num_trained=0), 10) == 4 * 1000 + 12 * 3 * 8 * 10 / 2


def test_the_shapes_are_of_the_sizes_they_are_named_for():
    for size, low, high in ((gpu_parts.SMALL, 1.5e9, 1.8e9), (gpu_parts.LARGE, 7.0e9, 7.7e9)):
        cost = gpu_parts.cost_on_meta(size)
        assert low < cost.num_params + size.vocab * size.hidden < high
        assert cost.num_trained == cost.num_params
        assert (cost.num_layers, cost.attention_width) == (size.layers, size.hidden)


def test_all_budgets_together_are_more_than_the_limit_by_little_and_every_part_is_known():
    """What takes less than its budget leaves time to the others."""
    assert gpu.LIMIT_S < sum(part.budget_s for part in gpu.PARTS) < 1.3 * gpu.LIMIT_S
    assert gpu.LIMIT_S < 9 * 60
    measured = {part.name for part in gpu.PARTS if not part.tests}
    assert measured == gpu_parts.PARTS.keys()


def test_a_part_is_skipped_with_the_reason():
    part = gpu.Part(name="x", budget_s=50.0, needs=("torch", "no_such_module"))
    assert gpu.reason_to_skip(part, 50.0, None) == "no GPU here"
    assert gpu.reason_to_skip(part, 50.0, "H100") == "not installed: no_such_module"
    part = replace(part, needs=("torch",))
    assert "3 s are left" in gpu.reason_to_skip(part, 3.0, "H100")
    assert gpu.reason_to_skip(part, 50.0, "H100") is None


def test_outcomes_are_counted_also_of_a_run_that_was_cut_short():
    output = (
        "a/test_b.py::test_c PASSED   [ 10%]\n"
        "a/test_b.py::test_d[x y] FAILED\n"
        "a/test_b.py::test_e SKIPPED (needs 2 GPUs)\n"
        "a/test_b.py::test_f ERROR\n"
        "a/test_b.py::test_g "
    )
    counts, failed = gpu.outcomes(output)
    assert counts == {"passed": 1, "failed": 1, "skipped": 1, "error": 1}
    assert failed == ["a/test_b.py::test_d[x y]", "a/test_b.py::test_f"]


def test_figures_that_json_cannot_say_are_null():
    assert gpu.rounded({"a": [1.23456789, float("nan")], "b": "c", "d": 7}) == {
        "a": [1.2346, None],
        "b": "c",
        "d": 7,
    }


def test_a_process_that_takes_too_long_is_ended_and_one_that_fails_says_why():
    # A shell, which is there at once: Python alone may take seconds to start on a busy machine.
    output, failure = gpu._run(["sh", "-c", "echo so far; exec sleep 600"], 8.0)
    assert output == "so far\n"
    assert failure == "took longer than 8 s"
    _, failure = gpu._run([sys.executable, "-c", "print('why'); raise SystemExit(3)"], 60.0)
    assert failure == "ended with code 3: why"


def test_without_a_gpu_one_json_object_says_so():
    without = {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(BENCH / "gpu.py")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=without,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    answer = json.loads(line)
    assert answer["device"] is None
    assert answer["parts"] == answer["failed"] == {}
    assert set(answer["skipped"].values()) == {"no GPU here"}
    assert answer["versions"]["torch"]


@pytest.mark.deep
def test_tests_marked_gpu_are_found_with_settings_of_its_own():
    """Collected in a process that sees this checkout's sources, as on a machine that has nothing of it installed."""
    part = gpu.Part(name="x", budget_s=240.0, tests="rollout")
    found, failure = gpu.run_tests(part, part.budget_s)
    assert found["skipped"] >= 1, failure  # no GPU here
    assert "failed_tests" not in found


@pytest.mark.slow
def test_the_training_parts_run():
    for size, settings in ((TINY, {}), (HALF, {"micro_batches": 1})):
        small = gpu_parts.train_small(size, **settings)
        assert small["parameters"] > 0
        assert small["ratio"] > 0
        assert small["mfu"] is None  # the peak of a CPU is not known
    large = gpu_parts.train_large(HALF)
    assert large["tokens_per_s"] > 0
    assert large["parameters"] == small["parameters"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # megatron-core's, of itself and of torch
def test_the_engines_are_trained_in_turns_on_the_same_weights():
    for size, largest in ((TINY, 1e-4), (HALF, 0.05)):
        found = gpu_parts.train_megatron(size)
        assert found["loss"] > 3.0  # about the logarithm of the vocabulary
        assert found["max_logprob_difference"] < largest
        assert found["loss_difference_relative"] < largest
        assert found["ratio"] > 0
        assert found["parameters"] > 0
        assert (found["mfu"], found["mfu_fsdp2"], found["transformer_engine"]) == (None, None, False)


@pytest.mark.slow
def test_a_sync_and_a_run_of_grpo_answer_with_figures():
    synced = gpu_parts.sync_cuda_ipc(1 << 20, 16, "cpu")
    assert synced["num_bytes"] >= 1 << 20
    assert synced["gb_per_s"] > 0
    answer = gpu_parts.grpo(TINY, steps=2)
    assert answer["metrics"]["step"] == 2
    assert answer["metrics"]["mismatch/max_abs_logprob_diff"] < 1e-4


ROOT = BENCH.parents[1]
UNRUN = re.compile(r"[Nn]ever run\b|[Nn]obody has run")
ELSEWHERE = {"docs/cluster.md"}  # several machines: no GPU alone shows that


def _paths(step):
    return [word for word in shlex.split(step.command) if word.endswith(".py") and "/tests/" in word]


def _chooses(step, test):
    """Say whether the step's command runs `test`, an id of pytest's; its `-k` joins words by "or"."""
    words = shlex.split(step.command)
    chosen = words[words.index("-k") + 1].split(" or ") if "-k" in words else [""]
    path, _, name = test.partition("::")
    return path in words and any(word in f"{Path(path).name}::{name}" for word in chosen)


@pytest.mark.slow
def test_the_first_hour_runs_every_test_that_is_marked_gpu():
    """A new marker without a step, and a step whose tests are gone, fail here."""
    sources = [*ROOT.glob("packages/*/tests/**/test_*.py")]
    marked = [str(path.relative_to(ROOT)) for path in sources if "mark.gpu(" in path.read_text()]
    assert len(marked) > 10
    listed = [sys.executable, "-m", "pytest", "-m", "gpu", "--deep", "--collect-only", "-q", *marked]
    output = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True).stdout
    tests = [line for line in output.splitlines() if "::" in line]
    assert {test.partition("::")[0] for test in tests} == {*marked}
    steps = [step for step in gpu_first_hour.STEPS if _paths(step)]
    assert [test for test in tests if not any(_chooses(step, test) for step in steps)] == []
    assert [step.command for step in steps if not any(_chooses(step, test) for test in tests)] == []
    for step in steps:
        assert {*_paths(step)} <= {test.partition("::")[0] for test in tests if _chooses(step, test)}


def test_the_first_hour_runs_all_that_pages_call_never_run_and_every_part():
    pages = [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("packages/*/README.md")]
    pages += [*ROOT.glob("docs/*.md"), ROOT / "README.md"]
    unrun = {str(path.relative_to(ROOT)) for path in pages if UNRUN.search(path.read_text())}
    assert unrun - ELSEWHERE == {claim for step in gpu_first_hour.STEPS for claim in step.claims}
    commands = " ".join(step.command for step in gpu_first_hour.STEPS)
    for part in gpu.PARTS:
        assert part.tests or part.name in commands


def test_the_first_hour_is_one_and_its_runs_compose(capsys):
    assert sum(step.minutes for step in gpu_first_hour.STEPS) <= 60
    assert [step.gpus for step in gpu_first_hour.STEPS] == sorted(step.gpus for step in gpu_first_hour.STEPS)
    runs = [
        step.command.split()[1:] for step in gpu_first_hour.STEPS if step.command.startswith("offbeat-train")
    ]
    assert runs
    for settings in runs:
        assert compose_run(settings).rollout is not None
    assert gpu.main(["--list"]) == 0
    told = capsys.readouterr().out
    assert all(step.command in told and step.proves in told for step in gpu_first_hour.STEPS)
