"""Offbeat from Python: scripts, event loops and threads make the runs that commands make, and are refused in the same words."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import nbformat
import pytest
import yaml
from nbclient import NotebookClient

import offbeat_recipes
from offbeat_recipes import RecipeError, RunRefused, SettingError, TaskError, Trainer
from offbeat_recipes.report.inspect_log import write_inspect
from offbeat_recipes.run.folder import make_way
from offbeat_recipes.tasks.arithmetic import ArithmeticTask
from offbeat_recipes.tasks.base import make_task
from offbeat_recipes.tasks.config import ArithmeticConfig
from offbeat_trainer import Score
from offbeat_trainer.data.loading import load_object, save_object

RUN_TIMEOUT_S = 1200.0
PAGE = Path(__file__).parents[3] / "docs" / "python.md"
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
SCRIPT = """
import asyncio, json, os, sys, threading
from dataclasses import dataclass
from offbeat_recipes import RunFailed, RunFolderError, Trainer
from offbeat_trainer import Feedback
from offbeat_trainer.algorithms.grpo import Grpo
from offbeat_trainer.config import GrpoConfig
import beside  # a module of the user's own, in the script's folder, which is not the working directory

model, folder = sys.argv[1:]
rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
small = dict(rollout="hf", sampling={"max_tokens": 6},
             **{"trainer.prompts_per_step": 2, "trainer.group_size": 2, "cluster.object_store_mib": 256})
handlers, threads = [*__import__("logging").getLogger().handlers], threading.active_count()

bonus = 0.5
def close(completion, answer):  # a closure over what the script has, and over a module of its own
    return beside.weight(answer) * (bonus + (completion[:1] == answer[:1]))

result = Trainer(model=model, reward=[close, lambda completion: 0.25], data=(row for row in rows),
                 validation={"easy": rows[:3], "hard": rows[20:]}, run_dir=f"{folder}/a", **{**small, "trainer.steps": 1}).train()
assert result.accuracy is None and result.metrics["reward/object_mean"] == 0.25, result.metrics
assert 0.5 <= result.metrics["reward/close_mean"] <= 1.5, result.metrics
easy, hard = (result.metrics[f"reward/validation_{name}"] for name in ("easy", "hard"))
assert abs(result.metrics["reward/validation"] - (3 * easy + 5 * hard) / 8) < 1e-6, result.metrics
assert len(result.history) == result.summary["steps"] == 1
assert result.report.is_file() and (result.model / "config.json").is_file()
assert len(result.generate(["1+1=", "2+3="], max_tokens=3)) == 2

bonus = 2.5
async def main():  # it goes on, with the reward as it is now, in a running event loop, and in a thread
    return Trainer(model=model, reward=[close, lambda completion: 0.25], data=rows,
                   validation={"easy": rows[:3], "hard": rows[20:]}, run_dir=f"{folder}/a", resume="auto", **{**small, "trainer.steps": 2}).train()
again = asyncio.run(main())
assert [line["step"] for line in again.history] == [1, 2]
assert 2.5 <= again.metrics["reward/close_mean"] <= 3.5, again.metrics

try:
    Trainer(model=model, reward=[close, lambda completion: 0.25], data=rows[1:],
            validation={"easy": rows[:3], "hard": rows[20:]}, run_dir=f"{folder}/a", resume="auto", **{**small, "trainer.steps": 3}).train()
except RunFolderError as error:
    assert "began with other rows of `train`" in str(error)
else:
    raise AssertionError("it goes on with other rows")

class Echo:
    def reset(self, prompt, seed):
        self.turns = 0
        return "2+2="
    def step(self, action):
        self.turns += 1
        return Feedback(observation="1+1=", reward=1.0, done=self.turns == 2)

@dataclass(frozen=True, slots=True, kw_only=True)
class DoubleConfig(GrpoConfig):
    factor: float = 2.0

class Double(Grpo):
    Config = DoubleConfig
    def targets(self, groups):
        return {"advantages": self.config.factor * super().targets(groups)["advantages"]}

talked = []
thread = threading.Thread(target=lambda: talked.append(Trainer(
    model=model, data=rows, environment=Echo, algorithm=Double, run_dir=f"{folder}/b",
    report={"trackers": ["trajectories"]},
    **{**small, "trainer.steps": 1, "environment.max_tokens": 64, "algorithm.factor": 3.0}).train()))
thread.start()
thread.join()
assert talked[0].metrics["trajectory/turns_max"] == talked[0].metrics["reward/max"] == 2, talked[0].metrics

def broken(completion):
    raise RuntimeError("no judge")
try:
    Trainer(model=model, reward=broken, data=rows, run_dir=f"{folder}/c", **{**small, "trainer.steps": 1}).train()
except RunFailed as error:
    assert "no judge" in str(error) and str(error.folder) == f"{folder}/c", error
else:
    raise AssertionError("a run whose every reward fails ends well")
assert [*__import__("logging").getLogger().handlers] == handlers
print("all well")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(
        make_task(ArithmeticConfig(), "", 0).model_folder(tmp_path_factory.mktemp("model") / "base", 0)
    )


@pytest.mark.ray
@pytest.mark.slow
def test_a_script_trains_goes_on_in_an_event_loop_and_in_a_thread_and_hears_what_failed(
    tmp_path, model, read_inspect
):
    (tmp_path / "beside.py").write_text("def weight(answer):\n    return 1.0\n")
    (tmp_path / "script.py").write_text(SCRIPT)  # without `if __name__ == "__main__"`
    (tmp_path / "elsewhere").mkdir()
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), model, str(tmp_path / "runs")],
        capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False, cwd=tmp_path / "elsewhere",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.endswith("all well\n")
    assert "Trainer: note: the run goes on with close, <lambda> as given now" in done.stderr
    folder = tmp_path / "runs" / "a"
    assert (folder / "objects").stat().st_mode & 0o777 == 0o700
    written = yaml.safe_load((folder / "config.yaml").read_text())
    assert written["task"]["reward"] == [
        f"{folder}/objects/close.pkl:close",
        f"{folder}/objects/object.pkl:object",
    ]
    assert [
        json.loads(line) for line in (folder / "objects" / "train.jsonl").read_text().splitlines()
    ] == ROWS
    several = tmp_path / "runs" / "b"
    [log] = read_inspect(write_inspect(several))
    with gzip.open(several / "trajectories" / "step_1.jsonl.gz", "rt") as lines:
        kept = [json.loads(line) for line in lines]
    told = {"policy": "assistant", "environment": "user"}
    for one, found in zip(kept, log["samples"], strict=True):
        turns = [[told[turn["role"]], turn["text"]] for turn in one["turns"]]
        assert found["messages"] == [["user", one["prompt"]], *turns]
        assert found["scores"]["reward"] == one["reward"]
    assert max(len(one["turns"]) for one in kept) == 4, "each side twice"


SESSION = """
import contextlib, io, os, sys
from offbeat_recipes import RunFailed, RunRefused, Trainer
from offbeat_trainer import TrainerError

[folder] = sys.argv[1:]
def trainer(**more):
    small = dict(rollout="hf", task="arithmetic", sampling={"max_tokens": 4}, **{"warmup.steps": 0, "trainer.group_size": 2})
    return Trainer(run_dir=f"{folder}/a", **{**small, "cluster.object_store_mib": 256, **more})

def one(session):
    groups = session.sample(session.task.prompts(session.steps, 2))
    session.train(session.batch(groups))
    session.step()
    session.publish()
    return groups

with trainer().session() as session:
    assert (session.steps, session.version) == (0, 1)
    try:
        session.step()
    except TrainerError as error:
        assert "no gradient to step by" in str(error)
    first = one(session)
    assert (session.steps, session.version) == (1, 2)
    session.save()
assert os.path.exists(f"{folder}/a/final/config.json")

try:
    with trainer(resume="auto").session() as session:
        assert session.steps == 1
        assert [group.prompt.uid for group in one(session)] != [group.prompt.uid for group in first]
        raise LookupError("of my own")
except LookupError as error:
    assert "of my own" in str(error)

said = io.StringIO()
try:
    with contextlib.redirect_stderr(said), trainer(resume="auto", **{"report.console": False}).session() as session:
        import ray, psutil  # which ray brings
        every = psutil.Process().children(recursive=True)
        [rank] = [one for one in every if "TrainWorker" in " ".join(one.cmdline())]
        rank.kill()
        while True:
            session.sample(session.task.prompts(0, 2))
except RunFailed as error:
    assert "training rank 0" in str(error) and said.getvalue() == "", (error, said.getvalue())
else:
    raise AssertionError("a rank died and nothing said so")

try:
    with trainer(**{"trainer.group_size": 1}).session():
        pass
except RunRefused as error:
    assert "trainer.group_size" in str(error)
else:
    raise AssertionError("the plan refuses groups of one")
assert not ray.is_initialized()
print("all well")
"""


@pytest.mark.ray
@pytest.mark.slow
def test_a_session_trains_goes_on_and_says_what_ended_it(tmp_path):
    (tmp_path / "script.py").write_text(SESSION)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "runs")],
        capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.endswith("all well\n")


@pytest.mark.ray
@pytest.mark.slow
def test_the_program_of_the_page_runs(tmp_path, model):
    [program] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (tmp_path / "program.py").write_text(program.replace('"models/qwen"', repr(model)))
    done = subprocess.run(
        [sys.executable, "program.py"], capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False, cwd=tmp_path
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(
        r"^0\.\d+ \d\.\d+ runs/file/final runs/file/report.html\n\['.*'\]$", done.stdout, flags=re.MULTILINE
    )


@pytest.mark.ray
@pytest.mark.deep
def test_it_runs_in_a_notebook(tmp_path, model):
    [program] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    parts = program.replace('"models/qwen"', repr(model)).split("\n\n")
    made = nbformat.v4.new_notebook()
    made.cells = [
        nbformat.v4.new_code_cell(part)
        for part in (*parts, "type(result.generate(['1+1='], max_tokens=2)[0])")
    ]
    live = []

    class Client(NotebookClient):
        def process_message(self, msg, cell, cell_index):
            if msg["msg_type"] == "update_display_data":
                live.append(msg["content"]["data"]["text/plain"])
            return super().process_message(msg, cell, cell_index)

    Client(made, timeout=int(RUN_TIMEOUT_S), resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert any("start" in line for line in live), "the live line is an output that is written anew"
    assert live[-1] == "", "and goes when the run has ended"
    assert made.cells[-1].outputs[0]["data"]["text/plain"] == "str"
    said = "".join(one.get("text", "") for cell in made.cells for one in cell.outputs)
    assert "runs/file/report.html" in said


def test_the_page_counts_few_changed_lines_from_trl():
    [changes] = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert sum(line.startswith("+") for line in changes.splitlines()) <= 5


def right(completion, answer):
    return float(completion == answer)


def trainer(model, **settings):
    told = {"reward": right, "data": ROWS, "rollout": "hf", "trainer": {"steps": 1, "prompts_per_step": 2}}
    return Trainer(model=model, **{**told, **settings})


def test_a_plan_prints_itself_and_starts_nothing(model, tmp_path):
    plan = offbeat_recipes.plan(
        model=model, reward=right, data=ROWS, rollout="hf", trainer={"steps": 1}, run_dir=tmp_path / "run"
    )
    assert plan.refusals == []
    assert "Placement" in repr(plan)
    assert not (tmp_path / "run").exists()


def test_a_plan_says_what_a_recipe_sets(model, tmp_path):
    told = {"recipe": "trl-1.16", "algorithm": {"name": "grpo", "clip_high": 0.3}}
    plan = trainer(model, run_dir=tmp_path / "run", **told).plan()
    assert "recipe=trl-1.16 sets algorithm.std_epsilon=0.0001 algorithm.correction=mask" in repr(plan)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"trainer": {"stesp": 1}}, SettingError, "did you mean"),
        ({"trainer.steps": "many"}, SettingError, r"trainer\.steps"),
        ({"rollout": "vlm"}, SettingError, "expected one of hf, sglang, vllm"),
        (
            {"data": {"train": ROWS, "test": ROWS}},
            RecipeError,
            "expected rows, got train, test by name; give one",
        ),
        ({"data": 5}, RecipeError, "expected a path or rows, .* got int"),
        ({"data": ["1+1="]}, RecipeError, r"data, row 1: expected a mapping .* got '1\+1='"),
        ({"data": [{"prompt": {1, 2}}]}, RecipeError, "data, row 1: cannot be written as JSON"),
        ({"algorithm": dict}, SettingError, r"algorithm\.name.*is no class of `offbeat_trainer.Algorithm`"),
        ({"reward": 3}, TaskError, "expected a function, a class or a path .* got 3"),
        (
            {"reward": partial(right, lock=sys.stdout)},
            TaskError,
            "cannot be sent to the processes that call it",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_the_words_of_the_commands(model, tmp_path, settings, error, words):
    with pytest.raises(error, match=words):
        trainer(model, **{"run_dir": tmp_path / "run", **settings}).train()
    assert not (tmp_path / "run").exists()


def test_what_the_plan_refuses_is_raised_before_anything_starts(model, tmp_path):
    with pytest.raises(RunRefused, match=r"task\.reward: not given"):
        trainer(model, run_dir=tmp_path / "run", reward=None).train()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"reward": None}, "task.reward: not given"),
        ({"reward": lambda completions, nothing: []}, "asks for 'nothing'"),
        ({"data": [{"question": "1+1="}]}, "no 'prompt'"),
        (
            {"trainer": {"steps": 1, "prompts_per_step": 26}},
            "trainer.prompts_per_step: 26 different prompts a step",
        ),
        ({"environment": dict}, "has no `reset`"),
    ],
)
def test_a_plan_says_what_is_refused(model, tmp_path, settings, words):
    plan = trainer(model, run_dir=tmp_path / "run", **settings).plan()
    assert re.search(words, "\n".join(plan.refusals))
    assert words.split()[0] in repr(plan) or words in repr(plan)


def test_epochs_are_as_many_steps_as_rows_fill(model, tmp_path):
    plan = trainer(model, run_dir=tmp_path / "run", trainer={"epochs": 3, "prompts_per_step": 8}).plan()
    assert (plan.refusals, plan.plan.batch.steps) == ([], 3 * (25 // 8))


def test_epochs_of_a_task_that_counts_no_prompts_are_refused(model, tmp_path):
    sorts = f"{PAGE.parents[1]}/examples/sort_digits.py:SortDigits"
    asked = Trainer(
        model=model,
        task=sorts,
        rollout="hf",
        run_dir=str(tmp_path / "run"),
        trainer={"epochs": 2, "prompts_per_step": 2},
    )
    [refusal] = [one for one in asked.plan().refusals if "epochs" in one]
    assert "trainer.epochs" in refusal
    assert "the task has no number of prompts" in refusal
    with pytest.raises(TaskError, match=r"trainer\.epochs: the task has no number of prompts"):
        asked.train()
    assert not (tmp_path / "run").exists()


def test_a_task_may_be_made_already(tmp_path):
    class Tens(ArithmeticTask):
        """Sums of tens."""

        offset = 0

        def score(self, prompt, trajectory):
            return Score(reward=float(self.offset), correct=None)

    made = Tens(ArithmeticConfig(level=1), "", 7)
    made.offset = 10
    asked = Trainer(task=made, rollout="hf", run_dir=str(tmp_path / "run"), trainer={"steps": 2})
    assert asked.plan().refusals == []
    config = asked._config(tmp_path / "objects")
    there = make_task(config.task, "", config.seed)
    assert [one.text for one in there.prompts(0, 4)] == [one.text for one in made.prompts(0, 4)]
    assert there.score(None, None).reward == 10


def test_settings_come_nested_dotted_and_as_sections(model, tmp_path):
    made = trainer(
        model,
        task={"columns": {"prompt": "prompt"}, "max_prompt_tokens": 99},
        algorithm={"name": "rloo", "kl_coef": 0.5},
        **{
            "report.trackers": [],
            "reward.timeout_s": 5,
            "run_dir": tmp_path / "a'b c",
            "trainer": {"steps": 7},
        },
    )._config(tmp_path)
    assert (made.task.name, made.task.max_prompt_tokens, made.algorithm.name) == ("file", 99, "rloo")
    assert (made.algorithm.kl_coef, made.report.trackers, made.reward.timeout_s) == (0.5, (), 5)
    assert (made.run_dir, made.trainer.steps, made.trainer.validation_prompts) == (f"{tmp_path}/a'b c", 7, 0)
    plain = Trainer(task="arithmetic")._config(tmp_path)
    assert plain.trainer.validation_prompts > 0


def test_an_object_in_a_pickle_is_the_same_one_each_time_and_a_new_one_once_it_is_replaced(tmp_path):
    def give(value):
        return lambda: value

    save_object(give(1), tmp_path / "f.pkl")
    first = load_object(f"{tmp_path}/f.pkl:f")
    assert first() == 1
    assert load_object(f"{tmp_path}/f.pkl:f") is first
    save_object(give("another"), tmp_path / "f.pkl")
    assert load_object(f"{tmp_path}/f.pkl:f")() == "another"


def test_a_run_that_is_moved_aside_keeps_its_own_objects(tmp_path):
    folder = tmp_path / "a b"
    (folder / "objects").mkdir(parents=True)
    settings = {
        "task": {
            "reward": [f"{folder}/objects/f.pkl:f", "mine.py:g"],
            "train_path": f"{folder}/objects/train.jsonl",
        }
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    make_way(folder, resume=True)
    assert yaml.safe_load((folder / "config.yaml").read_text()) == settings
    make_way(folder, resume=False)
    moved = yaml.safe_load((tmp_path / "a b.1" / "config.yaml").read_text())["task"]
    assert moved["reward"] == [f"{tmp_path}/a b.1/objects/f.pkl:f", "mine.py:g"]
    assert moved["train_path"] == f"{tmp_path}/a b.1/objects/train.jsonl"
    assert not folder.exists()
