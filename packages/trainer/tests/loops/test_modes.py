"""The three loops, whole runs on a virtual clock: what each promises about what it trains."""

import asyncio
import random
from dataclasses import replace

import pytest
import torch

from offbeat_trainer.config import AsyncConfig, LoopConfig, Order, Partial
from offbeat_trainer.data.assemble import assembled
from offbeat_trainer.data.types import Score, version_of
from offbeat_trainer.errors import PlanRefused
from offbeat_trainer.loops.outcome import close_step, open_run, sync_metrics
from offbeat_trainer.loops.session import StopRequest
from offbeat_trainer.rollouts.single import run_all, sampling_params
from scripted import ScriptedPool, ScriptedRun
from scripted.parts import ScriptedTask
from scripted.recorder import Recorder

LOOP = LoopConfig(
    steps=6, prompts_per_step=4, group_size=2, validate_every=3, validation_prompts=2, save_every=2, sample_every=0
)  # fmt: skip


def random_pace(seed, slowest=0.3):
    """Seconds per token, another for every request."""
    draws = random.Random(seed)
    return lambda request: draws.uniform(0.001, slowest)


def versions_of(batch):
    return batch["policy_version"][batch["loss_mask"]].tolist()


def same_batches(one, other):
    assert len(one.policy.batches) == len(other.policy.batches)
    for a, b in zip(one.policy.batches, other.policy.batches, strict=True):
        assert set(a.keys()) == set(b.keys())
        for key in a.keys():  # noqa: SIM118 - iterating a TensorDict goes over its sequences
            assert torch.equal(a[key], b[key]), key


async def in_plain_turns(parts, outcome, start):
    """What synchronous training is, without stream, gate, buffer and journal."""
    await open_run(parts, outcome, start)
    for step in range(start, parts.loop.steps):
        clock = parts.clock()
        prompts = parts.task.prompts(step, parts.loop.prompts_per_step)
        groups = await run_all(
            parts.rollout,
            prompts,
            sampling_params(parts.sampling, parts.task, parts.seed, step),
            parts.loop.group_size,
        )
        batch = await assembled(groups, parts.algorithm.targets, parts.sampling.temperature)
        trained = await parts.policy.update(batch)
        report = await parts.publisher.publish(version_of(step + 1))
        await close_step(parts, outcome, clock, step, groups, [*trained, *sync_metrics(report)])


class Turns(ScriptedPool):
    """Counts the groups that are asked for in one turn of the event loop."""

    def __init__(self):
        super().__init__()
        self.groups = []
        self._turn_ends = None

    async def generate_many(self, requests):
        if self._turn_ends is None or self._turn_ends.is_set():
            self.groups.append(0)
            self._turn_ends = asyncio.Event()
            asyncio.get_running_loop().call_soon(self._turn_ends.set)
        self.groups[-1] += 1
        return await super().generate_many(requests)


def test_a_synchronous_step_asks_for_all_its_groups_in_one_turn(tmp_path):
    pool = Turns()
    loop = replace(LOOP, prompts_per_step=10, validate_every=0)
    ScriptedRun(folder=tmp_path, mode="sync", loop=loop, pool=pool).go()
    assert [count for count in pool.groups if count > 1] == [2, *[10] * loop.steps, 2]


WITHOUT_STALENESS = [
    ("sync", Order.FIRST_IN, Partial.WAIT),
    *[("fully_async", order, partial) for order in Order for partial in Partial],
]


class Keeper(Recorder):
    """Keeps the advantages that it is told of."""

    def __init__(self):
        super().__init__()
        self.advantages = []

    def trajectories(self, step, groups, decode, advantages=None):
        self.advantages.append([one.tolist() for one in advantages])
        assert list(map(len, advantages)) == [
            one.num_tokens for group in groups for one in group.trajectories
        ]


class Shows(Recorder):
    """Keeps how far phases were said to be."""

    def __init__(self):
        super().__init__()
        self.far = []

    def progress(self, done, total):
        self.far.append((self.phases[-1][0], done, total))


class AskedOnce(ScriptedTask):
    """Takes its time over held-out prompts: it must not be asked for them again."""

    asked = False

    def validation_prompts(self, num_prompts):
        assert not self.asked
        self.asked = True
        return super().validation_prompts(num_prompts)


def test_a_task_is_asked_for_its_held_out_prompts_once(tmp_path):
    loop = replace(LOOP, validate_every=1)
    run = ScriptedRun(folder=tmp_path, mode="sync", loop=loop, task=AskedOnce()).go()
    assert run.task.asked


def test_a_validation_that_is_waited_for_says_how_far_it_is(tmp_path):
    loop = replace(LOOP, validate_every=0, validation_prompts=3)
    run = ScriptedRun(folder=tmp_path, mode="sync", loop=loop, reporter=Shows()).go()
    assert run.reporter.far == [("validate", done, 3) for done in (1, 2, 3)] * 2  # before and after


@pytest.mark.parametrize("name", ["sync", "one_step_off", "fully_async"])
def test_the_advantages_that_are_kept_are_those_that_were_trained(tmp_path, name):
    run = ScriptedRun(folder=tmp_path, mode=name, loop=LOOP, reporter=Keeper()).go()
    trained = [
        [own[mask].tolist() for own, mask in zip(batch["advantages"], batch["loss_mask"], strict=True)]
        for batch in run.policy.batches
    ]
    assert len(trained) == LOOP.steps
    assert any(value for step in trained for own in step for value in own)
    assert run.reporter.advantages == trained


@pytest.mark.parametrize(("name", "order", "partial"), WITHOUT_STALENESS)
def test_no_staleness_is_taking_turns_batch_for_batch_and_metric_for_metric(tmp_path, name, order, partial):
    sync = ScriptedRun(folder=tmp_path / "turns", mode=in_plain_turns, loop=LOOP).go()
    pool = ScriptedPool(pace=random_pace(3))
    mode = AsyncConfig(max_staleness=0, order=order, partial=partial)
    run = ScriptedRun(folder=tmp_path / "run", mode=name, loop=LOOP, asynchrony=mode, pool=pool).go()
    same_batches(run, sync)
    assert run.policy.history == sync.policy.history
    assert run.history() == sync.history()
    assert len(run.history()) == LOOP.steps
    assert [version for _, version in run.publisher.flips] == [version for _, version in sync.publisher.flips]


def test_the_comparison_with_sync_sees_one_version_of_staleness(tmp_path):
    sync = ScriptedRun(folder=tmp_path / "sync", mode="sync", loop=LOOP).go()
    run = ScriptedRun(folder=tmp_path / "async", loop=LOOP, asynchrony=AsyncConfig(max_staleness=1)).go()
    assert run.policy.history != sync.policy.history
    assert run.history() != sync.history()


def test_one_step_off_lags_exactly_one(tmp_path):
    run = ScriptedRun(
        folder=tmp_path, mode="one_step_off", loop=LOOP, pool=ScriptedPool(pace=random_pace(1))
    ).go()
    for step, batch in enumerate(run.policy.batches):
        assert set(versions_of(batch)) == {max(1, step)}, (
            "step s trains version s + 1, on tokens of version s"
        )
    assert [sorted(set(numbers)) for numbers in run.policy.prompts] == [
        list(range(4 * step, 4 * step + 4)) for step in range(LOOP.steps)
    ]
    assert [run.history()[step]["staleness/max"] for step in range(1, 7)] == [0, 1, 1, 1, 1, 1]


def test_one_step_off_and_a_deterministic_stream_do_not_depend_on_timing(tmp_path):
    deterministic = AsyncConfig(max_staleness=2, sync_every=2, order=Order.FIRST_IN, partial=Partial.WAIT)
    for mode in ("sync", "one_step_off", "fully_async"):
        ends = {
            ScriptedRun(
                folder=tmp_path / mode / str(seed),
                mode=mode,
                loop=LOOP,
                asynchrony=deterministic,
                pool=ScriptedPool(pace=random_pace(seed)),
                train_s=random_pace(seed, slowest=3.0),
            )
            .go()
            .policy.history
            for seed in range(5)
        }
        assert len(ends) == 1


def seconds(folder, mode, *, train_s, token_s, scorer=None, **settings):
    loop = replace(LOOP, steps=20, validate_every=0, save_every=0)
    pool = ScriptedPool(pace=token_s if callable(token_s) else lambda request: token_s)
    run = ScriptedRun(
        folder=folder / mode, mode=mode, loop=loop, pool=pool, train_s=lambda step: train_s,
        asynchrony=AsyncConfig(**settings), scorer=scorer,
    ).go()  # fmt: skip
    return run.publisher.flips[-1][0]


def test_running_ahead_overlaps_generation_with_training(tmp_path):
    """Both take about a second a step: in turns two seconds, side by side one."""
    times = {
        m: seconds(tmp_path, m, train_s=1.1, token_s=0.1) for m in ("sync", "one_step_off", "fully_async")
    }
    assert times["one_step_off"] < 0.65 * times["sync"]
    assert times["fully_async"] < 0.65 * times["sync"]


def test_rewards_are_scored_while_a_step_trains(tmp_path):
    """Rewards take 0.8 s and training 1 s a step: in turns the sum, off the beat the longer one."""

    class Judge:
        async def score(self, group):
            await asyncio.sleep(0.8)
            return replace(group, scores=tuple(Score(reward=1.0, correct=True) for _ in group.trajectories))

        async def close(self):
            pass

    times = {
        m: seconds(tmp_path, m, train_s=1.0, token_s=0.001, scorer=Judge()) for m in ("sync", "fully_async")
    }
    assert times["fully_async"] < 0.65 * times["sync"]


def test_a_stream_hides_the_long_tail_that_one_step_off_waits_for(tmp_path):
    def tail(request):
        return 1.0 if request.sampling.seed % 16 == 0 else 0.05

    times = {
        m: seconds(tmp_path, m, train_s=1.0, token_s=tail, max_staleness=8)
        for m in ("one_step_off", "fully_async")
    }
    assert times["fully_async"] < 0.6 * times["one_step_off"]


def test_versions_change_within_completions_where_they_are_kept_or_continued(tmp_path):
    for partial in (Partial.KEEP, Partial.ABORT):
        pool = ScriptedPool(pace=lambda request: 0.5)
        mode = AsyncConfig(max_staleness=4, partial=partial)
        run = ScriptedRun(
            folder=tmp_path / partial, loop=LOOP, asynchrony=mode, pool=pool, train_s=lambda step: 0.5
        ).go()
        assert max(run.history()[step]["trajectory/versions_max"] for step in run.history()) > 1
        for batch in run.policy.batches:  # every log-prob is that of the version it is stamped with
            assert max(versions_of(batch)) > 0


def test_the_log_prob_of_a_token_is_that_of_the_version_it_is_stamped_with(tmp_path):
    for partial in (Partial.KEEP, Partial.ABORT):
        served = {}
        pool = ScriptedPool(pace=lambda request: 0.5)
        flip = pool.flip

        def remembering(version, logits, served=served, flip=flip):
            served[version] = torch.tensor(logits, dtype=torch.float64).log_softmax(0)
            flip(version, logits)

        pool.flip = remembering
        mode = AsyncConfig(max_staleness=4, partial=partial)
        run = ScriptedRun(folder=tmp_path / partial, loop=LOOP, asynchrony=mode, pool=pool).go()
        mixed = 0
        for batch in run.policy.batches:
            mask = batch["loss_mask"]
            for token, version, logprob in zip(
                batch["input_ids"][mask].tolist(),
                versions_of(batch),
                batch["rollout_logprobs"][mask].tolist(),
                strict=True,
            ):
                assert logprob == pytest.approx(served[version][token].item(), abs=1e-6)
            mixed += len(set(versions_of(batch))) > 1
        assert mixed


def test_weights_flow_every_so_many_steps_and_before_anything_looks_at_them(tmp_path):
    loop = replace(LOOP, steps=7, validate_every=5, save_every=0)
    run = ScriptedRun(folder=tmp_path, loop=loop, asynchrony=AsyncConfig(max_staleness=3, sync_every=3)).go()
    assert [version for _, version in run.publisher.flips] == [1, 4, 6, 7, 8]


def test_over_sampling_takes_the_fastest_and_drops_the_rest(tmp_path):
    pool = ScriptedPool(pace=random_pace(5, slowest=1.0))
    mode = AsyncConfig(max_staleness=0, over_sampling=0.5)
    run = ScriptedRun(folder=tmp_path, loop=LOOP, asynchrony=mode, pool=pool).go()
    assert run.reporter.steps[6]["buffer/dropped_outpaced_groups"] == 6 * 2
    assert set(versions_of(run.policy.batches[-1])) == {6}


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
def test_a_stop_request_ends_after_its_step_and_the_run_goes_on_from_there(tmp_path, mode):
    settings = {
        "folder": tmp_path / "parts", "mode": mode, "loop": LOOP,
        "asynchrony": AsyncConfig(order=Order.FIRST_IN, partial=Partial.WAIT),
    }  # fmt: skip
    whole = ScriptedRun(**(settings | {"folder": tmp_path / "whole"})).go()
    stop = StopRequest()
    stop.requested = True
    first = ScriptedRun(**settings, stop=stop).go()
    assert (first.outcome.steps, first.outcome.interrupted) == (1, True)
    second = ScriptedRun(**settings, journal=first.journal).go()
    assert (second.outcome.steps, second.outcome.steps_here) == (6, 5)
    assert second.policy.history == whole.policy.history
    assert second.history()[6] == whole.history()[6]


@pytest.mark.parametrize(("asked_in", "ends_after"), [(1, 3), (2, 3), (3, 3), (4, 6)])
def test_a_stop_between_two_syncs_waits_for_the_next_and_adds_none(tmp_path, asked_in, ends_after):
    """A run that is stopped and goes on flips where the one that is left alone does, and so trains the same."""
    stop = StopRequest()

    def training(step):
        stop.requested |= step + 1 == asked_in
        return 1.0

    settings = {
        "folder": tmp_path / "parts", "loop": replace(LOOP, steps=9, validate_every=0, save_every=0),
        "asynchrony": AsyncConfig(max_staleness=2, sync_every=3, order=Order.FIRST_IN, partial=Partial.WAIT),
    }  # fmt: skip
    whole = ScriptedRun(**(settings | {"folder": tmp_path / "whole"})).go()
    first = ScriptedRun(**settings, stop=stop, train_s=training).go()
    assert (first.outcome.steps, first.outcome.interrupted) == (ends_after, True)
    second = ScriptedRun(**settings, journal=first.journal).go()
    flips = [version for run in (first, second) for _, version in run.publisher.flips]
    assert sorted(set(flips)) == [version for _, version in whole.publisher.flips] == [1, 4, 7, 10]
    assert second.policy.history == whole.policy.history


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_staleness": -1}, "max_staleness"),
        ({"sync_every": 0}, "sync_every"),
        ({"max_staleness": 1, "sync_every": 3}, "raise `max_staleness`"),
        ({"over_sampling": -0.1}, "over_sampling"),
        ({"max_attempts": 0}, "max_attempts"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path, settings, says):
    with pytest.raises(PlanRefused, match=says):
        ScriptedRun(folder=tmp_path, loop=LOOP, asynchrony=AsyncConfig(**settings)).go()
