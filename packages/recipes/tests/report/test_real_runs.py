"""What real runs write, against what the report reads: every metric is in the table."""

import json
import re
import shutil

import pytest

from offbeat_recipes.report.build import report_data, write_report
from offbeat_recipes.report.collect import collect
from offbeat_recipes.report.metrics import lookup
from offbeat_recipes.testing import Command

pytestmark = [pytest.mark.ray, pytest.mark.slow]
RUN_TIMEOUT_S = 600.0
SMALL = (
    "rollout=hf",
    "warmup.steps=4",
    "warmup.batch_size=8",
    "trainer.steps=4",
    "trainer.prompts_per_step=4",
    "trainer.group_size=4",
    "trainer.validate_every=2",
    "trainer.validation_prompts=8",
    "trainer.sample_every=1",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory, shared_ray):
    """Return what runs a command in a new folder, and gives the folder and what a person saw."""

    def run(name, *settings, blocked=False):
        folder = tmp_path_factory.mktemp("run") / "run"
        if blocked:  # where the report would be written to lies a folder
            (folder / "report.html.writing").mkdir(parents=True)
        words = [*SMALL, shared_ray, f"run_dir={folder}", *settings]
        return folder, Command(name, words, folder.with_name("said")).succeed(RUN_TIMEOUT_S)

    return run


def keys_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {key for line in lines for key in line} - {"step", "time_s"}


def test_a_run_writes_its_report_and_says_where(run, tmp_path):
    folder, said = run("train", "mode=fully_async", "trainer.updates_per_step=2")
    assert re.search(rf"^report +{folder}/report\.html$", said, re.MULTILINE)
    assert [key for key in keys_of(folder) if lookup(key) is None] == []
    collected = collect(folder)
    assert (collected.state, collected.notes, collected.steps) == ("done", [], [1, 2, 3, 4])
    assert {"trainer", "replica 0", "generation", "sync"} <= {
        one["name"] for one in collected.timeline["tracks"]
    }
    assert len(collected.rows) == 4 + 4 * 16 + 4, "before, four groups of four a step, after"
    assert collected.machine["packages"].keys() >= {"torch", "offbeat-recipes", "ray"}
    told = {key for key, _, _ in collected.settings}
    assert {"trainer.steps", "trainer.updates_per_step"} <= told
    assert not {"task.name", "engine.optimizer.lr", "mode.max_staleness"} & told
    assert str(folder) not in (folder / "report.html").read_text()
    killed = tmp_path / "killed"
    shutil.copytree(folder, killed, ignore=shutil.ignore_patterns("summary.json", "report.html"))
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    main, _ = report_data([killed])
    assert main["runs"][0]["state"] == "ended early"
    assert write_report([killed, folder], tmp_path / "both.html").stat().st_size < 5e6


def test_every_metric_of_a_run_of_several_turns_is_in_the_table_and_its_trajectories_are_read(run):
    kept = "report.trackers=[trajectories_2]"
    folder, _ = run("train", "task=calculator", "algorithm=ppo", "algorithm.kl_coef=0.1", kept)
    assert [key for key in keys_of(folder) if lookup(key) is None] == []
    rows = [row for row in collect(folder).rows if row["title"] == "trained"]
    assert [row["step"] for row in rows] == [step for step in range(1, 5) for _ in range(2 * 4)]
    turns = [turn for row in rows for turn in row["turns"] or ()]
    assert {turn["role"] for turn in turns} == {"policy", "environment"}
    for row in rows:
        spoken = [
            turn["text"]
            for turn in row["turns"] or [{"role": "policy", "text": row["completion"]}]
            if turn["role"] == "policy"
        ]
        assert ["".join(known["text"]) for known in row["tokens"] if known] == spoken
        assert all(known["logprob"] and known["version"] for known in row["tokens"] if known)
        assert not any(known["advantage"] for known in row["tokens"] if known), (
            "those of a critic are made on the ranks"
        )


def test_every_metric_of_a_run_on_written_rows_is_in_the_table(run):
    folder, said = run("sft", "task=arithmetic", "--loss-only")
    assert "report.html" in said
    assert len(keys_of(folder)) > 5
    assert [key for key in keys_of(folder) if lookup(key) is None] == []


def test_a_report_that_cannot_be_written_fails_no_run(run):
    folder, said = run("sft", "task=arithmetic", "--loss-only", blocked=True)
    assert "report.html" not in said
    assert not (folder / "report.html").exists()
    assert "no report was written" in (folder / "logs" / "driver.log").read_text()
