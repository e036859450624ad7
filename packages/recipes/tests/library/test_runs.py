"""What was written for others trains by one command.

A reward file of verl, one of TRL, a game of gymnasium's interface; reasoning-gym, textarena and an MCP server as they are.
"""

import gzip
import json
import signal
import string
import sys
import time

import pytest

from offbeat_recipes.tasks.base import make_task
from offbeat_recipes.tasks.chars import CharModelShape, char_model_folder
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
    lines = train(
        tmp_path, f"model.path={model}", f"task.train_path={rows}", "task.max_prompt_tokens=16", "rollout.max_model_len=64",
        "sampling.max_tokens=8", "trainer.steps=2", shared_ray, "task=file", *(one.format(file=file) for one in SETTINGS[whose]),
    )  # fmt: skip
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["buffer/unscored_completions"] == 0 for line in lines)
    assert any(line["reward/max"] > 0 for line in lines)


def train(folder, *words):
    """Train a small run by one command; return its metrics."""
    words = [
        *words, f"run_dir={folder}/run", "rollout=hf", "trainer.prompts_per_step=2", "trainer.group_size=4",
        "trainer.validation_prompts=0", "reward.timeout_s=600",
    ]  # fmt: skip
    Command("train", words, folder / "log").succeed(RUN_TIMEOUT_S)
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def tiny(folder, alphabet, template=None):
    """Return the folder of a tiny model that reads and writes the characters of `alphabet`."""
    shape = CharModelShape(
        alphabet=alphabet,
        hidden_size=64,
        num_layers=2,
        num_heads=2,
        intermediate_size=128,
        max_positions=2048,
    )
    model = char_model_folder(shape, folder, 0)
    if template is not None:
        (model / "chat_template.jinja").write_text(template)
    return model


def test_a_dataset_of_reasoning_gym_trains_by_one_command_level_by_level(reasoning_gym, tmp_path, shared_ray):
    lines = train(
        tmp_path, "task=offbeat_recipes.library.reasoning:ReasoningGym", "task.dataset=chain_sum", "task.level_steps=[1,2]",
        "task.max_prompt_tokens=256", f"model.path={tiny(tmp_path, string.printable)}", "warmup.steps=20", "warmup.batch_size=16",
        "warmup.lr=3e-3", "rollout.max_model_len=300", "sampling.max_tokens=8", "trainer.steps=3", shared_ray,
    )  # fmt: skip
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["buffer/unscored_completions"] == 0 for line in lines)
    assert any(line["reward/max"] > 0 for line in lines)


def rows_of(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_game_of_textarena_trains_by_one_command(textarena, tmp_path, shared_ray):
    rows = rows_of(tmp_path, {"prompt": "play"}, {"prompt": "game"})
    model = tiny(tmp_path, f"{string.digits}{string.ascii_lowercase} \n")  # often a number
    lines = train(
        tmp_path, "task=file", f"task.train_path={rows}", f"model.path={model}", "environment.max_turns=4",
        "environment.path=offbeat_recipes.library.games:TextArena", "environment.args.game=GuessTheNumber-v0",
        "environment.args.max_number=9", "environment.max_tokens=1500", "task.max_prompt_tokens=16", f"sampling.stop={[*string.digits]}".replace("'", '"'),
        "sampling.max_tokens=8", "rollout.max_model_len=1536", "trainer.steps=2", shared_ray,
    )  # fmt: skip
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["trajectory/turns_extended"] > 0 == line["trajectory/turns_forked"] for line in lines)
    assert all("reward/invalid_moves_mean" in line for line in lines)
    assert any(line["reward/max"] > 0 for line in lines)


MCP = """
from mcp.server import MCPServer

server = MCPServer("sums")

@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

server.run(transport="stdio")
"""
CALL = '<tool_call>{"name":"add","arguments":{"a":2,"b":3}}</tool_call>'
TEMPLATE = "{% for one in messages %}[{{ one.role }}]{{ one.content }}~{% endfor %}[assistant]"


def test_a_server_of_mcp_trains_by_one_command(tmp_path, shared_ray):
    (tmp_path / "server.py").write_text(MCP)
    (tmp_path / "right.py").write_text("def right(completion):\n    return float('[tool]5' in completion)\n")
    rows = rows_of(tmp_path, *({"prompt": f"{one}?", "answer": CALL} for one in string.ascii_letters))
    lines = train(
        tmp_path, "task=file", f"task.train_path={rows}", f"model.path={tiny(tmp_path, string.printable, TEMPLATE)}",
        f"task.reward={tmp_path}/right.py:right", "environment.path=offbeat_recipes.library.tools:McpTools",
        f"environment.args.command=[{sys.executable},{tmp_path}/server.py]", "environment.reward_from=task", "environment.max_turns=2",
        "environment.max_tokens=256", "warmup.steps=150", "warmup.batch_size=8", "warmup.lr=3e-3", "rollout.max_model_len=512",
        "sampling.max_tokens=80", "trainer.steps=2", shared_ray,
    )  # fmt: skip
    assert [line["step"] for line in lines] == [1, 2]
    assert max(line["trajectory/turns_mean"] for line in lines) > 1
    assert max(line["reward/max"] for line in lines) == 1, "the server's answer is read"
