"""`tools/bench/all.py` and docs/benchmarks.md: one table of figures, measured, compared and written."""

from __future__ import annotations

import importlib
import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "tools" / "bench"


@pytest.fixture
def every(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    spec = importlib.util.spec_from_file_location("bench_all", BENCH / "all.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def make_page(monkeypatch):
    def make_page(*arguments):
        tool = str(ROOT / "tools" / "make_benchmarks.py")
        monkeypatch.setattr(sys, "argv", [tool, *map(str, arguments)])
        runpy.run_path(tool, run_name="__main__")

    return make_page


def row(name, value, noise, better="lower"):
    return {"name": name, "value": value, "noise": noise, "better": better}


def answer(every, date, cpu, value):
    (part,) = (part for part in every.PARTS if part.name == "driver")
    rows = every.rows([part], {"driver_us_per_token": [value, value + 0.1, value + 0.2]})
    return {
        **every.about(), "date": date, "dirty": False, "figures": rows,
        "machine": {"cpu": cpu, "cores": 2, "load_before": 0.1},
    }  # fmt: skip


def test_names_of_figures_and_parts_are_unique(every):
    names = [figure.name for part in every.PARTS for figure in part.figures]
    assert len(names) == len(set(names)) > 30
    assert len({part.name for part in every.PARTS}) == len(every.PARTS)
    assert all((BENCH / f"{part.command[0]}.py").is_file() for part in every.PARTS)


def test_worse_is_what_loses_more_than_the_noise_of_both(every):
    before = [row("a", 10.0, 1.0), row("b", 10.0, None), row("c", 1.0, 0.01, "higher"), row("gone", 1.0, 0.1)]
    now = [row("a", 10.9, 0.2), row("b", 10.9, 0.1), row("c", 0.985, 0.01, "higher"), row("new", 5.0, 0.1)]
    assert every.worse(now, before) == []
    now = [row("a", 11.1, 0.2), row("b", 11.1, None), row("c", 0.97, 0.01, "higher")]
    assert [line.split(":")[0] for line in every.worse(now, before)] == ["a", "c"]
    assert every.worse([row("a", 11.1, 1.2)], before) == []
    assert every.worse([row("b", 11.3, 0.1)], before) == ["b: 10 before, 11.3 now, noise 1"]


@pytest.mark.parametrize(("limit_s", "calls"), [(-1.0, 1), (3600.0, 3)])
def test_every_part_runs_once_and_is_repeated_as_long_as_there_is_time(
    every, tmp_path, monkeypatch, limit_s, calls
):
    (part,) = (part for part in every.PARTS if part.name == "step")
    seen = []
    monkeypatch.setattr(
        every, "run", lambda _part, number, *_, **__: seen.append(number) or {"small_ratio": [1.0]}
    )
    values, failed = every.measure([part], tmp_path, smallest=False, limit_s=limit_s)
    assert (seen, values, failed) == ([*range(calls)], {"small_ratio": [1.0] * calls}, {})


@pytest.mark.spawns
@pytest.mark.timeout(1200)
@pytest.mark.deep
def test_a_part_that_fails_is_named_and_does_not_end_the_others(tmp_path):
    """In a copy of the benches one of whose modules lacks what another asks for."""
    copy = tmp_path / "bench"
    shutil.copytree(BENCH, copy, ignore=shutil.ignore_patterns("__pycache__"))
    file = copy / "modes_driver.py"
    file.write_text(file.read_text().replace("def many(", "def few("))
    before = tmp_path / "before.json"
    before.write_text(
        json.dumps({"figures": [row("reward_sleep_s", 1e-6, 1e-6), row("reward_cpu_s", 1e6, 1.0)]})
    )
    done = subprocess.run(
        [sys.executable, str(copy / "all.py"), "--json", "--smallest", "--only", "driver,rewards", "--compare", str(before)],
        capture_output=True, text=True, timeout=1100, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert found["failed"].keys() == {"driver"}
    assert "many" in found["failed"]["driver"]
    assert [each["name"] for each in found["figures"]] == ["reward_sleep_s", "reward_async_s", "reward_cpu_s"]
    assert [line.split(":")[0] for line in found["worse"]] == ["reward_sleep_s"]
    assert found.keys() >= {"date", "commit", "dirty", "machine", "versions", "seconds"}


def test_the_committed_page_is_what_the_files_hold(make_page):
    make_page("--check")


def test_a_page_that_says_something_else_is_red(make_page, every, tmp_path):
    page, folder = tmp_path / "benchmarks.md", tmp_path / "figures"
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps(answer(every, "2026-01-02", "A", 0.05)))
    make_page("--figures", folder, "--page", page)
    make_page("--check", "--figures", folder, "--page", page)
    page.write_text(page.read_text().replace("0.15 us", "0.05 us"))
    with pytest.raises(SystemExit, match=r"run tools/make_benchmarks\.py"):
        make_page("--check", "--figures", folder, "--page", page)


def test_the_newest_file_of_each_machine_counts_and_what_none_has_is_not_there(make_page, every, tmp_path):
    for name, date, cpu, value in (
        ("a", "2026-01-03", "Xeon", 0.3), ("b", "2026-01-02", "Xeon", 0.7), ("c", "2026-01-01", "EPYC", 0.05)
    ):  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps(answer(every, date, cpu, value)))
    page = tmp_path / "page.md"
    make_page("--figures", tmp_path, "--page", page)
    text = page.read_text()
    assert "2026-01-03, commit " in text
    assert "2026-01-02" not in text
    assert "| 0.4 us | 0.2 | 3 | **at most 0.3 us** |" in text
    assert "| 0.15 us | 0.2 | 3 | at most 0.3 us |" in text
    assert "## The driver alone" in text
    assert "## Rewards" not in text


def test_of_each_gpu_the_newest_file_counts_and_each_part_says_its_commit(make_page, tmp_path):
    (tmp_path / "gpu").mkdir()
    for date, mfu in (("2026-01-02", 0.25), ("2026-01-01", 0.5)):
        parts = {
            "train_1_5b": {"mfu": mfu, "tokens_per_s": 12345.6},
            "cuda_ipc": {"gb_per_s": 37.0, "commit": "older"},
        }
        found = {
            "date": date,
            "commit": "newer",
            "device": "H200",
            "versions": {"torch": "2.11.0", "transformers": "5"},
            "parts": parts,
        }
        (tmp_path / "gpu" / f"{date}.json").write_text(json.dumps(found))
    page = tmp_path / "page.md"
    make_page("--figures", tmp_path, "--page", page)
    text = page.read_text()
    assert "0.25 MFU; 12,346 tokens/s | newer |" in text
    assert "37 GB/s | older |" in text
    assert "0.5 MFU" not in text


def test_an_algorithm_that_missed_its_mark_with_one_seed_is_in_bold(make_page, every, tmp_path):
    (tmp_path / "algorithms").mkdir()
    runs = [
        {
            "algorithm": name,
            "mode": "sync",
            "seed": seed,
            "before": 0.3,
            "after": after,
            "settings": [],
            "steps": 70,
        }
        for name, seed, after in (("grpo", 0, 0.95), ("grpo", 1, 0.97), ("gspo", 0, 0.99), ("gspo", 1, 0.8))
    ]
    found = {
        **every.about(),
        "dirty": False,
        "mark": 0.9,
        "runs": runs,
        "failed": {"dapo, sync, seed 0": "exit code 1"},
    }
    (tmp_path / "algorithms" / "a.json").write_text(json.dumps(found))
    page = tmp_path / "page.md"
    make_page("--figures", tmp_path, "--page", page)
    text = page.read_text()
    assert "that 70 steps bring" in text
    assert "| `grpo` | 0.30 | 0.96 (lowest 0.95) |  |" in text
    assert "| `gspo` | 0.30 | **0.90 (lowest 0.80)** |  |" in text
    assert "Failed: dapo, sync, seed 0." in text
