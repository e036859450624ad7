"""What is read of a run folder: whole ones, half-written, killed, at work, of another version, and none."""

import json
import subprocess
import sys

import pytest
import yaml

from offbeat_recipes.errors import RunFolderError
from offbeat_recipes.report import collect as collecting
from offbeat_recipes.report.collect import collect

HOLDER = """
import sys
from pathlib import Path
from offbeat_recipes.run.folder import reopen_run_folder
folder = reopen_run_folder(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_whole_run_is_read_whole(make_run):
    run = collect(make_run("demo", {"trainer": {"group_size": 3}, "seed": 7}))
    assert (run.name, run.state, run.notes) == ("demo", "done", [])
    assert run.steps == [1, 2, 3, 4]
    assert run.series["train/grad_norm"] == [2, None, 4, 5]
    assert run.series["tokens/generated_per_s"] == [50.0] * 4, "over the phases of the step"
    assert [row["completion"] for row in run.rows] == ["fine", "wrong"]
    assert run.went_by == ["from version 1 by `shm`: one machine"]
    assert run.machine["packages"] == {"torch": "2.13"}


def test_device_hours_and_what_they_cost_are_of_the_gpus_that_a_run_holds(make_run):
    on_gpus = {
        "device": "cuda",
        "engine": {"num_ranks": 4},
        "rollout": {"num_replicas": 2, "tensor_parallel_size": 2},
    }
    shared = on_gpus | {"cluster": {"placement": "colocated"}}
    seconds = collect(make_run("cpu", {})).series
    hours = seconds["cost/device_hours"]
    assert hours[0] > 0
    assert hours == pytest.approx([hours[0] * count for count in (1, 2, 3, 4)], rel=1e-4)
    assert "cost/money" not in seconds
    for name, config, devices in (("apart", on_gpus, 8), ("shared", shared, 4)):
        series = collect(make_run(name, config), price=2.5).series
        assert series["cost/device_hours"] == pytest.approx([devices * value for value in hours], rel=1e-4)
        assert series["cost/money"] == pytest.approx([2.5 * devices * value for value in hours], rel=1e-4)
        assert series["cost/money_per_step"] == pytest.approx([2.5 * devices * hours[0]] * 4, rel=1e-4)


def test_settings_are_told_where_they_differ_from_what_the_task_brings(make_run):
    folder = make_run("demo", {"trainer": {"group_size": 3, "steps": 50}, "sampling": {"max_tokens": 24}})
    told = {key: (value, before) for key, value, before in collect(folder).settings}
    assert told["trainer.group_size"] == (3, 16)
    assert not {"trainer.steps", "sampling.max_tokens"} & told.keys(), "arithmetic's own"
    assert "warmup.steps" in told, "made without the recipe, which has 300"


@pytest.mark.parametrize(
    ("summary", "state"),
    [
        ({"interrupted": True}, "stopped"),
        ({"error": "no room", "interrupted": True}, "failed"),
        (None, "ended early"),
    ],
)
def test_how_it_ended_is_said(make_run, summary, state):
    folder = make_run()
    (folder / "summary.json").unlink()
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    run = collect(folder)
    assert run.state == state
    assert any("summary.json is missing" in note for note in run.notes) == (summary is None)


def test_why_replicas_were_lost_is_said(make_run):
    folder = make_run()
    lost = [f"replica {at}: silent" for at in range(5)]
    (folder / "summary.json").write_text(json.dumps({"steps": 4, "lost_replicas": lost}))
    assert collect(folder).notes == [f"a replica was lost: replica {at}: silent" for at in (2, 3, 4)]


def test_a_run_at_work_is_seen_and_not_disturbed(make_run):
    folder = make_run()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    assert collect(folder).state == "running"
    (folder / "summary.json").unlink()
    assert collect(folder).notes == [], "it comes with the end"
    holder.communicate(timeout=600)
    assert collect(folder).state == "ended early"


def test_torn_and_foreign_lines_are_left_out_and_counted(make_run):
    folder = make_run()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"step": 4, "reward/mean": 9}\n{"step": 5, "rew')
    with (folder / "samples.jsonl").open("a") as file:
        file.write('{"step": 4, "completion": 3}\n{"step": "x", "completion": "odd", "reward": "nan"}\n')
    with (folder / "trace.json").open("a") as file:
        file.write('{"pid": 1, "ph": "X", "na')
    run = collect(folder)
    assert run.notes == ["metrics.jsonl: 2 line(s) are torn or no JSON, and left out"]
    assert run.steps == [1, 2, 3, 4]
    assert run.series["reward/mean"][-1] == 9, "a step that was repeated counts as it was the last time"
    [odd] = [row for row in run.rows if row["completion"] == "odd"]
    assert len(run.rows) == 3
    assert (odd["step"], odd["reward"], odd["finish"]) == (0, None, "")


def test_a_run_that_was_killed_at_once_shows_its_settings_and_says_what_is_missing(make_run):
    folder = make_run()
    for path in folder.glob("*.json*"):
        path.unlink()
    run = collect(folder)
    assert run.config["seed"] == 0
    words = " ".join(run.notes)
    assert all(name in words for name in ("metrics.jsonl", "samples.jsonl", "summary.json", "trace.json"))


def test_settings_of_another_version_are_all_listed(make_run):
    folder = make_run()
    held = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump(held | {"engine": {"name": "deepspeed", "stage": 3}}))
    run = collect(folder)
    assert not run.defaults_known
    assert ("engine.stage", 3, None) in run.settings
    (folder / "config.yaml").write_text("\x00: [")
    assert any("config.yaml cannot be read" in note for note in collect(folder).notes)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")  # any library's
    with pytest.raises(RunFolderError, match=r"is no run folder: it has no config\.yaml"):
        collect(tmp_path)
    with pytest.raises(RunFolderError, match="is no run folder"):
        collect(tmp_path / "nowhere")


def test_the_trace_becomes_lanes(make_run, monkeypatch):
    folder = make_run()
    told = collecting.read_trace(folder / "trace.json")
    trainer, generation = told["tracks"]
    assert (told["ms"], told["cut"]) == (7.0, False)
    assert trainer["spans"] == [(0.0, 5.0, "generate", ""), (5.0, 2.0, "train", "d")]
    assert generation["curve"] == [(0.0, 1.0), (1.0, 2.0), (3.0, 1.0)], "how many groups are under way"
    monkeypatch.setattr(collecting, "MAX_EVENTS", 2)
    told = collecting.read_trace(folder / "trace.json")
    assert told["cut"]
    assert sum(len(track["spans"]) for track in told["tracks"]) == 2
    assert collecting.read_trace(folder / "none.json") is None


TURNS = [
    {
        "role": "policy",
        "text": "ask",
        "token_ids": [1],
        "logprobs": [-0.5],
        "versions": [[3, 1]],
        "reward": 0.0,
    },
    {"role": "environment", "text": "answer", "token_ids": [2]},
]


def test_trajectories_take_the_place_of_samples_of_their_steps(make_run, sample, keep_trajectories):
    others = [sample(0, "before", title="before"), sample(2, "sampled 2"), sample(10, "sampled 10")]
    folder = make_run(samples=[*others, sample(10, "after", title="after")])
    keep_trajectories(folder, 2, ["t2"], turns=TURNS, parts={"format": 0.5})
    keep_trajectories(folder, 3, ["t3"], turns=TURNS[:1])
    run = collect(folder)
    assert [row["completion"] for row in run.rows] == ["before", "t2", "t3", "sampled 10", "after"]
    _, whole, plain, *_ = run.rows
    assert whole["parts"] == {"format": 0.5}
    assert whole["turns"] == [
        {"role": "policy", "text": "ask", "reward": 0.0, "versions": [[3, 1]], "num_tokens": 1},
        {"role": "environment", "text": "answer", "num_tokens": 1},
    ]
    assert plain["turns"] is None, "one turn is the completion"


SPOKEN = {
    "role": "policy",
    "text": "ask me",
    "token_ids": [1, 2],
    "pieces": ["ask", " me"],
    "logprobs": [-0.5, -0.123456],
    "advantages": [1.5, 1.5],
    "versions": [[3, 1], [4, 1]],
}


def test_tokens_have_a_text_and_what_is_known_of_them(make_run, keep_trajectories):
    folder = make_run(samples=[])
    keep_trajectories(folder, 2, ["several"], turns=[SPOKEN, TURNS[1]])
    keep_trajectories(folder, 3, ["one"], turns=[SPOKEN | {"advantages": None}])
    keep_trajectories(folder, 4, ["of an earlier version"], turns=TURNS)
    several, one, earlier = (row["tokens"] for row in collect(folder).rows)
    columns = {"logprob": [-0.5, -0.1235], "advantage": [1.5, 1.5], "version": [3, 4]}
    assert several == [{"text": ["ask", " me"], **columns}, None]
    assert one == [{"text": ["ask", " me"], **columns, "advantage": None}]
    assert earlier is None


@pytest.mark.parametrize("odd", [7, [], ["a", 1], {"a": 1}, None])
def test_tokens_of_kinds_that_nobody_foresaw_are_not_known(make_run, keep_trajectories, odd):
    folder = make_run(samples=[])
    keep_trajectories(folder, 2, ["one"], turns=[SPOKEN | {"pieces": odd}])
    keep_trajectories(
        folder, 3, ["one"], turns=[SPOKEN | dict.fromkeys(("logprobs", "advantages", "versions"), odd)]
    )
    keep_trajectories(
        folder, 4, ["one"], turns=[SPOKEN | {"versions": [[3, "x"], [3], [{}, 1], [None, 10**9]]}]
    )
    text, numbers, versions = (row["tokens"] for row in collect(folder).rows)
    assert text is None
    assert numbers[0]["text"] == ["ask", " me"]
    assert versions[0]["version"] is None


def test_tokens_of_the_newest_steps_are_known_and_of_each_its_share(make_run, keep_trajectories, monkeypatch):
    folder = make_run(samples=[])
    for step in range(1, 5):
        keep_trajectories(folder, step, ["a", "b", "c"], turns=[SPOKEN])
    monkeypatch.setattr(collecting, "MAX_TOKENS", 10)
    monkeypatch.setattr(collecting, "TOKENS_PER_STEP", 3)
    known = [row["tokens"] is not None for row in collect(folder).rows]
    assert known == [False] * 3 + [True, False, False] + [True, True, False] * 2
    monkeypatch.setattr(collecting, "MAX_TOKENS", 16)
    known = [row["tokens"] is not None for row in collect(folder).rows]
    assert known == [True, True, False] * 4


def test_of_too_many_trajectories_the_newest_are_shown(make_run, keep_trajectories, monkeypatch):
    folder = make_run(samples=[])
    for step in (2, 9, 10):
        keep_trajectories(folder, step, ["one", "two"])
    monkeypatch.setattr(collecting, "MAX_ROWS", 5)
    run = collect(folder)
    assert [row["step"] for row in run.rows] == [9, 9, 10, 10]
    assert "of 3 steps in trajectories, the newest 2 are shown" in run.notes


def test_a_compressed_file_that_was_cut_off_is_read_as_far_as_it_goes(make_run, keep_trajectories):
    folder = make_run(samples=[])
    keep_trajectories(folder, 2, [f"{at} {at**9}" for at in range(2000)])
    path = folder / "trajectories" / "step_2.jsonl.gz"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    run = collect(folder)
    assert 0 < len(run.rows) < 2000
    assert any("step_2.jsonl.gz" in note for note in run.notes)
