"""Run folders: nothing is lost, two processes never share one, and a run goes on only as the same run."""

import fcntl
import itertools
import json
import math
import os
import subprocess
import sys
from contextlib import closing

import pytest
import yaml

from offbeat_recipes.errors import RunFolderError
from offbeat_recipes.run.folder import MAY_CHANGE, open_run_folder, reopen_run_folder, speed_settings
from offbeat_recipes.settings.reading import known_paths, parse, to_dict

SETTINGS = {"seed": 0, "trainer": {"steps": 5, "group_size": 4}, "report": {"wandb": False}}
HOLDER = """
import sys
from pathlib import Path
from offbeat_recipes.run.folder import open_run_folder
folder = open_run_folder(Path(sys.argv[1]), {"seed": 0}, resume=False)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_process(tmp_path):
    """Another process that holds `tmp_path / "run"` until its stdin is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate(timeout=600)


def open_and_close(path, settings, *, resume):
    folder = open_run_folder(path, settings, resume=resume)
    folder.close()
    return folder


def test_a_new_folder_holds_what_was_asked(tmp_path):
    folder = open_and_close(tmp_path / "deep" / "run", SETTINGS, resume=True)
    assert not folder.resumed
    assert folder.logs.is_dir()
    assert yaml.safe_load((folder.path / "config.yaml").read_text()) == SETTINGS


def test_a_run_that_is_there_is_moved_aside_whole(tmp_path):
    path = tmp_path / "run"
    for number in range(3):
        folder = open_and_close(path, {"seed": number}, resume=False)
        (folder.path / "metrics.jsonl").write_text(str(number))
    assert sorted(os.listdir(tmp_path)) == ["run", "run.1", "run.2"]
    for name, number in (("run.1", 0), ("run.2", 1), ("run", 2)):
        assert (tmp_path / name / "metrics.jsonl").read_text() == str(number)
        assert yaml.safe_load((tmp_path / name / "config.yaml").read_text()) == {"seed": number}


def test_a_folder_with_other_things_in_it_is_used_and_they_stay(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    folder = open_and_close(tmp_path, SETTINGS, resume=False)
    assert (folder.resumed, (tmp_path / "notes.txt").read_text()) == (False, "mine")


def with_schedule(schedule, steps):
    return {
        **SETTINGS,
        "trainer": {"steps": steps},
        "engine": {"optimizer": {"schedule": schedule}},
    }


def test_more_steps_under_a_schedule_that_ends_with_the_run_are_refused(tmp_path):
    open_and_close(tmp_path / "run", with_schedule("cosine", 10), resume=False)
    with pytest.raises(RunFolderError, match=r"trainer\.steps: was 10, is 20.*cosine.*from its model"):
        open_and_close(tmp_path / "run", with_schedule("cosine", 20), resume=True)
    assert open_and_close(tmp_path / "run", with_schedule("cosine", 10), resume=True).resumed


def test_more_steps_under_a_constant_rate_go_on(tmp_path):
    open_and_close(tmp_path / "run", with_schedule("constant", 10), resume=False)
    assert open_and_close(tmp_path / "run", with_schedule("constant", 20), resume=True).resumed


@pytest.mark.parametrize("name", ["validate_every", "save_every"])
def test_a_calendar_that_decides_when_weights_flow_stays(tmp_path, name):
    def settings(sync_every, every):
        return {"mode": {"sync_every": sync_every}, "trainer": {name: every}}

    open_and_close(tmp_path / "run", settings(3, 10), resume=False)
    with pytest.raises(RunFolderError, match=rf"trainer\.{name}: was 10, is 5, and with mode\.sync_every=3"):
        open_and_close(tmp_path / "run", settings(3, 5), resume=True)
    open_and_close(tmp_path / "each", settings(1, 10), resume=False)
    assert open_and_close(tmp_path / "each", settings(1, 5), resume=True).resumed


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_in_use_is_refused_with_the_process_that_has_it(tmp_path, other_process, resume):
    path = tmp_path / "run"
    with pytest.raises(RunFolderError, match=rf"in use by process {other_process.pid};"):
        open_run_folder(path, {"seed": 0}, resume=resume)
    with pytest.raises(RunFolderError, match=rf"in use by process {other_process.pid};"):
        reopen_run_folder(path)
    assert os.listdir(tmp_path) == ["run"], "a run at work is not moved aside"


def test_a_killed_owner_leaves_the_folder_to_others(tmp_path, other_process):
    other_process.kill()
    other_process.wait(timeout=600)
    assert open_and_close(tmp_path / "run", {"seed": 0}, resume=True).resumed


def test_settings_that_differ_are_refused_each_by_name(tmp_path):
    open_and_close(tmp_path, SETTINGS, resume=False)
    other = {
        "seed": 1,
        "trainer": {"steps": 5, "group_size": 8},
        "report": {"wandb": False},
        "new": {"a": [1]},
    }
    with pytest.raises(RunFolderError) as caught:
        open_run_folder(tmp_path, other, resume=True)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert lines[1:4] == [
        "new.a: was None, is [1]",
        "seed: was 0, is 1",
        "trainer.group_size: was 4, is 8",
    ]
    assert "resume=never" in lines[4]
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == SETTINGS
    open_and_close(tmp_path, SETTINGS, resume=True)  # the refusal gave the lock back


def test_settings_that_change_nothing_may_differ(tmp_path):
    open_and_close(tmp_path, SETTINGS, resume=False)
    other = {
        **SETTINGS,
        "trainer": {"steps": 9, "group_size": 4},
        "report": {"wandb": True},
        "resume": "auto",
    }
    assert open_and_close(tmp_path, other, resume=True).resumed


def test_a_run_of_a_version_with_other_settings_goes_on_where_they_are_at_their_defaults(tmp_path):
    settings = to_dict(parse({"engine": {"name": "megatron"}}))
    older = {
        **settings,
        "engine": {**settings["engine"], "lora": {"rank": 0}},
        "sampling": {"max_tokens": 32},
    }
    older["task"] = {**settings["task"], "rope_theta": 100.0}
    open_and_close(tmp_path, older, resume=False)
    with pytest.raises(RunFolderError, match=r"sampling\.temperature: was 1\.0, is 0\.5"):
        open_run_folder(
            tmp_path,
            to_dict(parse({"engine": {"name": "megatron"}, "sampling": {"temperature": 0.5}})),
            resume=True,
        )
    assert open_and_close(tmp_path, settings, resume=True).resumed


FASTER = {
    "engine": {
        "num_ranks": 2, "micro_batch_tokens": 2048, "activation_checkpointing": True, "offload_optimizer": True,
        "shard_size": 1, "compile": True,
    },
    "rollout": {"num_replicas": 3, "max_num_seqs": 8, "gpu_memory_fraction": 0.5, "enforce_eager": True},
    "trainer": {"step_timeout_s": 1200.0},
    "reward": {"max_attempts": 7, "concurrency": 2},
}  # fmt: skip


def test_a_run_goes_on_with_other_settings_of_speed_and_placement(tmp_path):
    """What the first thing is that one changes after a run has met its limits: memory, cores, a lost node."""
    before, now = parse({}), parse(FASTER)
    open_and_close(tmp_path, to_dict(before), resume=False)
    folder = open_run_folder(tmp_path, to_dict(now), resume=True, may_change=speed_settings(now))
    folder.close()
    assert folder.resumed
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["engine"]["num_ranks"] == 2


ENGINES = (
    {"name": "fsdp2", "num_ranks": 2, "shard_size": 1},
    {"name": "megatron", "num_ranks": 4, "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    {"name": "megatron", "num_ranks": 2, "expert_parallel_size": 2, "sequence_parallel": False},
)


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(ENGINES, 2)))
def test_a_run_goes_on_with_another_engine_and_its_layout(tmp_path, first, second):
    task = {"num_heads": 4}
    now = parse({"engine": second, "task": task})
    open_and_close(tmp_path, to_dict(parse({"engine": first, "task": task})), resume=False)
    open_run_folder(tmp_path, to_dict(now), resume=True, may_change=speed_settings(now)).close()
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())["engine"]
    assert second.items() <= written.items()


def test_a_model_whose_heads_a_layout_cannot_share_does_not_go_on_with_that(tmp_path):
    now = parse({"engine": {"name": "megatron", "num_ranks": 2, "tensor_parallel_size": 2}})
    open_and_close(tmp_path, to_dict(parse({})), resume=False)
    with pytest.raises(RunFolderError, match=r"task\.num_heads: was 3, is 4"):
        open_run_folder(tmp_path, to_dict(now), resume=True, may_change=speed_settings(now))


@pytest.mark.parametrize("changed", [{"optimizer": {"lr": 1e-3}}, {"freeze": ["model.embed*"]}])
def test_and_another_engine_hides_nothing_that_both_have(tmp_path, changed):
    now = parse({"engine": {"name": "megatron", **changed}})
    open_and_close(tmp_path, to_dict(parse({})), resume=False)
    with pytest.raises(RunFolderError) as caught:
        open_run_folder(tmp_path, to_dict(now), resume=True, may_change=speed_settings(now))
    named = str(caught.value).splitlines()[1:-1]
    assert [line.partition(":")[0].strip() for line in named] == [
        "engine.optimizer.lr" if "optimizer" in changed else "engine.freeze"
    ]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"task": {"level": 3}}, "task.level"),
        ({"model": {"dtype": "bfloat16"}}, "model.dtype"),
        ({"engine": {"optimizer": {"lr": 1e-3}}}, "engine.optimizer.lr"),
        ({"engine": {"reduce_dtype": "bfloat16"}}, "engine.reduce_dtype"),
        ({"rollout": {"max_model_len": 77}}, "rollout.max_model_len"),
        ({"algorithm": {"clip_low": 0.1}}, "algorithm.clip_low"),
    ],
)
def test_and_not_with_what_is_learned_by_whom(tmp_path, changed, named):
    now = parse(changed)
    open_and_close(tmp_path, to_dict(parse({})), resume=False)
    with pytest.raises(RunFolderError) as caught:
        open_run_folder(tmp_path, to_dict(now), resume=True, may_change=speed_settings(now))
    assert f"{named}: was " in str(caught.value)


def test_every_setting_that_may_change_is_one_and_none_hides_another():
    paths = known_paths()
    for allowed in MAY_CHANGE:
        covered = [path for path in paths if path.startswith(allowed)]
        assert covered, f"{allowed} is no setting"
        assert allowed.endswith(".") or covered == [allowed]


def test_the_settings_of_a_real_run_come_back_equal(tmp_path):
    settings = to_dict(parse({"seed": 3, "engine": {"optimizer": {"lr": 1e-05}}}))
    open_and_close(tmp_path, settings, resume=False)
    assert open_and_close(tmp_path, settings, resume=True).resumed


def test_a_torn_config_is_refused_in_words(tmp_path):
    open_and_close(tmp_path, SETTINGS, resume=False)
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(RunFolderError, match=r"config\.yaml"):
        open_run_folder(tmp_path, SETTINGS, resume=True)


def test_reopen_wants_a_run(tmp_path):
    with pytest.raises(RunFolderError, match="is not a run folder"):
        reopen_run_folder(tmp_path)
    open_and_close(tmp_path, SETTINGS, resume=False)
    folder = reopen_run_folder(tmp_path)
    assert folder.resumed
    folder.close()


def test_a_summary_that_cannot_be_written_leaves_the_old_one(tmp_path):
    folder = open_run_folder(tmp_path, SETTINGS, resume=False)
    folder.write_summary({"steps": 3, "reward_last": 0.5})
    with pytest.raises(TypeError):
        folder.write_summary({"steps": 4, "reward_last": object()})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 3, "reward_last": 0.5}
    folder.write_summary({"steps": 5})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 5}
    assert not list(tmp_path.glob("*.writing"))
    folder.close()


def test_a_summary_holds_what_json_has(tmp_path):
    with closing(open_run_folder(tmp_path, SETTINGS, resume=False)) as folder:
        folder.write_summary({"loss_after": math.nan, "phase_s": {"train": math.inf, "sync": 0.5}})
    text = (tmp_path / "summary.json").read_text()
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert found == {"loss_after": None, "phase_s": {"train": None, "sync": 0.5}}


@pytest.mark.parametrize("begun_again", [True, False])
def test_a_folder_that_another_moves_aside_before_it_is_locked_is_left_to_that_one(
    tmp_path, monkeypatch, begun_again
):
    path, flock = tmp_path / "run", fcntl.flock
    open_and_close(path, SETTINGS, resume=False)
    held = []

    def meanwhile(lock, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        if begun_again:
            held.append(open_run_folder(path, SETTINGS, resume=False))
        else:
            path.rename(tmp_path / "run.1")
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", meanwhile)
    with pytest.raises(RunFolderError, match="was taken by another process just now"):
        open_run_folder(path, SETTINGS, resume=False)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run", "run.1"][not begun_again :]
    for folder in held:
        folder.close()
