"""What a run comes to, and the calendar at the end of each step: what is due when."""

import json
import math
import pickle
from types import SimpleNamespace

import pytest

from offbeat_rollout import Completion, Finish
from offbeat_trainer.algorithms.grpo import Grpo
from offbeat_trainer.config import GrpoConfig, LoopConfig, RewardConfig, SamplingConfig
from offbeat_trainer.data.metrics import Mean, Metric
from offbeat_trainer.data.types import Group, Prompt, Score, Trajectory, due
from offbeat_trainer.loops.outcome import Outcome, close_step
from offbeat_trainer.loops.run_store import RunStore
from offbeat_trainer.loops.session import Session, StopRequest
from offbeat_trainer.rollouts.scorer import TaskScorer
from offbeat_trainer.rollouts.single import GroupGenerator, SingleTurn
from offbeat_trainer.watch.watchdog import PhaseClock
from scripted import Recorder

TRAINED = [Metric("train/loss", Mean(0.5)), Metric("sync/gb_per_s", Mean(2.0))]


def values(reward, *, tokens=10.0, speed=1.0, **more):
    return {"reward/mean": reward, "tokens/generated": tokens, "sync/gb_per_s": speed, **more}


def test_steps_rewards_tokens_and_times_of_a_run():
    outcome = Outcome(steps=4)  # a resumed run: four steps were done by another process
    phases = {"generate": 1.0, "reward": 0.5, "train": 2.0, "sync": 0.25, "validate": 100.0}
    outcome.take(4, values(0.25, speed=1.0, **{"mismatch/max_abs_logprob_diff": 1e-3}), phases)
    last = {"mismatch/max_abs_logprob_diff": 1e-6, "buffer/dropped_reward_raised_groups": 2.0}
    last |= {"sync/failures": 1.0, "sync/fenced_members": 2.0}
    outcome.take_mishaps({"validation/unscored_prompts": 3.0, "buffer/unscored_completions": 4.0})
    outcome.take(5, values(0.75, speed=3.0, **last), {"train": 0.25})
    assert (outcome.steps, outcome.steps_here) == (6, 2)
    summary = outcome.summary()
    json.dumps(summary, allow_nan=False)
    assert summary == {
        "steps": 6,
        "interrupted": False,
        "accuracy_before": None,
        "accuracy_after": None,
        "validation_before": None,
        "validation_after": None,
        "loss_before": None,
        "loss_after": None,
        "reward_first": 0.25,
        "reward_last": 0.5,  # the mean of both
        "tokens_per_s": 20.0 / 4.0,
        "phase_s": {"generate": 0.5, "reward": 0.25, "train": 1.125, "sync": 0.125},
        "beside_s": {"validate": 100.0},
        "sync_gb_per_s": 2.0,
        "trained_groups": 0,  # counted as steps are closed
        "dropped_groups": {"reward_raised": 2.0},
        "left_out_groups": {},
        "unscored_completions": 4.0,
        "unscored_prompts": 3.0,
        "sync_failures": 1.0,
        "fenced_members": 2.0,
        "lost_replicas": [],
        "max_abs_logprob_diff": 1e-3,
        "warmup_s": 0.0,
        "where_time_went": None,
    }


@pytest.mark.parametrize(("ages", "diff"), [((0, 1), 0.125), ((1, 2), None), ((0, 0), 0.5)])
def test_the_age_of_tokens_is_not_taken_for_a_difference_between_sampler_and_trainer(ages, diff):
    outcome = Outcome()
    for age, step_diff in zip(ages, (0.125, 0.5), strict=True):
        told = {"staleness/max": float(age), "mismatch/max_abs_logprob_diff": step_diff}
        outcome.take(age, values(0.5, **told), {})
    assert outcome.summary()["max_abs_logprob_diff"] == diff


def test_a_sampler_that_runs_another_model_is_told_of_once_and_not_taken_for_age(caplog):
    outcome = Outcome()
    for step, (age, mean) in enumerate([(0, 0.05), (1, 2.0), (0, 1.5), (0, 1.5)]):
        told = {"staleness/max": float(age), "mismatch/mean_abs_logprob_diff": mean}
        outcome.take(step, values(0.5, **told), {})
    (said,) = caplog.messages
    assert "step 2: for the same weights and tokens" in said
    assert "1.5 nats apart" in said


def test_a_difference_that_was_no_number_is_not_forgotten():
    outcome = Outcome()
    for step, diff in enumerate((0.125, math.nan, 0.5)):
        outcome.take(step, values(0.5, **{"mismatch/max_abs_logprob_diff": diff}), {})
    assert math.isnan(outcome.max_abs_logprob_diff)


def test_the_first_reward_of_a_resumed_run_is_that_of_the_first_process():
    outcome = Outcome(reward_first=-1.0)
    outcome.take(7, values(0.5), {})
    assert (outcome.reward_first, outcome.reward_last) == (-1.0, 0.5)


def test_first_and_last_reward_are_means_of_a_few_steps():
    outcome = Outcome()
    outcome.take(0, values(0.0), {})
    assert outcome.reward_first == 0.0
    for step in range(1, 12):
        outcome.take(step, values(float(step)), {})
    assert (outcome.reward_first, outcome.reward_last) == (2.0, 9.0)


def test_a_run_without_steps_has_a_summary():
    summary = Outcome().summary()
    assert (summary["steps"], summary["tokens_per_s"], summary["sync_gb_per_s"]) == (0, None, None)
    json.dumps(summary, allow_nan=False)


def test_due():
    assert [step for step in range(1, 8) if due(step, 3)] == [3, 6]
    assert not any(due(step, 0) for step in range(8))


class Yes:
    """A task whose every completion is correct. Satisfies `Task`."""

    def prompts(self, step, num_prompts):
        raise AssertionError("the end of a step asks for no training prompts")

    def validation_prompts(self, num_prompts):
        return [Prompt(uid=f"held out {index}", text="", token_ids=(1,)) for index in range(num_prompts)]

    def score(self, prompt, completion):
        return Score(reward=1.0, correct=True)

    def decode(self, token_ids):
        return "text"

    def stop_token_ids(self):
        return ()


def completion(request_id):
    return Completion.of(
        request_id=request_id,
        token_ids=(4, 5),
        logprobs=(-1.0, -1.0),
        policy_versions=(1, 1),
        finish=Finish.LENGTH,
    )


async def complete(requests):
    return [completion(request.request_id) for request in requests]


class NothingHeldOut(Yes):
    def validation_prompts(self, num_prompts):
        return []


async def walk(folder, loop, *, stop_at=None, task=None):
    """Close all steps of a run; return, per step, what was done."""
    saved, blocked = [], []
    reporter = Recorder()

    async def save(step, *, block):
        assert json.loads((folder / f"step_{step:08d}.json").read_text())["step"] == step, (
            "the state goes first"
        )
        saved.append(step)
        if block:
            blocked.append(step)

    parts = Session(
        task=task or Yes(),
        policy=SimpleNamespace(save=save),
        rollout=SingleTurn(GroupGenerator(complete), TaskScorer(Yes().score, RewardConfig())),
        publisher=SimpleNamespace(),
        reporter=reporter,
        store=RunStore(folder, keep=2),
        seed=0,
        loop=loop,
        algorithm=Grpo(config=GrpoConfig()),
        sampling=SamplingConfig(),
        stop=StopRequest(),
    )
    outcome = Outcome()
    group = Group(
        prompt=Prompt(uid="p", text="", token_ids=(1,)),
        trajectories=(Trajectory.of(completion("r")),),
        scores=(Score(reward=0.5, correct=False),),
    )
    for step in range(loop.steps):
        parts.stop.requested = step + 1 == stop_at
        clock = PhaseClock(reporter)
        await close_step(parts, outcome, clock, step, [group], TRAINED)
    validated = [step for step, some in reporter.steps.items() if "accuracy/validation" in some]
    shown = [(step, title) for step, title, _ in reporter.shown]
    return SimpleNamespace(
        saved=saved, blocked=blocked, validated=validated, shown=shown, steps=reporter.steps, outcome=outcome
    )


async def test_what_is_due_is_done_and_the_last_step_validates_and_saves(tmp_path):
    loop = LoopConfig(steps=7, validate_every=3, save_every=2, sample_every=4, validation_prompts=2)
    done = await walk(tmp_path, loop)
    assert done.validated == [3, 6, 7]
    assert done.saved == [2, 4, 6, 7]
    assert done.blocked == [7]  # the others become whole beside the next steps
    assert done.shown == [(4, "sampled"), (7, "after")]
    assert list(done.steps) == [1, 2, 3, 4, 5, 6, 7]
    assert done.outcome.accuracy_after == 1.0
    assert done.steps[3]["accuracy/validation"] == 1.0
    assert done.steps[3]["reward/mean"] == 0.5
    assert done.steps[3]["train/loss"] == 0.5
    assert done.steps[3]["time/validate_s"] > 0


async def test_never_means_validation_at_the_end_and_no_checkpoint(tmp_path):
    done = await walk(tmp_path, LoopConfig(steps=3, validate_every=0, save_every=0, sample_every=0))
    assert (done.validated, done.saved, done.shown) == ([3], [], [(3, "after")])


async def test_a_task_that_holds_nothing_out_is_trained_without_validation(tmp_path):
    done = await walk(tmp_path, LoopConfig(steps=2, validate_every=1, save_every=0), task=NothingHeldOut())
    assert (done.validated, done.outcome.accuracy_after, done.outcome.steps) == ([], None, 2)
    json.dumps(done.outcome.summary(), allow_nan=False)


async def test_a_stop_request_saves_the_step_it_met(tmp_path):
    done = await walk(tmp_path, LoopConfig(steps=5, validate_every=0, save_every=0), stop_at=2)
    assert done.saved == done.blocked == [2]  # whole when the run ends


def test_what_a_run_comes_to_is_no_larger_after_many_steps():
    outcome, sizes = Outcome(), []
    for step in range(300):
        outcome.take(step, values(float(step), speed=1.5), {"train": 1.5})
        sizes.append(len(pickle.dumps(outcome)))
    assert sizes[-1] <= sizes[20] + 10
