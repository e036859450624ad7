"""Generation that fails: tried again, dropped with a reason, never made up; and what ends a run."""

import asyncio
import math
from collections import Counter
from dataclasses import replace

import pytest

from offbeat_rollout import EngineStateError, NoReplica, ReplicaGone, RequestError, version_spans
from offbeat_trainer.config import AsyncConfig, LoopConfig, OnFailure, RewardConfig
from offbeat_trainer.data.types import UNSCORED
from offbeat_trainer.errors import DeadlineExceeded, RewardFailed, TrainerError
from offbeat_trainer.loops.events import Dropped
from offbeat_trainer.watch.watchdog import Watchdog
from scripted import ScriptedPool, ScriptedRun, ScriptedTask
from scripted.parts import prompt_number

LOOP = LoopConfig(
    steps=4, prompts_per_step=2, group_size=2, validate_every=0, validation_prompts=1, save_every=0, sample_every=0
)  # fmt: skip
MODE = AsyncConfig(max_staleness=1, max_attempts=3)
FIRST_PROMPT = (1, 1, 1, 1)


def run_with(folder, mishap, **options):
    def trained_only(request, attempt):
        return mishap(request, attempt) if request.sampling.temperature else None

    run = ScriptedRun(
        folder=folder, loop=LOOP, asynchrony=MODE, pool=ScriptedPool(mishap=trained_only), **options
    )
    return run.go()


def dropped(run):
    return [(event.index, event.reason) for event in run.journal.events() if isinstance(event, Dropped)]


@pytest.mark.parametrize(
    "error", [ReplicaGone("r", "died"), EngineStateError("gone"), TimeoutError(), ConnectionError()]
)
def test_a_failed_group_is_tried_again_and_is_what_it_would_have_been(tmp_path, error):
    smooth = run_with(tmp_path / "a", lambda request, attempt: None)
    bumpy = run_with(
        tmp_path / "b",
        lambda request, attempt: error if attempt < 3 and request.prompt_ids == FIRST_PROMPT else None,
    )
    assert dropped(bumpy) == []
    first = {tuple(row[:4]): row for row in smooth.policy.batches[0]["input_ids"].tolist()}
    again = {tuple(row[:4]): row for batch in bumpy.policy.batches for row in batch["input_ids"].tolist()}
    assert again[FIRST_PROMPT][:10] == first[FIRST_PROMPT][:10]


@pytest.mark.parametrize("error", [ReplicaGone("r", "died"), NoReplica("none"), TimeoutError()])
def test_validation_is_tried_again_as_often_as_a_group_and_then_skipped(tmp_path, error):
    def run(fails):
        def held_out(request, attempt):
            return error if not request.sampling.temperature and attempt <= fails else None

        pool = ScriptedPool(mishap=held_out)
        return ScriptedRun(folder=tmp_path, loop=LOOP, asynchrony=MODE, pool=pool).go()

    smooth, bumpy, without = run(0).outcome, run(MODE.max_attempts - 1).outcome, run(MODE.max_attempts)
    assert (bumpy.steps, bumpy.accuracy_before, bumpy.accuracy_after) == (
        4,
        smooth.accuracy_before,
        smooth.accuracy_after,
    )
    assert (without.outcome.steps, without.outcome.accuracy_before, without.outcome.accuracy_after) == (
        4,
        None,
        None,
    )
    notes = [
        detail for name, detail in without.reporter.phases if name == "validate" and "no score" in detail
    ]
    said = f"1 of 1 held-out prompts got no score and do not count: {type(error).__name__}"
    assert [note.startswith(said) for note in notes] == [True, True]


@pytest.mark.parametrize("share", [0.75, 1.0])
@pytest.mark.parametrize("mode", ["sync", "fully_async"])
def test_a_judge_that_is_down_during_one_validation_ends_no_run_and_is_counted(tmp_path, share, mode):
    held_out = 16

    class Judge:
        """Scores like the task, but for some held-out prompts of the last validation."""

        def __init__(self):
            self.validated = 0

        async def score(self, group):
            if len(group.trajectories) == 1:
                self.validated += 1
                if self.validated > (3 - share) * held_out:
                    raise RewardFailed("raised", "the judge is down")
            scores = tuple(ScriptedTask().score(group.prompt, one) for one in group.trajectories)
            return replace(group, scores=scores)

        async def close(self):
            pass

    loop = replace(LOOP, validation_prompts=held_out, validate_every=2)
    run = ScriptedRun(folder=tmp_path, mode=mode, loop=loop, scorer=Judge()).go()
    assert run.outcome.steps == LOOP.steps
    middle, last = run.reporter.steps[2 if mode == "sync" else 3], run.reporter.steps[4]
    assert run.outcome.unscored_prompts == share * held_out
    assert middle["validation/unscored_prompts"] == 0
    assert 0 <= middle["accuracy/validation"] <= 1
    assert math.isfinite(middle["reward/validation"])
    assert last["validation/unscored_prompts"] == share * held_out
    assert ("accuracy/validation" in last) == ("reward/validation" in last) == (share < 1)
    assert (run.outcome.accuracy_after is None) == (share == 1)
    told = [detail for name, detail in run.reporter.phases if name == "validate" and "no score" in detail]
    assert told, "the console says so"
    assert all(detail.startswith(f"{share * held_out:.0f} of {held_out} held-out prompts") for detail in told)


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
def test_a_completion_without_a_score_is_left_out_of_its_group_and_counted(tmp_path, mode):
    class Judge:
        """Has no word for the first completion of every other prompt, and none for any of the first prompt."""

        async def score(self, group):
            scores = [ScriptedTask().score(group.prompt, one) for one in group.trajectories]
            number = prompt_number(group.prompt.token_ids)
            if len(scores) > 1 and number % 2:
                scores[0] = UNSCORED
            if group.prompt.token_ids == FIRST_PROMPT:
                scores = [UNSCORED] * len(scores)
            return replace(group, scores=tuple(scores))

        async def close(self):
            pass

    loop = replace(LOOP, group_size=3, updates_per_step=2)
    run = ScriptedRun(folder=tmp_path, mode=mode, loop=loop, asynchrony=MODE, scorer=Judge()).go()
    assert run.outcome.steps == LOOP.steps
    assert dropped(run) == [(0, "unscored")]
    rows = [
        Counter(prompt_number(row[:4]) for row in batch["input_ids"].tolist()) for batch in run.policy.batches
    ]
    assert all(count == 3 - number % 2 for step in rows for number, count in step.items())
    left_out = [sum(number % 2 for number in step) for step in rows]
    assert sum(left_out) > 0
    assert [
        run.reporter.steps[step]["buffer/unscored_completions"] for step in range(1, LOOP.steps + 1)
    ] == left_out
    assert run.outcome.summary()["unscored_completions"] == sum(left_out)


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
def test_after_its_last_attempt_a_group_is_dropped_with_its_reason_and_another_takes_its_place(
    tmp_path, mode
):
    run = run_with(
        tmp_path,
        lambda request, attempt: EngineStateError("gone") if request.prompt_ids == FIRST_PROMPT else None,
        mode=mode,
    )
    assert dropped(run) == [(0, "failed")]
    assert [len(set(numbers)) for numbers in run.policy.prompts] == [LOOP.prompts_per_step] * 4
    assert 0 not in {number for numbers in run.policy.prompts for number in numbers}
    assert run.reporter.steps[4]["buffer/dropped_failed_groups"] == 1
    assert run.outcome.steps == 4


def test_what_can_never_be_served_is_not_tried_again(tmp_path):
    attempts = []

    def refuse(request, attempt):
        if request.prompt_ids == FIRST_PROMPT:
            attempts.append(attempt)
            return RequestError("too long")
        return None

    run = run_with(tmp_path, refuse)
    assert dropped(run) == [(0, "refused")]
    assert attempts == [1]


def test_when_nothing_works_any_more_the_run_ends_instead_of_eating_the_data(tmp_path):
    with pytest.raises(TrainerError, match="8 groups in a row could not be made; the last: too long"):
        run_with(tmp_path, lambda request, attempt: RequestError("too long"))


def test_without_a_replica_the_run_waits_for_one_to_join(tmp_path):
    calls = []

    def none_yet(request, attempt):
        calls.append(request)
        return NoReplica("all are out") if len(calls) < 50 else None

    run = run_with(tmp_path, none_yet)
    assert run.outcome.steps == 4
    assert dropped(run) == []


def test_and_ends_within_its_deadline_if_none_does(tmp_path):
    dog = Watchdog(timeout_s=20, tell=lambda text: None)
    with pytest.raises(DeadlineExceeded, match="waits for generation"):
        run_with(tmp_path, lambda request, attempt: NoReplica("all are out"), watchdog=dog)


class Divides(ScriptedTask):
    """Prompt 3 has no score."""

    def score(self, prompt, completion):
        if prompt.uid == "3":
            raise ZeroDivisionError("a reward that divides")
        return super().score(prompt, completion)


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
def test_a_group_without_a_score_is_left_out_counted_and_another_takes_its_place(tmp_path, mode):
    run = run_with(tmp_path, lambda request, attempt: None, task=Divides(), mode=mode)
    assert dropped(run) == [(3, "reward raised")]
    assert run.outcome.steps == 4
    trained = [number for numbers in run.policy.prompts for number in set(numbers)]
    assert 3 not in trained
    assert len(trained) == 4 * LOOP.prompts_per_step
    assert run.reporter.steps[4]["buffer/dropped_reward_raised_groups"] == 1


def test_where_it_is_asked_for_a_group_without_a_score_ends_the_run(tmp_path):
    with pytest.raises(
        TrainerError, match=r"3 raised ZeroDivisionError: a reward that divides; reward\.on_failure"
    ):
        run_with(
            tmp_path,
            lambda request, attempt: None,
            task=Divides(),
            rewards=RewardConfig(on_failure=OnFailure.STOP),
        )


def test_a_reward_that_never_works_ends_the_run_instead_of_eating_the_data(tmp_path):
    class Never(ScriptedTask):
        def score(self, prompt, completion):
            if int(prompt.uid) < 40_000:
                raise KeyError("answer")
            return super().score(prompt, completion)

    with pytest.raises(
        TrainerError, match=r"8 groups in a row could not be made; the last: .* raised KeyError"
    ):
        run_with(tmp_path, lambda request, attempt: None, task=Never())


class JudgeWithAnOutage:
    """Scores four groups, then none for `outage_s`, then all."""

    def __init__(self, outage_s):
        self.outage_s = outage_s
        self.num_scored = 0
        self.down_since_s = None

    async def score(self, group):
        now_s = asyncio.get_running_loop().time()
        if self.down_since_s is None and self.num_scored == 4:
            self.down_since_s = now_s
        if self.down_since_s is not None and now_s - self.down_since_s < self.outage_s:
            raise RewardFailed("raised", "the judge is down")
        self.num_scored += 1
        scores = tuple(ScriptedTask().score(group.prompt, one) for one in group.trajectories)
        return replace(group, scores=scores)

    async def close(self):
        pass


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
def test_a_judge_that_is_down_for_a_minute_costs_some_groups_and_not_the_run(tmp_path, mode):
    loop = replace(LOOP, validation_prompts=0)
    run = ScriptedRun(
        folder=tmp_path, mode=mode, loop=loop, scorer=JudgeWithAnOutage(60.0), asynchrony=MODE
    ).go()
    assert run.outcome.steps == LOOP.steps
    assert 8 <= run.outcome.dropped_groups["reward_raised"] <= 8 + 60 / 5 + 4
    [failing] = [detail for name, detail in run.reporter.phases if name == "failing"]
    assert failing.startswith(
        "8 groups in a row could not be made; the last: the judge is down. One is tried every 5 s"
    )


def test_a_judge_that_stays_down_ends_the_run(tmp_path):
    loop, judge = replace(LOOP, validation_prompts=0), JudgeWithAnOutage(math.inf)
    run = ScriptedRun(folder=tmp_path, mode="sync", loop=loop, scorer=judge, asynchrony=MODE)
    with pytest.raises(
        TrainerError, match=r"\d\d groups in a row could not be made; the last: the judge is down"
    ):
        run.go()
    assert judge.num_scored == 4


def test_tokens_older_than_what_is_served_are_not_taken(tmp_path):
    """A replica that slipped through with older weights: its group is made again."""
    pool = ScriptedPool()
    honest = pool.generate_many
    lies = []

    async def lying(requests):
        made = await honest(requests)
        if pool.version == 3 and not lies and requests[0].sampling.temperature:
            lies.append(1)
            return [replace(one, spans=version_spans([(1, one.num_tokens)])) for one in made]
        return made

    pool.generate_many = lying
    run = ScriptedRun(folder=tmp_path, loop=LOOP, asynchrony=MODE, pool=pool).go()
    assert lies
    assert max(values["staleness/max"] for values in run.reporter.steps.values()) <= 1


def test_a_step_that_drops_more_than_it_trains_says_so(tmp_path):
    class Judge:
        """Scores one group in four."""

        def __init__(self):
            self.groups = 0

        async def score(self, group):
            self.groups += 1
            if self.groups % 4:
                raise RewardFailed("raised", "the judge is down")
            return replace(
                group, scores=tuple(ScriptedTask().score(group.prompt, one) for one in group.trajectories)
            )

        async def close(self):
            pass

    loop = replace(LOOP, validation_prompts=0)
    run = ScriptedRun(
        folder=tmp_path, mode="sync", loop=loop, scorer=Judge(), asynchrony=AsyncConfig(max_attempts=1)
    ).go()
    assert run.outcome.trained_groups == LOOP.steps * LOOP.prompts_per_step
    assert run.outcome.summary()["dropped_groups"]["reward_raised"] == 3 * run.outcome.trained_groups
    notes = [detail for name, detail in run.reporter.phases if name == "dropped"]
    assert len(notes) == LOOP.steps
    assert notes[0].startswith("step 1 dropped 6 groups and trained 2")
