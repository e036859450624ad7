"""What was written for others trains by one command: a reward file of verl, one of TRL, a game of gymnasium's interface."""

import gzip
import json
import signal
import time

import pytest

from offbeat_recipes.tasks.base import make_task
from offbeat_recipes.tasks.config import ArithmeticConfig
from offbeat_recipes.testing import Command

pytestmark = [pytest.mark.ray, pytest.mark.deep]

RUN_TIMEOUT_S = 1200.0
FILES = {
    "verl": """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums"
    return {"score": float(str(ground_truth)[0] in solution_str), "index": extra_info["index"]}
""",
    "trl": """
def length(completions, **kwargs):
    return [1.0 / (1 + len(completion)) for completion in completions]
""",
    "gym": """
class Double:
    def reset(self, *, seed=None, options=None):
        self.left = 2
        return "", {}
    def step(self, action):
        self.left -= 1
        return "1+1=", float("2" in action), self.left == 0, False, {}
""",
}
SETTINGS = {
    "verl": ("task.reward={file}:compute_score",),
    "trl": ("task.reward=trl:{file}:length",),
    "gym": ("environment.path=offbeat_recipes.library.games:Gym", "environment.args.make={file}:Double", "environment.max_tokens=32"),
}  # fmt: skip


HARNESS = """
import openai
from offbeat_recipes.library.harness import Harness

class Mine(Harness):
    async def play(self, prompt, endpoint):
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
            one = await client.completions.create(model=endpoint.model, prompt=prompt.text)
            [first] = one.choices
            assert len(first.token_ids) == len(first.policy_versions) == len(first.token_logprobs)
            more = [*one.prompt_token_ids, *first.token_ids, *one.prompt_token_ids[:3]]
            two = await client.completions.create(model=endpoint.model, prompt=more, max_tokens=4)
            assert two.usage.completion_tokens <= 4
        return float("1" in first.text)
"""


def test_a_client_of_openai_plays_against_a_run_while_weights_change(tmp_path, shared_ray):
    (tmp_path / "mine.py").write_text(HARNESS)
    words = [
        "task=arithmetic", f"run_dir={tmp_path}/run", f"environment.rollout={tmp_path}/mine.py:Mine", "mode=fully_async",
        "rollout=hf", "sampling.max_tokens=8", "trainer.steps=6", "trainer.prompts_per_step=2", "trainer.group_size=4", "warmup.steps=10",
        "trainer.validation_prompts=2", "trainer.validate_every=3", "report.trackers=[trajectories]", shared_ray,
    ]  # fmt: skip
    Command("train", words, tmp_path / "log").succeed(RUN_TIMEOUT_S)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["trajectory/turns_mean"] == 2 for line in lines)
    assert max(line["staleness/max"] for line in lines) <= 2
    fresh = [line["mismatch/max_abs_logprob_diff"] for line in lines if not line["staleness/max"]]
    assert fresh
    assert max(fresh) < 1e-3, "what the client was answered is what the trainer computes"
    assert lines[-1]["trajectory/observed_tokens_mean"] == 3


HALFWAY = """
import asyncio, os, pathlib
import openai
from offbeat_recipes.library.harness import Harness

FOLDER = pathlib.Path(__file__).parent

class Mine(Harness):
    async def play(self, prompt, endpoint):
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
            one = await client.completions.create(model=endpoint.model, prompt=prompt.text)
            (FOLDER / "halfway").touch()
            await asyncio.sleep(0.3)
            await client.completions.create(model=endpoint.model, prompt=[*one.prompt_token_ids, *one.choices[0].token_ids, 5])
            await client.completions.create(model=endpoint.model, prompt="1+1=")
        return float("1" in one.choices[0].text)
"""


@pytest.mark.parametrize("mode", ["sync", "fully_async"])
def test_killed_with_episodes_halfway_a_run_loses_none_and_trains_none_twice(mode, tmp_path, shared_ray):
    (tmp_path / "mine.py").write_text(HALFWAY)
    ends = []
    for name in ("undisturbed", "killed"):
        folder = tmp_path / name
        words = [
            "task=arithmetic", f"run_dir={folder}", f"environment.rollout={tmp_path}/mine.py:Mine", f"mode={mode}", "rollout=hf",
            "sampling.max_tokens=6", "trainer.steps=4", "trainer.save_every=1", "trainer.prompts_per_step=2", "trainer.group_size=2",
            "warmup.steps=2", "trainer.validate_every=0", "trainer.validation_prompts=2", "report.trackers=[trajectories]", shared_ray,
        ]  # fmt: skip
        if name == "killed":
            first = Command("train", words, tmp_path / "log" / "first")
            first.wait_for_steps(folder / "metrics.jsonl", 2, RUN_TIMEOUT_S)
            (tmp_path / "halfway").unlink(missing_ok=True)
            deadline = time.monotonic() + RUN_TIMEOUT_S
            while not (tmp_path / "halfway").exists():
                assert first.poll() is None, first.complained
                assert time.monotonic() < deadline
                time.sleep(0.02)
            first.signal(signal.SIGKILL)
            first.wait(RUN_TIMEOUT_S)
        Command("train", [*words, "resume=auto"], tmp_path / "log" / name).succeed(RUN_TIMEOUT_S)
        ends.append(trained_in(folder))
    plain, killed = ends
    assert sorted(killed) == [1, 2, 3, 4]
    uids = [uid for step in sorted(killed) for uid, _ in killed[step][::2]]
    assert len(set(uids)) == len(uids) == 8, "no prompt is trained twice"
    assert all(len(rows) == 4 for rows in killed.values()), "and each group is whole"
    if mode == "sync":
        assert killed == plain, "what was begun again came to the same"
    else:
        assert {*uids} == {uid for rows in plain.values() for uid, _ in rows}, "and none is lost"


def trained_in(folder):
    """Return by step what was trained: of each trajectory its prompt and its text, sorted."""
    files = sorted((folder / "trajectories").glob("step_*.jsonl.gz"))
    rows = [json.loads(line) for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]
    return {
        step: sorted((row["uid"], row["completion"]) for row in rows if row["step"] == step)
        for step in {row["step"] for row in rows}
    }


@pytest.mark.parametrize("whose", FILES)
def test_a_file_of_others_trains_by_one_command(whose, tmp_path, shared_ray):
    file, rows = tmp_path / "theirs.py", tmp_path / "rows.jsonl"
    file.write_text(FILES[whose])
    data = [
        {
            "prompt": f"{number}+{number}=",
            "data_source": "sums",
            "reward_model": {"style": "rule", "ground_truth": 2 * number},
            "extra_info": {"index": number},
        }
        for number in range(8)
    ]
    rows.write_text("".join(json.dumps(row) + "\n" for row in data))
    model = make_task(ArithmeticConfig(), "", 0).model_folder(tmp_path / "base", 0)
    words = [
        "task=file", f"task.train_path={rows}", f"model.path={model}", f"run_dir={tmp_path}/run", "task.max_prompt_tokens=16",
        "rollout=hf", "rollout.max_model_len=64", "sampling.max_tokens=8", "trainer.steps=2", "trainer.prompts_per_step=2",
        "trainer.group_size=4", "trainer.validation_prompts=0", shared_ray, *(one.format(file=file) for one in SETTINGS[whose]),
    ]  # fmt: skip
    Command("train", words, tmp_path / "log").succeed(RUN_TIMEOUT_S)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["buffer/unscored_completions"] == 0 for line in lines)
    assert any(line["reward/max"] > 0 for line in lines)
