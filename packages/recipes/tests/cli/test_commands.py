"""The commands up to the point where something would start."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from offbeat_recipes.cli import _checked, train
from offbeat_recipes.cli._hydra import compose_run
from offbeat_recipes.run.folder import open_run_folder
from offbeat_recipes.settings.reading import to_dict

if TYPE_CHECKING:
    from pathlib import Path


def test_plan_prints_tables(capsys: pytest.CaptureFixture[str]):
    assert train.plan(["engine.num_ranks=2", "rollout.num_replicas=2", "cluster.num_devices=2"]) == 0
    out = capsys.readouterr().out
    assert "16 prompts x 16 = 256" in out
    assert "training rank 0 to 1 (fsdp2)" in out
    assert "This can run. Nothing was started." in out


def test_plan_for_machines(capsys: pytest.CaptureFixture[str]):
    assert train.plan(["--json", "trainer.updates_per_step=3"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    assert [item["setting"] for item in answer["refusals"]] == ["trainer.updates_per_step"]
    assert answer["batch"]["completions_per_step"] == 256


def test_plan_says_that_a_run_cannot_go_on_with_other_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    asked = ["rollout=hf", f"run_dir={tmp_path / 'run'}", "resume=auto"]
    assert train.plan(asked) == 0, "nothing is there to go on from"
    config = compose_run(asked)
    open_run_folder(config.folder, to_dict(config), resume=False).close()
    before = sorted(tmp_path.rglob("*"))
    assert train.plan([*asked, "trainer.steps=200"]) == 0
    capsys.readouterr()
    assert train.plan([*asked, "trainer.group_size=8"]) == 2
    said = capsys.readouterr().out
    assert "trainer.group_size: was 16, is 8" in said
    assert "set them back, or start a new run with resume=never" in said
    assert "This can run" not in said
    config.folder.joinpath("config.yaml").write_text("torn")
    assert train.plan(asked) == 2
    assert "start a new run with resume=never" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("command", [train.main, train.sft, train.evaluate])
def test_nothing_starts_that_is_refused(command, capsys: pytest.CaptureFixture[str]):
    assert command(["rollout.num_replicas=3", "cluster.num_devices=2", "trainer.group_size=1"]) == 2
    said = capsys.readouterr().err.splitlines()
    refused = [line.split(": ")[2] for line in said if ": refused: " in line]
    assert refused == ["rollout.num_replicas", "trainer.group_size"]


@pytest.mark.parametrize("command", [train.main, train.sft, train.evaluate, train.plan])
def test_every_command_knows_the_settings(command, capsys: pytest.CaptureFixture[str]):
    assert command(["trainer.stpes=5"]) == 2
    assert "did you mean `trainer.steps`?" in capsys.readouterr().err


def test_supervised_training_alone_refuses_to_do_nothing(capsys: pytest.CaptureFixture[str]):
    assert train.sft(["warmup.steps=0"]) == 2
    assert "offbeat sft: refused: warmup.steps: 0; supervised" in capsys.readouterr().err


@pytest.mark.slow
def test_a_refusal_comes_before_ray_and_vllm():
    code = (
        "import sys; from offbeat_recipes.cli import train; code = train.main(['trainer.group_size=1']);"
        "print(sorted({'ray', 'vllm', 'offbeat_recipes.run.commands'} & set(sys.modules))); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 2
    assert done.stdout.strip() == "[]"


@pytest.mark.spawns
def test_the_first_word_comes_before_the_libraries_and_ctrl_c_is_answered_there(tmp_path: Path):
    keys, screen = pty.openpty()
    program = (
        f"import sys; from offbeat_recipes.cli.train import main; sys.exit(main(['run_dir={tmp_path}/run']))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdin=screen, stdout=screen, stderr=screen)
    os.close(screen)
    said = b""
    try:
        while b"checking" not in said:
            said += os.read(keys, 4096)
        process.send_signal(signal.SIGINT)
        assert process.wait(600) == 130
        with suppress(OSError):  # what a terminal says whose other side is closed
            while more := os.read(keys, 4096):
                said += more
    finally:
        process.kill()
        process.wait()
        os.close(keys)
    assert said.decode().splitlines()[-1] == "offbeat train: stopped before anything was started"
    assert "Traceback" not in said.decode()
    assert not (tmp_path / "run").exists()


def test_a_ctrl_c_that_a_library_swallows_is_answered_before_anything_starts(monkeypatch, capsys, tmp_path):
    facts = _checked.gather_facts

    def swallows(config):
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return facts(config)

    monkeypatch.setattr(_checked, "gather_facts", swallows)
    before = signal.getsignal(signal.SIGINT)
    assert train.main([f"run_dir={tmp_path / 'run'}"]) == 130
    assert capsys.readouterr().err.endswith("offbeat train: stopped before anything was started\n")
    assert not (tmp_path / "run").exists()
    assert signal.getsignal(signal.SIGINT) is before
