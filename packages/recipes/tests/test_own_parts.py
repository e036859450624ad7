"""Rollouts and scorers of one's own, by the path of a class: what is refused, the examples, and a run with both."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from statistics import pvariance

import pytest

from offbeat_recipes.cli._hydra import compose_run
from offbeat_recipes.errors import SettingError
from offbeat_recipes.planning.facts import gather_facts
from offbeat_recipes.tasks.base import make_task
from offbeat_recipes.tasks.config import ArithmeticConfig
from offbeat_recipes.testing import Command
from offbeat_rollout import Completion, Finish, SamplingParams
from offbeat_trainer import Group, Prompt, RewardConfig, Score, ScorerSetup, Timeline, Trajectory, Watchdog
from offbeat_trainer.data.types import UNSCORED
from offbeat_trainer.rollouts.own import RolloutSetup, find_rollout, find_scorer

EXAMPLES = Path(__file__).parents[3] / "examples"
MAJORITY, PODS = f"{EXAMPLES}/majority.py:Majority", f"{EXAMPLES}/pods.py:Pods"
PROMPT = Prompt(uid="p", text="", token_ids=(1,))
RUN_TIMEOUT_S = 1200.0


def group(*texts):
    made = [
        Completion.of(
            request_id=str(place), token_ids=[*map(ord, text)], logprobs=[-1.0] * len(text), policy_versions=[1] * len(text),
            finish=Finish.STOP,
        )
        for place, text in enumerate(texts)
    ]  # fmt: skip
    return Group(prompt=PROMPT, trajectories=tuple(map(Trajectory.of, made)))


class Characters:
    """A task whose tokens are characters."""

    def decode(self, token_ids):
        return "".join(map(chr, token_ids))


async def test_what_most_completions_answer_is_right_and_where_none_agree_nothing_is(tmp_path):
    setup = ScorerSetup(task=Characters(), config=RewardConfig(), log=tmp_path / "log")
    scorer = find_scorer(MAJORITY)(setup)
    scored = await scorer.score(group("1+1=2:2", "so: 2", "I say 3", ":2"))
    assert [one.reward for one in scored.scores] == [1, 1, 0, 1]
    assert (await scorer.score(group("a", "b"))).scored.trajectories == ()
    assert [one.reward for one in (await scorer.score(group("a"))).scores] == [1], (
        "a greedy one of a validation"
    )


async def test_those_are_trained_whose_rewards_differ_most():
    class Scripted:
        """Gives as many completions as it is asked for, and scores them by a list."""

        def __init__(self, rewards):
            self.rewards = rewards

        async def complete(self, prompt, sampling, group_size, begun=(), keep=None):
            return group(*map(str, range(group_size)))

        async def score(self, made):
            scores = [UNSCORED if reward is None else Score(reward=reward) for reward in self.rewards]
            return replace(made, scores=tuple(scores))

    async def trained(*rewards):
        both = Scripted(rewards)
        setup = RolloutSetup(
            generator=both,
            scorer=both,
            task=Characters(),
            encode=None,
            timeline=Timeline(),
            watchdog=Watchdog(),
        )
        made = await find_rollout(PODS)(setup).run(PROMPT, SamplingParams(max_tokens=4), len(rewards) // 2)
        assert [one.token_ids.tolist() for one in made.trajectories] == sorted(
            one.token_ids.tolist() for one in made.trajectories
        )
        return [score.reward for score in made.scores]

    for rewards in ((0, 0, 0, 0, 0, 1), (1, 0, 1, 1, 1, 1), (0.1, 0.9, 0.5, 0.4, 0.8, 0.2, 0.3, 0.6)):
        best = max(pvariance(some) for some in itertools.combinations(rewards, len(rewards) // 2))
        assert pvariance(await trained(*rewards)) == pytest.approx(best)
    assert await trained(0.5, None, 1.0, None) == [0.5, 1.0]
    assert await trained(0.5, None, None, None) == [0.5]


@pytest.mark.parametrize(
    ("settings", "setting", "says"),
    [
        (["environment.rollout=nowhere.py:Judge"], "environment.rollout", "nowhere.py"),
        (
            ["environment.rollout={mine}:Half"],
            "environment.rollout",
            "lacks `run`, `interrupt`, `go_on`, `close`",
        ),
        (["environment.rollout={mine}:function"], "environment.rollout", "is no class"),
        (
            [
                "environment.rollout=offbeat_recipes.library.verifiers:Verifiers",
                "environment.args.command=[x]",
            ],
            "environment.rollout",
            "must be called with a RolloutSetup and environment.args command: missing a required argument: 'taskset'",
        ),
    ],
)
def test_what_cannot_be_made_is_refused_before_anything_starts(tmp_path, settings, setting, says):
    (tmp_path / "mine.py").write_text(
        "class Half:\n    def __init__(self, setup): ...\n    async def score(self, group): ...\n"
        "class Greedy(Half):\n    def __init__(self, setup, more): ...\n    async def close(self): ...\n"
        "def function(setup): ...\n"
    )
    config = compose_run([item.format(mine=tmp_path / "mine.py") for item in settings])
    [refusal] = gather_facts(config).refusals
    assert refusal.setting == setting
    assert says in refusal.reason


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    """Rows of sums, and the settings of a run on them with the tiny model of the task of sums."""
    folder = tmp_path_factory.mktemp("sums")
    rows = "".join(json.dumps({"prompt": f"{a}+{b}="}) + "\n" for a in range(10, 20) for b in range(10, 20))
    (folder / "rows.jsonl").write_text(rows)
    model = make_task(ArithmeticConfig(), "", 0).model_folder(folder / "base", 0)
    return [
        "task=file", f"model.path={model}", f"task.train_path={folder}/rows.jsonl", f"task.validation_path={folder}/rows.jsonl",
        "rollout=hf", "rollout.max_model_len=32", "task.max_prompt_tokens=16", "sampling.max_tokens=2", "trainer.validation_prompts=4",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Half", "lacks `close`"),
        ("Greedy", "must be called with a ScorerSetup alone"),
        ("missing", "no 'missing'"),
    ],
)
def test_a_scorer_that_cannot_be_made_is_refused(tmp_path, sums, name, says):
    (tmp_path / "mine.py").write_text(
        "class Half:\n    def __init__(self, setup): ...\n    async def score(self, group): ...\n"
        "class Greedy(Half):\n    def __init__(self, setup, more): ...\n    async def close(self): ...\n"
    )
    config = compose_run([*sums, f"task.reward={tmp_path}/mine.py:{name}"])
    [refusal] = gather_facts(config, opens_data=True).refusals
    assert refusal.setting == "task.reward"
    assert says in refusal.reason


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "fully_async"])
def test_a_run_with_both_trains_and_is_resumed(tmp_path, sums, mode):
    words = [
        *sums, f"mode={mode}", f"task.reward={MAJORITY}", f"environment.rollout={PODS}", "trainer.steps=3", "trainer.prompts_per_step=3",
        "trainer.group_size=8", "trainer.save_every=1", f"run_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    Command("train", words, tmp_path / "first").succeed(RUN_TIMEOUT_S)
    Command("train", [*words, "trainer.steps=4", "resume=auto"], tmp_path / "again").succeed(RUN_TIMEOUT_S)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "reward/mean" in line] == [1, 2, 3, 4]
    assert all(0 <= line["reward/mean"] <= 1 for line in lines if "reward/mean" in line)


def test_it_takes_the_place_of_an_environment():
    with pytest.raises(SettingError, match=r"`environment\.rollout` takes the place of an environment"):
        compose_run([f"environment.rollout={PODS}", "task=calculator"])
