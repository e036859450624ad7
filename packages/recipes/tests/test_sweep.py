"""`offbeat-train --multirun`: which runs there are, and what happens when one of them fails."""

import json
import subprocess
import sys

import pytest

from offbeat_recipes.cli.main import main
from offbeat_recipes.errors import SettingError
from offbeat_recipes.run.sweep import choices


def test_there_is_a_run_for_each_combination_of_values():
    runs = choices(
        ["task=file", "seed=1,2", "algorithm=grpo,rloo", "sampling.stop=[a,b]", "report.trackers=[wandb],[]"]
    )
    assert len(runs) == 8
    assert runs[0] == [
        "task=file",
        "seed=1",
        "algorithm=grpo",
        "sampling.stop=[a,b]",
        "report.trackers=[wandb]",
    ]
    assert runs[-1] == ["task=file", "seed=2", "algorithm=rloo", "sampling.stop=[a,b]", "report.trackers=[]"]
    assert [run[0] for run in choices(["trainer.group_size=range(4,13,4)"])] == [
        f"trainer.group_size={n}" for n in (4, 8, 12)
    ]


@pytest.mark.parametrize("settings", [[], ["seed=1"], ["sampling.stop=[a,b]"]])
def test_a_sweep_over_nothing_is_refused(settings):
    with pytest.raises(SettingError, match="no setting has several values"):
        choices(settings)


def test_all_runs_are_read_before_one_begins(tmp_path, capsys):
    assert main(["train", "--multirun", "engine.optimizer.lr=1e-6,fast", f"run_dir={tmp_path}/sweep"]) == 2
    assert "engine.optimizer.lr" in capsys.readouterr().err
    assert not (tmp_path / "sweep").exists()
    assert main(["train", "--multirun", "seed=1,2", f"run_dir={tmp_path}"]) == 2
    assert f"run_dir: {tmp_path} exists" in capsys.readouterr().err


@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_a_run_that_fails_keeps_none_from_being_made_and_the_report_has_those_there_are(tmp_path):
    words = [
        "rollout=hf", "trainer.steps=1", "trainer.prompts_per_step=2", "trainer.group_size=1,2", "trainer.validation_prompts=0",
        "warmup.steps=0", "sampling.max_tokens=4", "report.console=false", f"run_dir={tmp_path}/sweep",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "offbeat_recipes.cli.main", "train", "--multirun", *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=1700, check=False,
    )  # fmt: skip
    folders = [tmp_path / "sweep" / f"{number}_trainer.group_size={number + 1}" for number in (0, 1)]
    assert done.returncode == 1, done.stderr
    assert f"multirun: {folders[0]}: exit code 2" in done.stderr, "a group of one is refused"
    assert not (folders[0] / "config.yaml").exists()
    assert json.loads((folders[1] / "summary.json").read_text())["steps"] == 1
    assert (tmp_path / "sweep" / "report.html").exists()
