"""From command lines to settings."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from offbeat_recipes.cli import _hydra, train
from offbeat_recipes.cli._hydra import compose_run, groups, to_yaml
from offbeat_recipes.errors import SettingError
from offbeat_recipes.settings.reading import to_dict
from offbeat_trainer.algorithms.registry import peer_recipes

ALL_CHOICES = [(group, choice) for group, choices in groups().items() for choice in choices]


def test_a_preset_of_hardware_sets_other_settings_and_leaves_the_rest_to_the_command_line(tmp_path):
    config = compose_run(["hardware=h100x8", "engine.num_ranks=4"])
    assert (config.device, config.model.dtype, config.engine.num_ranks) == ("cuda", "bfloat16", 4)
    assert (config.rollout.num_replicas, config.colocated) == (8, True)
    assert config.cluster.device_memory_gib == 79
    assert compose_run(["hardware=cpu"]) == compose_run([])
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(compose_run(["trainer.steps=7"])))
    assert compose_run(["hardware=h100x1"], str(file)) == compose_run(["hardware=h100x1", "trainer.steps=7"])
    with pytest.raises(SettingError, match=r"`hardware`: expected one of a100x8, cpu, gb200x4x2, h100x1"):
        compose_run(["hardware=tpu"])


LIKE_TRL = ["algorithm.std_epsilon=1e-4", "algorithm.clip_high=0.2", "algorithm.correction=mask", "algorithm.correction_level=sequence", "algorithm.correction_high=3.0"]  # fmt: skip


def test_a_recipe_is_the_settings_under_which_an_algorithm_gives_the_number_of_another_library(tmp_path):
    assert compose_run(["recipe=trl-1.16"]) == compose_run(LIKE_TRL)
    assert compose_run(["algorithm.clip_high=0.3", "recipe=trl-1.16"]).algorithm.clip_high == 0.3
    assert compose_run(["recipe=verl-0.9", "algorithm=ppo"]).algorithm.trace == 1.0
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(compose_run(["trainer.steps=7", "algorithm.clip_high=0.25"])))
    assert compose_run(["recipe=trl-1.16"], str(file)) == compose_run(["trainer.steps=7", *LIKE_TRL])


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["recipe=trl-2"], r"`recipe`: no recipe 'trl-2'; there are nemo-rl-\w+, trl-1\.16, verl-0\.9"),
        (
            ["recipe=verl-0.9", "algorithm=dpo"],
            "verl-0.9 has nothing for algorithm=dpo: verl has no DPO; it has",
        ),
        (["recipe=trl-1.16", "algorithm.clip_hihg=0.3"], "did you mean `algorithm.clip_high`"),
    ],
)
def test_a_recipe_that_there_is_not_is_refused(settings, why):
    with pytest.raises(SettingError, match=why):
        compose_run(settings)


@pytest.mark.parametrize(
    ("recipe", "algorithm"), [(r, a) for r, entries in peer_recipes().items() for a in entries]
)
def test_every_recipe_can_be_set_or_says_why_not(recipe, algorithm):
    entry = peer_recipes()[recipe][algorithm]
    if isinstance(entry, str):
        with pytest.raises(SettingError, match=re.escape(entry)):
            compose_run([f"algorithm={algorithm}", f"recipe={recipe}"])
    else:
        config = to_dict(compose_run([f"algorithm={algorithm}", f"recipe={recipe}"]))["algorithm"]
        assert entry.get("settings", {}).items() <= config.items()


def test_the_page_of_algorithms_says_what_each_recipe_sets(monkeypatch, tmp_path):
    root = Path(__file__).parents[4]
    told = runpy.run_path(str(root / "tools" / "make_peers.py"))
    monkeypatch.setattr("sys.argv", ["make_peers", "--check"])
    told["main"]()
    stale = tmp_path / "algorithms.md"
    stale.write_text((root / "docs" / "algorithms.md").read_text().replace("`trl-1.16` |", "`trl-2` |"))
    monkeypatch.setitem(told["main"].__globals__, "PAGE", stale)
    with pytest.raises(SystemExit, match=r"run tools/make_peers\.py"):
        told["main"]()


def test_a_plan_says_what_a_recipe_sets(capsys):
    line = ["algorithm=rloo", "recipe=verl-0.9", "algorithm.dual_clip=0"]
    assert train.plan([*line, "--json"]) == 0
    [note] = [one for one in json.loads(capsys.readouterr().out)["warnings"] if one.startswith("recipe=")]
    assert (
        note
        == "recipe=verl-0.9 sets algorithm.aggregation=token_mean algorithm.clip_high=0.2 algorithm.correction=none"
    )


def test_overrides_and_groups():
    config = compose_run(
        ["task=arithmetic", "trainer.steps=5", "engine.num_ranks=2", "rollout.num_replicas=2"]
    )
    assert (config.trainer.steps, config.engine.num_ranks, config.rollout.num_replicas) == (5, 2, 2)
    assert config.task.name == "arithmetic"


@pytest.mark.parametrize(("group", "choice"), ALL_CHOICES)
def test_every_choice_of_every_group_loads(group: str, choice: str):
    config = compose_run([f"{group}={choice}"])
    section = getattr(config, group, None)  # hardware has none
    if hasattr(section, "name"):
        assert section.name == choice


def test_there_are_the_groups_one_expects():
    assert set(groups()) == {"algorithm", "engine", "hardware", "mode", "rollout", "sync", "task"}
    assert groups()["rollout"] == ["hf", "sglang", "vllm"]


def test_a_task_brings_settings_and_the_command_line_wins():
    assert compose_run([]).sampling.max_tokens == 24
    assert compose_run(["task=gsm8k"]).sampling.max_tokens == 512
    assert compose_run(["sampling.max_tokens=9", "task=gsm8k"]).sampling.max_tokens == 9


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.stpes=5", "did you mean `trainer.steps`?"),
        ("+trainer.stpes=5", "did you mean `trainer.steps`?"),
        (
            "mode=two_steps_off",
            "`mode`: expected one of fully_async, one_step_off, sync, got 'two_steps_off'",
        ),
        ("rollout=vlm", "did you mean 'vllm'?"),
        ("trainer.steps", "expected key=value"),
        ("trainer.steps=1,2", "one run takes one value"),
        ("~trainer.steps", "cannot be removed"),
        ("engine={num_ranks: 2}", "expected one of fsdp2"),
        ("rollout.device=cuda", "it follows from device"),
        ("name=${nope}", "nope"),
    ],
)
def test_bad_overrides_are_refused_in_words(override: str, message: str):
    with pytest.raises(SettingError) as caught:
        compose_run([override])
    assert message in str(caught.value)


AS_TYPED = [
    "my runs/first one",
    "Läufe/β (2), 日本",
    "a=b,c",
    "it's [1] {2}",
    "back\\slash\\",
    "back\\'s",
    "42",
    " around ",
]


@pytest.mark.parametrize("path", AS_TYPED)
@pytest.mark.parametrize("setting", ["run_dir", "model.path", "task.train_path"])
def test_a_path_is_taken_as_the_shell_gives_it(setting: str, path: str):
    config = compose_run(["task=gsm8k", f"{setting}={path}"])
    section, _, name = setting.rpartition(".")
    assert getattr(getattr(config, section) if section else config, name) == path


@pytest.mark.parametrize("path", AS_TYPED)
def test_so_is_one_reward_where_there_may_be_several(path: str):
    assert compose_run(["task=file", f"task.reward={path}"]).task.reward == path
    assert compose_run(["task=file", "task.reward=[a:b, 'ö:d']"]).task.reward == ("a:b", "ö:d")


def test_a_file_may_choose_a_task_and_set_it_and_the_command_line_another(tmp_path: Path):
    file = tmp_path / "common.yaml"
    own = "task: {train_path: a.jsonl, reward: 'b.py:c', max_prompt_tokens: 16}\n"
    file.write_text(f"defaults: [train, {{override task: file}}, {{override rollout: hf}}, _self_]\n{own}")
    config = compose_run([], str(file))
    assert (config.task.name, config.task.train_path, config.task.reward, config.rollout.name) == (
        "file",
        "a.jsonl",
        "b.py:c",
        "hf",
    )
    pairs = compose_run(["task=pairs", "algorithm=dpo"], str(file)).task
    assert (pairs.name, pairs.train_path, pairs.max_prompt_tokens) == ("pairs", "a.jsonl", 16)
    file.write_text("defaults: [train, _self_]\ntask: {num_layers: 3}\n")
    assert compose_run([], str(file)).task.num_layers == 3


def test_a_word_may_be_the_folder_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "a, b"
    folder.mkdir()
    older = {
        **to_dict(compose_run(["trainer.steps=7"])),
        "evaluation": {"num_samples": 4},
    }  # of an earlier version
    (folder / "config.yaml").write_text(yaml.safe_dump(older))
    made = _hydra.parser("offbeat-eval", "")
    read = _hydra.read_command_line(made, [str(folder), "seed=3"], takes_run=True)
    assert not isinstance(read, int)
    assert (read[0].trainer.steps, read[0].seed, read[0].run_dir) == (7, 3, str(folder))
    assert _hydra.read_command_line(made, [str(tmp_path / "none")], takes_run=True) == 2
    assert f"no file {tmp_path}/none/config.yaml" in capsys.readouterr().err
    assert _hydra.read_command_line(made, [str(folder)]) == 2, "other commands take settings alone"
    assert train.evaluate([str(folder), "--samples=0"]) == 2
    assert "--samples of at least 1" in capsys.readouterr().err
    assert train.evaluate(["evaluation.step=3"]) == 2
    assert "an option of `offbeat eval RUN` now" in capsys.readouterr().err


def test_what_is_in_quotes_for_hydra_and_null_stay_what_they_were():
    assert compose_run(["run_dir='a b'"]).run_dir == compose_run(['run_dir="a b"']).run_dir == "a b"
    assert compose_run(["run_dir=null"]).run_dir == compose_run(["run_dir="]).run_dir == ""


@pytest.mark.parametrize("name", ["a b (1), it's=x", "Läufe"])
def test_settings_and_their_defaults_may_lie_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    folder = tmp_path / name
    shutil.copytree(_hydra.CONF, folder / "conf")
    monkeypatch.setattr(_hydra, "CONF", folder / "conf")
    written = folder / f"{name}.yaml"
    written.write_text(to_yaml(compose_run([f"run_dir={folder}", "trainer.steps=7"])))
    config = compose_run(["rollout=hf"], str(written))
    assert (config.run_dir, config.trainer.steps, config.rollout.name) == (str(folder), 7, "hf")


def test_all_bad_overrides_are_named():
    with pytest.raises(SettingError) as caught:
        compose_run(["trainer.stpes=5", "mode=x"])
    assert len(caught.value.problems) == 2


def test_resolved_settings_can_be_run_again(tmp_path: Path):
    config = compose_run(
        ["task=gsm8k", "task.train_path=a.jsonl", "engine.optimizer.lr=1e-6", "trainer.steps=7"]
    )
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert compose_run([], str(path)) == config
    assert compose_run(["trainer.steps=8"], str(path)).trainer.steps == 8


@pytest.fixture
def written(tmp_path: Path) -> str:
    """The settings of a run, all written out as the run folder has them."""
    path = tmp_path / "config.yaml"
    own = ["algorithm=dr_grpo", "rollout.max_num_seqs=7", "trainer.steps=7"]
    path.write_text(to_yaml(compose_run(own)))
    return str(path)


def test_another_adapter_over_written_settings_leaves_those_behind_that_it_has_not(written: str):
    assert compose_run(["rollout=hf"], written).rollout.name == "hf"
    with pytest.raises(SettingError, match=r"`rollout\.enforce_eager` belongs to rollout=vllm"):
        compose_run(["rollout=hf", "rollout.enforce_eager=true"], written)


def test_a_choice_over_written_settings_changes_what_it_names_and_nothing_else(written: str):
    before = compose_run([], written)
    after = compose_run(["mode=fully_async"], written)
    assert after == replace(before, mode=after.mode)
    assert (before.mode.name, after.mode.name) == ("sync", "fully_async")
    several = compose_run(
        ["rollout=hf", "algorithm=grpo", "algorithm.aggregation=seq_mean_token_sum"], written
    )
    assert (several.rollout.name, several.rollout.max_num_seqs) == ("hf", 7)
    assert (several.algorithm.advantage, several.algorithm.aggregation) == ("grpo", "seq_mean_token_sum")
    assert several.mode == before.mode


def test_naming_the_written_task_again_undoes_nothing(written: str):
    assert compose_run(["task=arithmetic"], written) == compose_run([], written)


def test_another_task_over_written_settings_is_refused_with_what_to_do(written: str):
    with pytest.raises(SettingError) as caught:
        compose_run(["task=gsm8k"], written)
    assert "holds the settings of a run with task=arithmetic" in str(caught.value)
    assert "leave --config out" in str(caught.value)
    assert "override task: gsm8k" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [", "is no YAML"), ("- 1\n- 2\n", "should hold sections of settings, got [1, 2]")],
)
def test_files_that_hold_no_settings_are_refused(tmp_path: Path, text: str, message: str):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(SettingError) as caught:
        compose_run([], str(path))
    assert message in str(caught.value)


def test_own_file_builds_on_the_packaged_one(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text("defaults:\n  - train\n  - override task: gsm8k\n  - _self_\ntrainer: {steps: 3}\n")
    config = compose_run(["rollout=hf"], str(path))
    assert (config.task.name, config.trainer.steps, config.rollout.name) == ("gsm8k", 3, "hf")
    assert config.sampling.max_tokens == 512


def test_no_folder_is_made_and_none_is_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    compose_run([])
    assert Path.cwd() == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_cfg_job_prints_all_settings(capsys: pytest.CaptureFixture[str]):
    assert train.main(["--cfg", "job", "trainer.steps=5"]) == 0
    out = capsys.readouterr().out
    assert "  steps: 5\n" in out
    assert "dtype: float32" in out


def test_a_config_file_of_another_ending_is_told_to_be_renamed(tmp_path, capsys):
    (tmp_path / "mine.yml").write_text("seed: 3\n")
    assert train.main(["--config", str(tmp_path / "mine.yml")]) == 2
    assert "expected a name that ends in .yaml" in capsys.readouterr().err


def test_keys_of_one_s_own_have_no_limits_by_their_names():
    words = [
        "task=arithmetic",
        "++environment.args.read_timeout_s=soon",
        "++environment.args.other_timeout_s=0",
    ]
    assert compose_run(words).environment.args == {"read_timeout_s": "soon", "other_timeout_s": 0}


def test_missing_config_file(capsys: pytest.CaptureFixture[str]):
    assert train.main(["--config", "nowhere.yaml"]) == 2
    assert "no file nowhere.yaml" in capsys.readouterr().err


def test_help_names_the_groups(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        train.main(["--help"])
    assert caught.value.code == 0
    assert "rollout=hf|sglang|vllm" in capsys.readouterr().out
