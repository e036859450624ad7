"""Reward functions that were written for verl and TRL are called as they are there."""

from dataclasses import replace

import pytest

from offbeat_rollout import Completion, Finish
from offbeat_trainer import Group, Prompt, RewardConfig, Trajectory
from offbeat_trainer.errors import PlanRefused
from offbeat_trainer.rollouts.scorer import FunctionScorer, find_reward

pytestmark = pytest.mark.spawns

OF_OTHERS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):  # of verl
    assert not kwargs
    return {"score": float(solution_str == ground_truth), "source": data_source, "more": extra_info}

def accuracy(completions, solution, prompts, **kwargs):  # of TRL
    assert [prompt[-1]["role"] for prompt in prompts] == ["user"] * len(completions)
    return [float(completion[0]["content"] == answer) for completion, answer in zip(completions, solution)]

def plain(completions, prompts, **kwargs):
    return [float(completion.startswith(prompt)) for completion, prompt in zip(completions, prompts)]
"""


def group(how="", texts=("a", "b", "ccc")):
    made = [
        Completion.of(
            request_id=text, token_ids=[ord(one) for one in text], logprobs=[-1.0] * len(text),
            policy_versions=[1] * len(text), finish=Finish.STOP,
        )
        for text in texts
    ]  # fmt: skip
    return Group(
        prompt=Prompt(uid="rows:1", text="q", token_ids=(1,), data={"how": how}),
        trajectories=tuple(map(Trajectory.of, made)),
    )


def decode(token_ids):
    return "".join(map(chr, token_ids))


@pytest.mark.parametrize(
    ("name", "row"),
    [
        (
            "compute_score",
            {
                "data_source": "x",
                "reward_model": {"style": "rule", "ground_truth": "ccc"},
                "extra_info": {"index": 1},
            },
        ),
        ("compute_score", {"data_source": "x", "ground_truth": "ccc"}),
        ("trl:accuracy", {"prompt": [{"role": "user", "content": "?"}], "solution": "ccc"}),
    ],
)
async def test_functions_that_were_written_for_others_are_called_as_they_are_there(tmp_path, name, row):
    (tmp_path / "others.py").write_text(OF_OTHERS)
    mark, _, function = name.rpartition(":")
    path = f"{mark and mark + ':'}{tmp_path}/others.py:{function}"
    config = RewardConfig(concurrency=1, timeout_s=600.0, max_attempts=1)
    made = FunctionScorer(
        [find_reward(path, 1.0, row)], config, decode=decode, correct_at=1, log=tmp_path / "log"
    )
    asked = group()
    scored = await made.score(replace(asked, prompt=replace(asked.prompt, data=row)))
    await made.close()
    assert [score.reward for score in scored.scores] == [0, 0, 1]


async def test_what_others_do_not_call_so_is_refused_or_is_text(tmp_path):
    (tmp_path / "others.py").write_text(OF_OTHERS)
    with pytest.raises(PlanRefused, match="neither a column ground_truth nor reward_model"):
        find_reward(f"{tmp_path}/others.py:compute_score", 1.0, {"data_source": "x"})
    found = find_reward(f"trl:{tmp_path}/others.py:plain", 1.0, {"prompt": "c"})
    asked = group()
    (call,) = found.calls(
        replace(asked, prompt=replace(asked.prompt, text="c", data={"prompt": "c"})), ["ccc"] * 3
    )
    assert (call["completions"], call["prompts"]) == (["ccc"] * 3, ["c"] * 3), (
        "prompts of plain text stay text in TRL, too"
    )
