"""Several turns with a scripted environment: tokens, seeds, limits, failures."""

import asyncio
import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from offbeat_rollout import Completion, Finish, SamplingParams
from offbeat_trainer.algorithms.advantages import by_group, dr_grpo, turn_advantages
from offbeat_trainer.config import (
    EnvironmentConfig,
    OnFailure,
    RewardFrom,
)
from offbeat_trainer.data.assemble import group_metrics
from offbeat_trainer.data.metrics import reduce_metrics
from offbeat_trainer.data.types import Limit, Prompt, Score
from offbeat_trainer.errors import EnvironmentFailed, TrainerError
from offbeat_trainer.rollouts.environment import Feedback
from offbeat_trainer.rollouts.multi import EnvironmentSetup, MultiTurn
from offbeat_trainer.rollouts.single import GroupGenerator, derive_seed
from scripted import run_virtual

PROMPT = Prompt(uid="p", text="", token_ids=(1, 2))
SAMPLING = SamplingParams(max_tokens=4, seed=5)


class Replica:
    """Answers every request with the tokens 7 and 0, at version 3, and notes what it was asked."""

    def __init__(self, *answers):
        self.asked = []
        self._answers = list(answers)

    async def generate_many(self, requests):
        self.asked.extend(requests)
        await asyncio.sleep(0.01)
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        tokens, finish = self._answers.pop(0) if self._answers else ((7, 0), Finish.STOP)
        return Completion.of(
            request_id=request.request_id, token_ids=tokens, logprobs=[-1.0] * len(tokens),
            policy_versions=[3] * len(tokens), finish=finish,
        )  # fmt: skip


class Echo:
    """Says 9, then 9 and the turn's number; ends after `turns`; what it was told is in `heard`."""

    def __init__(self, turns=3, first=""):
        self.turns, self.first, self.heard, self.closed = turns, first, [], 0

    def reset(self, prompt, seed):
        self.heard.append((prompt.uid, seed))
        return self.first

    async def step(self, action):
        self.heard.append(action)
        await asyncio.sleep(0)
        return Feedback(
            observation=[9, action.turn], reward=action.turn + 1.0, done=action.turn + 1 == self.turns,
            parts={"turns": 1.0},
        )  # fmt: skip

    def close(self):
        self.closed += 1


def rollout(make, replica=None, scorer=None, **config):
    replica = Replica() if replica is None else replica
    setup = EnvironmentSetup(
        make=make,
        decode=lambda ids: " ".join(map(str, ids)),
        encode=lambda said, last: [int(one) for one in (said.split() if isinstance(said, str) else said)],
        encode_context=lambda said: [int(one) for one in (said.split() if isinstance(said, str) else said)],
    )
    generator = GroupGenerator(replica.generate_many)
    return MultiTurn(generator, setup, EnvironmentConfig(**config), scorer=scorer)


def one_group(make, n=1, sampling=SAMPLING, **settings):
    return run_virtual(rollout(make, **settings).run(PROMPT, sampling, n))


def test_turns_are_added_to_each_other_token_by_token():
    replica, made = Replica(), []

    def make():
        made.append(Echo(first="8 8"))
        return made[-1]

    group = one_group(make, 2, replica=replica)
    [one, other] = group.trajectories
    assert one.token_ids.tolist() == [8, 8, 7, 0, 9, 0, 7, 0, 9, 1, 7, 0]
    assert one.trained.tolist() == [
        token in (7, 0) and place not in (5, 9) for place, token in enumerate(one.token_ids.tolist())
    ]
    assert (one.finish, other.finish) == (Finish.STOP, Finish.STOP)
    assert [turn.reward for turn in one.turns] == [1.0, 2.0, 3.0]
    assert group.scores == (Score(reward=6.0, parts={"turns": 3.0}),) * 2
    mine = [request for request in replica.asked if request.session == "0/p"]
    assert [request.prompt_ids for request in mine] == [
        (1, 2, 8, 8), (1, 2, 8, 8, 7, 0, 9, 0), (1, 2, 8, 8, 7, 0, 9, 0, 7, 0, 9, 1),
    ]  # fmt: skip
    assert {request.session for request in replica.asked} == {"0/p", "1/p"}, "turns meet the same replica"
    assert [request.sampling.seed for request in mine] == [
        derive_seed(5, "p", 0), derive_seed(5, "p", 0, "turn", 1), derive_seed(5, "p", 0, "turn", 2),
    ]  # fmt: skip
    assert len({request.request_id for request in replica.asked}) == 6
    assert [environment.closed for environment in made] == [1, 1], "one instance each, closed once"
    assert [action.text for action in made[0].heard[1:]] == ["7 0"] * 3
    assert made[0].heard[0] == ("p", derive_seed(5, "p", 0, "environment"))
    assert made[0].heard[0] != made[1].heard[0]


class Forgetful(Echo):
    """Cuts the history to 50 and the turn's number after every second turn."""

    async def step(self, action):
        feedback = await super().step(action)
        return replace(feedback, context=f"50 {action.turn}") if action.turn % 2 else feedback


def test_an_edited_history_is_asked_with_alone_and_begins_a_row():
    replica = Replica()
    group = one_group(lambda: Forgetful(turns=4), replica=replica, max_turns=8)
    [one] = group.trajectories
    assert [request.prompt_ids for request in replica.asked] == [
        (1, 2), (1, 2, 7, 0, 9, 0), (50, 1), (50, 1, 7, 0, 9, 2),
    ]  # fmt: skip
    assert [(row.context if row.context is None else row.context.tolist(), row.token_ids.tolist()) for row in one.rows] == [
        (None, [7, 0, 9, 0, 7, 0]), ([50, 1], [7, 0, 9, 2, 7, 0]),
    ]  # fmt: skip
    assert one.finish is Finish.STOP
    # Prompt and limit together bound every sequence, whatever it begins with.
    [short] = one_group(lambda: Forgetful(turns=9), max_turns=9, max_tokens=6).trajectories
    assert [len(row.token_ids) for row in short.rows] == [6, 6, 6, 6, 2]


def test_a_context_of_reset_takes_the_place_of_the_prompt():
    class Instead(Forgetful):
        def reset(self, prompt, seed):
            super().reset(prompt, seed)
            return Feedback(context="40 41")

    replica = Replica()
    group = one_group(lambda: Instead(turns=4), replica=replica, max_turns=8)
    assert [request.prompt_ids for request in replica.asked] == [
        (40, 41), (40, 41, 7, 0, 9, 0), (50, 1), (50, 1, 7, 0, 9, 2),
    ]  # fmt: skip
    assert [row.context.tolist() for row in group.trajectories[0].rows] == [[40, 41], [50, 1]]
    found = reduce_metrics(group_metrics([group]))
    assert (found["trajectory/turns_extended"], found["trajectory/turns_forked"]) == (2, 1)


def test_an_empty_context_is_a_failure_of_the_environment():
    class Empty(Echo):
        async def step(self, action):
            return replace(await super().step(action), context="")

    with pytest.raises(EnvironmentFailed, match=r"`Feedback\.context` is empty"):
        one_group(Empty, max_attempts=1)


@pytest.mark.parametrize(
    ("config", "answers", "finish", "num_tokens", "turns"),
    [
        ({"max_turns": 2}, [], Limit.TURNS, 6, 2),
        ({"max_tokens": 7}, [], Finish.LENGTH, 6, 2),  # no room for what is said and a token after it
        ({"max_tokens": 4}, [], Finish.LENGTH, 2, 1),
        ({}, [((7, 7, 7, 7), Finish.LENGTH)], Finish.LENGTH, 4, 1),
        (
            {"max_seconds": 0.015},
            [],
            Limit.SECONDS,
            2,
            1,
        ),  # the second turn is not over by then, and left out
        ({"max_seconds": 0.005}, [], Limit.SECONDS, 0, 0),
    ],
)
def test_each_limit_ends_a_trajectory_with_its_reason(config, answers, finish, num_tokens, turns):
    group = one_group(Echo, replica=Replica(*answers), **config)
    [one] = group.trajectories
    assert (one.finish, one.num_tokens, len(one.turns)) == (finish, num_tokens, turns)
    assert group.scores[0].reward == math.fsum(range(1, turns + 1)), "what was earned until then counts"


def test_the_last_turn_gets_no_more_tokens_than_there_is_room_for():
    replica = Replica()
    one_group(Echo, replica=replica, max_tokens=7)
    assert [request.sampling.max_tokens for request in replica.asked] == [4, 3]


def test_time_runs_out_in_an_environment_too():
    class Slow(Echo):
        async def step(self, action):
            await asyncio.sleep(1.0)
            return await super().step(action)

    [one] = one_group(Slow, max_seconds=0.5).trajectories
    assert (one.finish, len(one.turns)) == (Limit.SECONDS, 1)


class Fails(Echo):
    """Fails at the second step of the first `times` instances."""

    made = 0

    def __init__(self, times=1, value=None):
        super().__init__()
        self.value = value
        self.fails = type(self).made < times
        type(self).made += 1

    async def step(self, action):
        if self.fails and action.turn == 1:
            if self.value is None:
                raise KeyError("lost")
            return self.value
        return await super().step(action)


@pytest.fixture
def fails():
    """A class that counts its instances from 0."""
    return type("Fails", (Fails,), {"made": 0})


def test_a_trajectory_whose_environment_fails_is_begun_anew_with_the_same_seeds(fails, caplog):
    replica = Replica()
    group = one_group(fails, replica=replica, max_attempts=2)
    assert [turn.reward for turn in group.trajectories[0].turns] == [1.0, 2.0, 3.0]
    assert fails.made == 2
    seeds = [request.sampling.seed for request in replica.asked]
    assert seeds[:2] == seeds[2:4]
    assert "environment of p, trajectory 0: `step` raised KeyError: 'lost' (attempt 1 of 2)" in caplog.text


@pytest.mark.parametrize(
    ("value", "how", "words"),
    [
        (None, "raised", "`step` raised KeyError"),
        (Feedback(reward=math.nan), "not a number", "reward=nan, not a finite number"),
        (Feedback(parts={"x": math.inf}), "not a number", r"parts\['x'\]=inf"),
        (Feedback(reward="1"), "not a number", "reward='1'"),
        (1.0, "raised", "returned 1.0, not an offbeat_trainer.Feedback"),
        ({"reward": 1.0}, "raised", "not an offbeat_trainer.Feedback"),
    ],
)
def test_one_that_goes_on_failing_is_left_out_with_its_reason(fails, value, how, words):
    with pytest.raises(EnvironmentFailed, match=words) as caught:
        one_group(lambda: fails(9, value), 2, max_attempts=2)
    assert caught.value.counted_as == f"environment {how}"
    with pytest.raises(TrainerError, match=r"environment\.on_failure=drop would leave") as caught:
        one_group(lambda: fails(99, value), max_attempts=1, on_failure=OnFailure.STOP)
    assert not isinstance(caught.value, EnvironmentFailed)


def test_numbers_of_numpy_are_numbers():
    class Numpys(Echo):
        async def step(self, action):
            return Feedback(
                reward=np.float32(0.5), done=np.True_, correct=np.False_, parts={"a": np.int64(2)}
            )

    group = one_group(Numpys)
    json.dumps([group.scores[0].reward, group.scores[0].correct, dict(group.scores[0].parts)])
    assert group.scores == (Score(reward=0.5, correct=False, parts={"a": 2.0}),)


class Task:
    """A scorer that gives half a point for each token."""

    async def score(self, group):
        return replace(
            group,
            scores=tuple(Score(reward=one.num_trained / 2, correct=False) for one in group.trajectories),
        )

    async def close(self):
        pass


@pytest.mark.parametrize(
    ("reward_from", "score"),
    [
        (RewardFrom.ENVIRONMENT, Score(reward=6.0, parts={"turns": 3.0})),
        (RewardFrom.TASK, Score(reward=3.0, correct=False)),
        (RewardFrom.BOTH, Score(reward=9.0, correct=False, parts={"turns": 3.0, "environment": 6.0})),
    ],
)
def test_the_environment_the_task_or_both_say_what_it_is_worth(reward_from, score):
    group = one_group(Echo, scorer=Task(), reward_from=reward_from)
    assert group.scores == (score,)


def test_where_the_task_alone_pays_no_turn_keeps_the_environments_reward():
    """The environment's rewards would otherwise be credited to the turns, and taken from the last one."""
    made = itertools.count()

    class Generous(Echo):
        async def step(self, action):
            feedback = await super().step(action)
            return replace(feedback, reward=float(self.number == 0 and action.turn == 0))

        def reset(self, prompt, seed):
            self.number = next(made)
            return super().reset(prompt, seed)

    group = one_group(Generous, 2, scorer=Task(), reward_from=RewardFrom.TASK)
    for one, score in zip(group.trajectories, group.scores, strict=True):
        assert one.rewards(score.reward).tolist() == [0.0] * 9 + [3.0], "as PPO counts them"
    advantages_BC = turn_advantages([group], lambda samples: by_group(samples, dr_grpo))
    assert advantages_BC.abs().max() == 0, "both trajectories are worth the same, and so are their turns"


async def test_an_interrupted_turn_is_continued_from_its_tokens_and_its_environment_hears_nothing_of_it():
    whole = []

    class Halting:
        """The first request is aborted after one token."""

        def __init__(self):
            self.asked = []

        async def generate_many(self, requests):
            [request] = requests
            self.asked.append(request)
            first = len(self.asked) == 1
            if first:
                await halt.wait()
            return [
                Completion.of(
                    request_id=request.request_id, token_ids=(5,) if first else (6, 0), logprobs=[-1.0] * (1 if first else 2),
                    policy_versions=[3 if first else 4] * (1 if first else 2), finish=Finish.ABORT if first else Finish.STOP,
                )
            ]  # fmt: skip

        async def abort(self, request_ids):
            halt.set()

    halt, replica = asyncio.Event(), Halting()
    environment = Echo(turns=1)
    setup = EnvironmentSetup(make=lambda: environment, decode=lambda ids: "", encode=lambda said, last: [])
    multi = MultiTurn(GroupGenerator(replica.generate_many, replica.abort), setup, EnvironmentConfig())
    running = asyncio.create_task(multi.run(PROMPT, SAMPLING, 1))
    while not replica.asked:  # noqa: ASYNC110 - the replica tells nobody
        await asyncio.sleep(0.001)
    await multi.interrupt()
    await asyncio.sleep(0.01)
    assert len(replica.asked) == 1, "it waits for `go_on`"
    multi.go_on()
    whole = (await running).trajectories[0]
    assert whole.token_ids.tolist() == [5, 6, 0]
    assert whole.spans == ((3, 0, 1), (4, 1, 3))
    assert [action.token_ids for action in environment.heard[1:]] == [(5, 6, 0)]
    assert replica.asked[1].prompt_ids == (1, 2, 5)


@pytest.mark.parametrize("said", [None, 5, "words", [2**40], [None]])
def test_what_cannot_be_made_into_tokens_is_the_environments_failure(said):
    with pytest.raises(EnvironmentFailed, match=r"what it said, .* cannot be made into tokens") as failed:
        one_group(lambda: Echo(first=said))
    assert failed.value.reason == "raised"
