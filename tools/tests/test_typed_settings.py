"""What an editor and a type checker know of `Trainer`: its settings, nested and dotted, and nothing that is none."""

from __future__ import annotations

import inspect
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat_recipes import Trainer

ROOT = Path(__file__).resolve().parents[2]
TOOL = str(ROOT / "tools" / "make_typed_settings.py")
DEADLINE_S = 300
RIGHT = """
import pathlib
from typing import Any
from offbeat_recipes import Trainer, plan
from offbeat_recipes.tasks.base import RunnableTask

def close(completion: str, answer: str) -> float:
    return float(completion == answer)

class Mine: ...

def all_of(made: RunnableTask, given: dict[str, Any]) -> None:
    Trainer(model="models/qwen", reward=close, data=[{"prompt": "1+1="}], validation={"easy": "a.jsonl"}, trainer={"steps": 5})
    Trainer(model=pathlib.Path("models"), reward=[close, lambda completion: 0.5, "mine.py:reward"], run_dir=pathlib.Path("runs"))
    Trainer(task=made, algorithm=Mine, environment=Mine, rollout="hf", seed=3, resume="auto", hardware="cpu", recipe="trl-1.16")
    Trainer(model={"path": "a", "dtype": "bfloat16"}, task={"name": "gsm8k", "answer": "strict"}, mode={"name": "fully_async"})
    Trainer(engine={"optimizer": {"lr": 1e-5}, "freeze": ["model.embed"]}, warmup={"lr": None}, environment={"args": {"size": 3}})
    Trainer(algorithm={"name": "mine.py:Mine", "of_its_own": 0.5}, rollout={"name": "hf", "max_model_len": 64})
    Trainer(**{"trainer.steps": 5})
    Trainer(trainer={"steps": 5}, mode="fully_async", **{"engine.optimizer.lr": 1, "report.trackers": ["wandb"], "task.name": "mine.py:Mine"})
    Trainer(model="models/qwen", **given)
    refusals: list[str] = plan(model="models/qwen", trainer={"steps": 5}, seed=3).refusals
"""
WRONG = {
    'trainer={"stpes": 5}': '"stpes" is an undefined item in type "TrainerSettings"',
    'trainer={"steps": "5"}': '"Literal[\'5\']" is not assignable to "int"',
    'tranier={"steps": 5}': 'No parameter named "tranier"',
    'engine={"optimizer": {"rl": 1e-5}}': "EngineSettings",
    'algorithm={"clip": 0.2}': "AlgorithmSettings",
    'task={"answer": "stric"}': "TaskSettings",
    'rollout="vlm"': "'vlm'",
    'report={"trackers": "wandb"}': "ReportSettings",
    "reward=0.5": '"float"',
    '**{"trainer.stpes": 5}': '"int"',
    '**{"trainer.steps": "5"}': '"str"',
    'trainer={"steps": 5}, **{"trainer.placement": "separate"}': '"str"',
}
COMPLETED = {
    "Trainer(tra|": {"trainer="},
    'Trainer(trainer={"|': {'"steps"', '"group_size"', '"epochs"'},
    'Trainer(engine={"optimizer": {"|"}})': {'"lr"', '"schedule"'},
    'Trainer(task={"|"})': {'"name"', '"train_path"'},
    'Trainer(rollout="|")': {'"hf"', '"vllm"'},
    'Trainer(model="a", **{"sampling.|"})': {'"sampling.temperature"', '"sampling.max_tokens"'},
}
"""What is offered at the bar, among others that begin so."""


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """A folder where a user types, with the packages on the path."""
    told = {"extraPaths": [*map(str, sorted(ROOT.glob("packages/*/src")))], "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(told))
    return tmp_path


def test_the_file_is_what_the_settings_are(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", [TOOL, "--check"])
    made = runpy.run_path(TOOL, run_name="__main__")
    assert [*made["OBJECTS"], "settings"] == [*inspect.signature(Trainer).parameters]
    stale = tmp_path / "typed.pyi"
    stale.write_text(made["stub"]().replace("steps: int", "stpes: int"))
    monkeypatch.setattr(sys, "argv", [TOOL, "--check", "--stub", str(stale)])
    with pytest.raises(SystemExit, match=r"run tools/make_typed_settings\.py"):
        runpy.run_path(TOOL, run_name="__main__")


@pytest.mark.spawns
def test_right_settings_pass_and_wrong_ones_are_reported(user):
    (user / "right.py").write_text(RIGHT)
    calls = [f"Trainer({arguments})" for arguments in WRONG]
    (user / "wrong.py").write_text("\n".join(["from offbeat_recipes import Trainer", *calls]))
    ran = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson"], cwd=user, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )  # fmt: skip
    reported: dict[int, str] = {}
    for found in json.loads(ran.stdout)["generalDiagnostics"]:
        assert Path(found["file"]).name == "wrong.py", found
        line = found["range"]["start"]["line"]
        reported[line] = reported.get(line, "") + found["message"]
    assert list(reported) == [*range(1, len(WRONG) + 1)]
    for line, (arguments, words) in enumerate(WRONG.items(), 1):
        assert words in reported[line], arguments


@pytest.mark.spawns
def test_an_editor_completes_sections_settings_and_choices(user):
    command = [sys.executable, "-m", "pyright.langserver", "--stdio"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        try:
            _ask(server, "initialize", {"rootUri": user.as_uri(), "capabilities": {}})
            _tell(server, "initialized", {})
            for number, (typed, offered) in enumerate(COMPLETED.items()):
                place = {"uri": (user / f"typed{number}.py").as_uri()}
                text = "from offbeat_recipes import Trainer\n" + typed.replace("|", "")
                document = {**place, "languageId": "python", "version": 1, "text": text}
                _tell(server, "textDocument/didOpen", {"textDocument": document})
                position = {"line": 1, "character": typed.index("|")}
                answer = _ask(
                    server, "textDocument/completion", {"textDocument": place, "position": position}
                )
                assert offered <= {item["label"] for item in answer["items"]}, typed
        finally:
            server.kill()


def _tell(server, method, params, **more):
    body = json.dumps({"jsonrpc": "2.0", "method": method, "params": params, **more}).encode()
    server.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
    server.stdin.flush()


def _ask(server, method, params):
    """Return what the language server answers; what it says besides is skipped."""
    _tell(server, method, params, id=1)
    while True:
        length = 0
        while header := server.stdout.readline().strip():
            length = int(header.rpartition(b":")[2]) if header.startswith(b"Content-Length") else length
        message = json.loads(server.stdout.read(length))
        if message.get("id") == 1 and "method" not in message:
            return message["result"]
