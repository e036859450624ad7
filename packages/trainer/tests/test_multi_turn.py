"""Several turns with a scripted environment: tokens, seeds, limits, failures, and whole runs in every mode."""

import asyncio
import json
import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from offbeat_rollout import Completion, Finish, SamplingParams
from offbeat_trainer.config import (
    AsyncConfig,
    EnvironmentConfig,
    LoopConfig,
    OnFailure,
    Order,
    Partial,
    RewardFrom,
)
from offbeat_trainer.data.types import Limit, Prompt, Score
from offbeat_trainer.errors import DeadlineExceeded, EnvironmentFailed, TrainerError
from offbeat_trainer.rollouts.environment import Feedback
from offbeat_trainer.rollouts.multi import MultiTurn, Scene
from offbeat_trainer.rollouts.single import GroupGenerator, derive_seed
from offbeat_trainer.stream.journal.events import MemoryJournal
from offbeat_trainer.stream.schedule import Schedule
from offbeat_trainer.testing import ScriptedPool, ScriptedRun, run_virtual

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
    scene = Scene(
        make=make,
        decode=lambda ids: " ".join(map(str, ids)),
        encode=lambda said: [int(one) for one in (said.split() if isinstance(said, str) else said)],
    )
    generator = GroupGenerator(replica.generate_many)
    return MultiTurn(generator, scene, EnvironmentConfig(**config), scorer=scorer)


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
    assert group.scores == (Score(reward=6.0, correct=True, parts={"turns": 3.0}),) * 2
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
    with pytest.raises(TrainerError, match=r"reward\.on_failure=drop would leave") as caught:
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
        (RewardFrom.ENVIRONMENT, Score(reward=6.0, correct=True, parts={"turns": 3.0})),
        (RewardFrom.TASK, Score(reward=3.0, correct=False)),
        (RewardFrom.BOTH, Score(reward=9.0, correct=False, parts={"turns": 3.0, "environment": 6.0})),
    ],
)
def test_the_environment_the_task_or_both_say_what_it_is_worth(reward_from, score):
    group = one_group(Echo, scorer=Task(), reward_from=reward_from)
    assert group.scores == (score,)


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
    scene = Scene(make=lambda: environment, decode=lambda ids: "", encode=lambda said: [])
    multi = MultiTurn(GroupGenerator(replica.generate_many, replica.abort), scene, EnvironmentConfig())
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


LOOP = LoopConfig(
    steps=5, prompts_per_step=3, group_size=2, validate_every=2, validation_prompts=2, save_every=2, sample_every=1
)  # fmt: skip


class Dice:
    """Rolls dice between the turns, as many as its seed says; odd tokens are what it likes."""

    def reset(self, prompt, seed):
        self.draws = random.Random(seed)
        return []

    def step(self, action):
        odd = sum(token % 2 for token in action.token_ids) / len(action.token_ids)
        rolled = [self.draws.randint(1, 6) for _ in range(self.draws.randint(1, 3))]
        return Feedback(observation=rolled, reward=odd, done=action.turn == 2 or self.draws.random() < 0.2)


def scripted(folder, **settings):
    settings = {
        "mode": "sync",
        "loop": LOOP,
        "environment": Dice,
        "turns": EnvironmentConfig(max_tokens=60),
        **settings,
    }
    return ScriptedRun(folder=folder, **settings)


def pace(seed):
    draws = random.Random(seed)
    return lambda request: draws.uniform(0.001, 0.3)


def test_a_sync_run_learns_from_several_turns(tmp_path):
    run = scripted(tmp_path).go()
    assert run.outcome.steps == LOOP.steps
    for batch in run.policy.batches:
        assert (batch["loss_mask"] == (batch["policy_version"] >= 0)).all()
    values = run.reporter.steps[3]
    assert 1 < values["trajectory/turns_mean"] <= 3
    assert values["trajectory/observed_tokens_mean"] > 0


def test_what_turns_earn_is_learned_from(tmp_path):
    class Three(Dice):
        def step(self, action):
            return replace(super().step(action), done=action.turn == 2)

    many = replace(_longer(LOOP, 30), prompts_per_step=8, group_size=8)
    steps = scripted(tmp_path, environment=Three, loop=many).go().reporter.steps
    assert steps[30]["reward/mean"] > steps[1]["reward/mean"] + 0.08


def _longer(loop, steps):
    return replace(loop, steps=steps, validate_every=0, save_every=0)


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("partial", Partial)
def test_no_staleness_is_taking_turns_with_an_environment_too(tmp_path, order, partial):
    sync = scripted(tmp_path / "sync").go()
    mode = AsyncConfig(max_staleness=0, order=order, partial=partial)
    run = scripted(
        tmp_path / "run", mode="fully_async", asynchrony=mode, pool=ScriptedPool(pace=pace(3))
    ).go()
    assert run.policy.history == sync.policy.history
    assert run.history() == sync.history()


@pytest.mark.parametrize("partial", Partial)
@pytest.mark.parametrize("staleness", [1, 3])
def test_no_trained_token_is_older_than_the_bound(tmp_path, partial, staleness):
    mode = AsyncConfig(max_staleness=staleness, partial=partial)
    run = scripted(
        tmp_path, mode="fully_async", asynchrony=mode, pool=ScriptedPool(pace=pace(4)), loop=_longer(LOOP, 20)
    ).go()
    ages = [
        step + 1 - version
        for step, batch in enumerate(run.policy.batches)
        for version in batch["policy_version"][batch["loss_mask"]].tolist()
    ]
    assert max(ages) == staleness


def killed_and_resumed(folder, mode, at):
    """Return a run whose environment never answers its call number `at`, and the one that goes on from there."""
    calls = 0

    class Deadly(Dice):
        def step(self, action):
            nonlocal calls
            calls += 1
            if calls == at:
                raise asyncio.CancelledError  # what is under way ends here and is never heard of again
            return super().step(action)

    journal = MemoryJournal()
    first = scripted(folder, mode=mode, environment=Deadly, journal=journal)
    with pytest.raises(DeadlineExceeded, match="waits for generation"):
        first.go()
    assert first.outcome.steps < LOOP.steps
    return first, scripted(folder, mode=mode, journal=MemoryJournal(journal.events())).go()


@pytest.mark.parametrize("at", [7, 23, 41, 66])
def test_killed_in_the_middle_of_trajectories_a_run_goes_on_as_if_nothing_had_been(tmp_path, at):
    """A half-finished trajectory is begun anew, with the seeds it had: the resumed run repeats the undisturbed one."""
    undisturbed = scripted(tmp_path / "undisturbed").go()
    _, again = killed_and_resumed(tmp_path / "run", "sync", at)
    assert again.policy.history == undisturbed.policy.history
    for step, values in again.history().items():
        assert values == undisturbed.history()[step]


@pytest.mark.parametrize("mode", ["one_step_off", "fully_async"])
@pytest.mark.parametrize("at", [7, 23, 41])
def test_killed_beside_training_every_prompt_is_trained_once_all_the_same(tmp_path, mode, at):
    """What was under way begins anew under the weights that are served then."""
    _, again = killed_and_resumed(tmp_path, mode, at)
    trained = Counter(number for numbers in again.policy.prompts for number in numbers)
    assert trained == dict.fromkeys(range(LOOP.steps * LOOP.prompts_per_step), LOOP.group_size)


def test_a_schedule_is_replayed_where_one_version_made_each_group(tmp_path):
    mode = AsyncConfig(max_staleness=2, partial=Partial.WAIT, order=Order.LONGEST_WAITING)
    run = scripted(
        tmp_path / "one", mode="fully_async", asynchrony=mode, pool=ScriptedPool(pace=pace(5))
    ).go()
    schedule = Schedule.of(run.journal.events())
    other = scripted(
        tmp_path / "other",
        mode="fully_async",
        asynchrony=mode,
        pool=ScriptedPool(pace=pace(9)),
        replay=schedule,
    ).go()
    assert other.policy.history == run.policy.history


def test_an_environment_that_fails_costs_its_group_and_is_counted(tmp_path):
    class Breaks(Dice):
        def reset(self, prompt, seed):
            if prompt.uid in ("1", "5"):
                raise OSError("no such place")
            return super().reset(prompt, seed)

    run = scripted(tmp_path, environment=Breaks).go()
    assert run.outcome.steps == LOOP.steps
    assert run.reporter.steps[LOOP.steps]["buffer/dropped_environment_raised_groups"] == 2
    assert run.outcome.summary()["dropped_groups"] == {"environment_raised": 2}


def test_metrics_say_what_ended_trajectories(tmp_path):
    run = scripted(tmp_path, turns=EnvironmentConfig(max_turns=1, max_tokens=60)).go()
    assert run.reporter.steps[1]["trajectory/out_of_turns_fraction"] > 0
