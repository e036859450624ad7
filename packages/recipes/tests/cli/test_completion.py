"""What Tab makes of a line: by the function that answers, and by bash with the script that asks it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat_recipes.cli.main import candidates, main

PRESSED = 'source <(offbeat completion bash); COMP_LINE=$1 COMP_POINT=${#1}; compopt() { echo "$*"; }; _offbeat; printf "%s\\n" "${COMPREPLY[@]}"'


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("offbeat tr", ["train"]),
        ("offbeat train rollout=", ["rollout=hf", "rollout=sglang", "rollout=vllm"]),
        ("offbeat train seed=3 mode=s", ["mode=sync"]),
        ("offbeat plan trainer.ste", ["trainer.steps=", "trainer.step_timeout_s="]),
        ("offbeat train engine.packing=", ["engine.packing=true", "engine.packing=false"]),
        (
            "offbeat sft algorithm.kl_estimator=k",
            [f"algorithm.kl_estimator={name}" for name in ("k1", "k2", "k3", "k3_plus")],
        ),
        ("offbeat settings --explain trainer.ep", ["trainer.epochs"]),
        ("offbeat report ru", []),
        ("offbeat train trainer.steps=", []),
        ("offbeat nothing x", []),
    ],
)
def test_the_last_word_of_a_line_becomes(line, found):
    assert candidates(line) == found


@pytest.mark.spawns
def test_bash_takes_what_stands_behind_the_last_equals_sign(tmp_path):
    program = tmp_path / "offbeat"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m offbeat_recipes.cli.main "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}

    def pressed(line: str) -> list[str]:
        bash = [str(shutil.which("bash")), "-c", PRESSED, "bash", line]
        done = subprocess.run(
            bash, env=environment, cwd=Path.home(), capture_output=True, text=True, timeout=600, check=True
        )
        assert not done.stderr
        return done.stdout.splitlines()

    assert pressed("offbeat sf") == ["sft"]
    assert pressed("offbeat train rollout=") == ["hf", "sglang", "vllm"]
    assert pressed("offbeat train trainer.epo") == ["-o nospace", "trainer.epochs="]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_ask_the_command(shell, capsys):
    assert main(["completion", shell]) == 0
    assert "offbeat completion --of" in capsys.readouterr().out
