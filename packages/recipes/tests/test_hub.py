"""Names on the hub stand for what its cache on this machine holds; nothing is fetched."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat_recipes.cli._hydra import compose_run
from offbeat_recipes.planning.facts import gather_facts
from offbeat_recipes.planning.plan import plan_run
from offbeat_recipes.settings.hub import local_model, local_rows
from offbeat_recipes.tasks.rows import row_files

COMPOSED = """
import json, sys
from offbeat_recipes.cli._hydra import compose_run
paths = [compose_run([f"model.path={path}"]).model.path for path in sys.argv[1:]]
taught = compose_run(["algorithm=distill", "algorithm.teacher_path=me/tiny", "reward.model=me/tiny"])
print(json.dumps([*paths, taught.algorithm.teacher_path, taught.reward.model]))
"""


@pytest.fixture
def cache(tmp_path):
    """The cache of the hub with two commits of one model, of which `main` is the second; and a way to ask for paths with it."""
    model = tmp_path / "hub" / "models--me--tiny"
    for commit in ("a" * 40, "b" * 40):
        (model / "snapshots" / commit).mkdir(parents=True)
        (model / "snapshots" / commit / "config.json").write_text("{}")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("b" * 40)

    def composed(*paths):
        environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub")}
        command = [sys.executable, "-c", COMPOSED, *paths]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr
        return [path.replace(str(model), "CACHE") for path in json.loads(done.stdout)]

    return composed


@pytest.mark.spawns
def test_a_name_is_the_folder_of_one_commit_and_a_folder_of_that_name_goes_first(cache, tmp_path):
    (tmp_path / "here" / "it").mkdir(parents=True)
    found = cache(
        "me/tiny", f"me/tiny@{'a' * 40}", "me/other", "me/tiny@nothing", "here/it", "/abs/path", "''"
    )
    of = [f"CACHE/snapshots/{letter * 40}" for letter in "ba"]
    others = [of[0], of[0]]  # a teacher and a reward model
    assert found == [*of, "me/other", "me/tiny@nothing", "here/it", "/abs/path", "", *others]


ROWS = """
import sys
from offbeat_recipes.cli._hydra import compose_run
from offbeat_recipes.tasks.rows import read_rows
task = compose_run(["task=file", *sys.argv[1:]]).task
print(task.train_path, task.validation_path, [row.values["n"] for row in read_rows(task.train_path)], sep="\\n")
"""


@pytest.mark.spawns
def test_rows_by_name_are_files_of_one_commit_of_a_dataset(tmp_path):
    dataset = tmp_path / "hub" / "datasets--me--sums"
    data = dataset / "snapshots" / ("c" * 40) / "data"
    data.mkdir(parents=True)
    for number in (0, 1):
        (data / f"train-0000{number}-of-00002.jsonl").write_text(json.dumps({"n": number}) + "\n")
    (dataset / "refs").mkdir()
    (dataset / "refs" / "main").write_text("c" * 40)
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub")}
    asked = [
        "task.train_path=hf://datasets/me/sums/data/train-*.jsonl",
        "task.validation_path=[hf://datasets/me/absent/x.csv,hf://datasets/me/sums/data/y.csv]",
    ]
    done = subprocess.run(
        [sys.executable, "-c", ROWS, *asked],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{data}/train-*.jsonl",
        str(("hf://datasets/me/absent/x.csv", f"{data}/y.csv")),
        "[0, 1]",
    ]


def _refusal(setting, *words):
    config = compose_run(words)
    [refusal] = [
        str(one) for one in plan_run(config, gather_facts(config)).refusals if one.setting == setting
    ]
    return refusal


@pytest.mark.parametrize(("named", "revision"), [("me/absent", ""), ("me/absent@v1.0", " --revision v1.0")])
def test_rows_that_are_not_cached_are_refused_with_the_command_that_fetches_them(named, revision):
    path = f"hf://datasets/{named}/train.parquet"
    refusal = _refusal("task.train_path", "task=file", f"task.train_path={path}")
    assert f"no file {path} in the hub's cache of this machine" in refusal
    assert f"`hf download --repo-type dataset me/absent{revision}` fetches the data set" in refusal


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.path", ["model.path={}"]),
        ("reward.model", ["reward.model={}"]),
        ("algorithm", ["algorithm=distill", "algorithm.teacher_path={}"]),
    ],
)
@pytest.mark.parametrize(
    ("named", "command"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", "hf download Qwen/Qwen2.5-0.5B-Instruct"),
        ("Qwen/Qwen2.5-0.5B-Instruct@v1", "hf download Qwen/Qwen2.5-0.5B-Instruct --revision v1"),
    ],
)
def test_a_name_that_is_not_cached_is_refused_with_the_command_that_fetches_it(
    tmp_path, monkeypatch, setting, words, named, command
):
    monkeypatch.chdir(tmp_path)
    refusal = _refusal(setting, *(word.format(named) for word in words))
    assert f"{named} is no folder here, and no model in the hub's cache of this machine" in refusal
    assert f"`{command}` fetches it; a run does not" in refusal


def test_the_name_of_a_data_set_alone_is_answered_with_how_its_files_are_named():
    refusal = _refusal("task.train_path", "task=file", "task.train_path=me/absent")
    assert "or one of a data set of the hub as hf://datasets/me/absent/FILE" in refusal


def test_a_folder_without_a_model_is_not_taken_for_a_name(tmp_path):
    assert f"{tmp_path} holds no config.json" in _refusal("model.path", f"model.path={tmp_path}")


@pytest.mark.parametrize("path", ["", "one", "/a/b", "a/b/c", "a//b", str(Path(__file__).parent)])
def test_what_is_no_name_stays_what_it_is(path):
    assert local_model(path) == path


def _dataset(monkeypatch, hub, *files):
    folder = hub / "datasets--me--sums" / "snapshots" / ("c" * 40)
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}\n")
    (hub / "datasets--me--sums" / "refs").mkdir()
    (hub / "datasets--me--sums" / "refs" / "main").write_text("c" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    return folder


@pytest.mark.parametrize(
    ("files", "asked", "pattern"),
    [
        (["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"], ":train", "data/train"),
        (["main/train-00000-of-00001.parquet", "socratic/train-00000-of-00001.parquet"], "/main:train", "main/train"),
        (["train.jsonl", "test.jsonl"], ":test", "test"),
        (["train_sft-00000-of-00001-abc.parquet", "train.csv"], ":train_sft", "train_sft"),
    ],
)  # fmt: skip
def test_a_split_is_the_files_of_its_name(monkeypatch, tmp_path, files, asked, pattern):
    folder = _dataset(monkeypatch, tmp_path, *files, "README.md")
    found = local_rows(f"hf://datasets/me/sums{asked}")
    assert found == f"{folder}/{pattern}[-.]*"
    assert [Path(one).name.startswith(asked.partition(":")[2]) for one in row_files(found)] == [True] * len(
        row_files(found)
    )
    assert row_files(found)


@pytest.mark.parametrize("asked", [":train", "/main:valid"])
def test_a_split_that_is_none_or_several_is_answered_with_those_there_are(monkeypatch, tmp_path, asked):
    files = ["main/train-00000-of-00001.parquet", "socratic/train-00000-of-00001.parquet", "test.csv"]
    _dataset(monkeypatch, tmp_path, *files)
    path = f"hf://datasets/me/sums{asked}"
    assert local_rows(path) == path
    refusal = _refusal("task.train_path", "task=file", f"task.train_path={path}")
    assert f"{path} is not one split" in refusal
    assert "of config and split it has main:train, socratic:train, :test" in refusal
