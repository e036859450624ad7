"""A taskset of verifiers v1, unmodified, in an environment of its own: what is trained is what its renderer asked for."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat_recipes.library.verifiers import Verifiers
from offbeat_recipes.testing import Command, ScriptedReplicas
from offbeat_rollout import SamplingParams
from offbeat_trainer import Prompt
from offbeat_trainer.errors import EnvironmentFailed

pytestmark = [pytest.mark.spawns, pytest.mark.deep]

SCRIPT = Path(__file__).parents[2] / "src/offbeat_recipes/library/scripts/verifiers.py"
RUN_TIMEOUT_S = 1200.0
SAMPLING = SamplingParams(max_tokens=40, temperature=1.0, seed=3)
TASKSET = """
import os
import openai
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str = ""

class Sum(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def has_it(self, trace):
        return float(self.data.answer in "".join(one.content or "" for one in trace.assistant_messages))

    @vf.reward
    async def is_short(self, trace):
        return 0.25

class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for number in range(8):
            yield Sum(Data(prompt=f"{number} and {number}", answer=str(2 * number)), self.config.task)

class TwiceConfig(vf.HarnessConfig):
    how: str = "well"

class Twice(vf.Harness[TwiceConfig]):
    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        print("said aloud")
        if self.config.how == "dies":
            os._exit(3)
        if self.config.how == "raises":
            raise ValueError("planted")
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            talk = [{"role": "user", "content": data.prompt}]
            for _ in range(2):
                answer = await client.chat.completions.create(model=ctx.model, messages=talk)
                talk += [{"role": "assistant", "content": answer.choices[0].message.content or ""}, {"role": "user", "content": "again"}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

__all__ = ["Sums", "Twice"]
"""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>", "<unk>")  # fmt: skip


def qwen_like(folder):
    """Write a tiny model whose tokenizer of bytes has the special tokens of Qwen3; return its tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({token: place for place, token in enumerate(alphabet)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens([*SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    Qwen2ForCausalLM(shape).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="module")
def python(own_python):
    return own_python("verifiers==0.4.0", "httpx", "transformers")


@pytest.fixture
def taskset(tmp_path, monkeypatch):
    (tmp_path / "sums.py").write_text(TASKSET)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def args(python, how="well"):
    agent = {"runtime": {"type": "subprocess"}, "harness": {"id": "sums", "how": how}}
    return {"taskset": "sums", "command": [str(python)], "renderer": {"name": "qwen3"}, "agent": agent}


def rows(*command):
    said = subprocess.run([*command, SCRIPT, "sums"], capture_output=True, text=True, check=True, timeout=300)
    return [json.loads(line) for line in said.stdout.splitlines()]


async def test_what_a_taskset_is_answered_is_what_is_trained_of_it(python, taskset):
    policy = ScriptedReplicas(qwen_like(taskset / "model"), "6<|im_end|>", "no<|im_end|>")
    found = rows(python)
    assert found[3] == {"idx": 3, "prompt": "3 and 3", "answer": "6"}
    harness = Verifiers(policy.setup(), **args(python))
    prompt = Prompt(uid="a", text="", token_ids=(1,), data=found[3])
    try:
        group = await harness.run(prompt, SAMPLING, 3)
    finally:
        await harness.close()
    assert len(group.trajectories) == 3
    assert max(score.reward for score in group.scores) == 2.25
    assert {tuple(sorted(score.parts)) for score in group.scores} == {("has_it", "is_short")}
    for trajectory in group.trajectories:
        (row,) = trajectory.rows
        assert policy.text(row.context) == "<|im_start|>user\n3 and 3<|im_end|>\n<|im_start|>assistant\n"
        first, second = (policy.text(turn.completion.token_ids) for turn in row.turns)
        assert (
            policy.text(row.token_ids)
            == f"{first}\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n{second}"
        )
        assert policy.text(row.token_ids[row.trained]) == first + second


async def test_by_uv_and_the_script_s_own_header_with_the_harness_of_verifiers_that_asks_once(
    fetched, taskset
):
    fetched(["uv sync"], ["sync", "-q", "--script", SCRIPT])
    found = rows("uv", "run", "-q", "--script")
    policy = ScriptedReplicas(qwen_like(taskset / "model"), "6<|im_end|>")
    agent = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}
    harness = Verifiers(policy.setup(), taskset="sums", renderer={"name": "qwen3"}, agent=agent)
    try:
        group = await harness.run(Prompt(uid="a", text="", token_ids=(1,), data=found[3]), SAMPLING, 2)
    finally:
        await harness.close()
    assert [score.parts for score in group.scores] == [{"has_it": 2.0, "is_short": 0.25}] * 2
    (row,) = group.trajectories[0].rows
    assert policy.text(row.context) == "<|im_start|>user\n3 and 3<|im_end|>\n<|im_start|>assistant\n"
    assert policy.text(row.token_ids) == "6<|im_end|>"


async def test_a_process_that_names_no_port_is_ended_and_told(tmp_path, monkeypatch):
    monkeypatch.setattr(Verifiers, "start_timeout_s", 10.0)
    hangs = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    policy = ScriptedReplicas(qwen_like(tmp_path / "model"), "6<|im_end|>")
    harness = Verifiers(policy.setup(), taskset="sums", command=[sys.executable, "-c", hangs])
    try:
        with pytest.raises(EnvironmentFailed, match="named no port within 10 s"):
            await harness.run(Prompt(uid="a", text="", token_ids=(1,), data={}), SAMPLING, 1)
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 0)
    finally:
        await harness.close()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", "ValueError: planted"),
        ("dies", "the process of verifiers broke off"),
        ("absent", "the process of verifiers ended"),
    ],
)
async def test_an_episode_that_fails_over_there_says_why_and_the_next_one_is_played(
    python, taskset, how, words
):
    policy = ScriptedReplicas(qwen_like(taskset / "model"), "6<|im_end|>")
    harness = Verifiers(policy.setup(), **args(python, how))
    if how == "absent":
        harness._settings["taskset"] = {"id": "absent"}
    prompt = Prompt(uid="a", text="", token_ids=(1,), data={"prompt": "3 and 3", "answer": "6"})
    try:
        for _ in range(2):  # the second meets a process of its own
            with pytest.raises(EnvironmentFailed, match=words):
                await asyncio.wait_for(harness.run(prompt, SAMPLING, 1), 300)
    finally:
        await harness.close()


@pytest.mark.ray
def test_a_taskset_of_verifiers_trains_by_one_command(python, taskset, tmp_path, shared_ray):
    qwen_like(tmp_path / "model")
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows(python)))
    words = [
        "task=file", f"task.train_path={data}", f"model.path={tmp_path}/model", f"run_dir={tmp_path}/run", "rollout=hf",
        "environment.rollout=offbeat_recipes.library.verifiers:Verifiers", "environment.args.taskset=sums",
        f"environment.args.command=[{python}]", "environment.args.renderer.name=qwen3", "task.max_prompt_tokens=64",
        "environment.args.agent.runtime.type=subprocess", "environment.args.agent.harness.id=sums", "rollout.max_model_len=256",
        "sampling.max_tokens=8", "trainer.steps=2", "trainer.prompts_per_step=2", "trainer.group_size=4",
        "trainer.validation_prompts=0", shared_ray,
    ]  # fmt: skip
    Command("train", words, tmp_path / "log").succeed(RUN_TIMEOUT_S)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["trajectory/turns_mean"] == 2 for line in lines)
    assert all(line["reward/is_short_mean"] == 0.25 for line in lines)
    assert lines[0]["trajectory/turns_extended"] + lines[0]["trajectory/turns_forked"] == 8
    assert max(line["mismatch/max_abs_logprob_diff"] for line in lines) < 1e-3
    assert "said aloud" in (tmp_path / "run" / "logs" / "rollout.log").read_text()
