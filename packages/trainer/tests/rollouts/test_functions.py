"""What a reward function is called with, and what is refused before anything starts."""

import pytest

from offbeat_rollout import Completion, Finish
from offbeat_trainer import Group, Prompt, Trajectory
from offbeat_trainer.errors import PlanRefused
from offbeat_trainer.rollouts.scorer import find_reward

COLUMNS = {"answer": "4", "level": 2}


def group(*finishes):
    return Group(
        prompt=Prompt(uid="rows:1", text="2+2=", token_ids=(5, 6), data=COLUMNS),
        trajectories=tuple(
            Trajectory.of(Completion.of(
                request_id=str(place), token_ids=[7, place], logprobs=[-1.0, -1.0], policy_versions=[1, 1], finish=finish
            ))
            for place, finish in enumerate(finishes)
        ),
    )  # fmt: skip


@pytest.fixture
def written(tmp_path):
    def write(text, name="mine.py"):
        (tmp_path / name).write_text(text)
        return f"{tmp_path}/{name}"

    return write


def test_one_completion_a_call_by_the_names_of_its_parameters(written):
    path = written("def score(completion, answer, finish, strict=True): return 1.0")
    calls = find_reward(f"{path}:score", 1.0, COLUMNS).calls(group(Finish.STOP, Finish.LENGTH), ["4", "5"])
    assert calls == [
        {"completion": "4", "answer": "4", "finish": "stop"},
        {"completion": "5", "answer": "4", "finish": "length"},
    ]


def test_one_group_a_call_with_lists_as_trl_passes_them(written):
    path = written("def score(prompts, completions, completion_ids, level, **rest): return []")
    reward = find_reward(f"{path}:score", 1.0, COLUMNS)
    assert reward.batched
    [call] = reward.calls(group(Finish.STOP, Finish.STOP), ["4", "5"])
    assert call["prompts"] == ["2+2=", "2+2="]
    assert call["completions"] == ["4", "5"]
    assert call["completion_ids"] == [[7, 0], [7, 1]]
    assert (call["level"], call["answer"]) == ([2, 2], ["4", "4"])
    assert call["rows"] == [COLUMNS, COLUMNS]
    assert call["finishes"] == ["stop", "stop"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def score(completion, answr): ...", r"asks for 'answr'; .* the columns answer, level"),
        (
            "def score(completions, trainer_state, **_): ...",
            "asks for 'trainer_state', which only TRL has; .* prompts",
        ),
        ("def score(prompt, completion, /): ...", "asks for 'prompt'"),
        ("score = 3", "is no function but 3"),
        ("def other(): ...", "has no 'score'"),
        ("def (", "cannot import .* SyntaxError"),
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
    ],
)
def test_what_cannot_be_called_is_refused(written, text, says):
    path = written(text, name=f"refused_{abs(hash(text))}.py")
    with pytest.raises(PlanRefused, match=says):
        find_reward(f"{path}:score", 1.0, COLUMNS)
