"""Syncs beside the next step, on a virtual clock: training waits until its weights are copied out, and whoever looks at a version has it."""

import asyncio
from dataclasses import replace

import pytest

from offbeat_ckptsync import SyncFailed
from offbeat_trainer.config import AsyncConfig, LoopConfig, Order, Partial
from offbeat_trainer.loops.events import Flipped, MemoryJournal
from offbeat_trainer.loops.schedule import Schedule
from offbeat_trainer.watch.watchdog import now_s
from scripted import ScriptedPool, ScriptedRun

LOOP = LoopConfig(
    steps=8, prompts_per_step=4, group_size=2, validate_every=0, validation_prompts=2, save_every=0, sample_every=0
)  # fmt: skip


class Watched(ScriptedRun):
    """Notes when each step began to train, and the version that was served when a checkpoint was written."""

    def watch(self):
        self.trained_s, self.saved, self.validated = [], {}, {}
        update, save, generate = self.policy.update, self.policy.save, self.pool.generate_many

        async def training(batch, state):
            self.trained_s.append(now_s())
            return await update(batch, state)

        async def saving(step, *, block):
            self.saved[step] = self.publisher.flips[-1][1]
            await save(step, block=block)

        async def generating(requests):
            if requests[0].sampling.temperature == 0:
                self.validated[self.policy.steps] = self.publisher.flips[-1][1]
            return await generate(requests)

        self.policy.update, self.policy.save, self.pool.generate_many = training, saving, generating
        return self


def overlaps(run):
    """The steps that began to train before the weights of the step before were served."""
    flips = {version: moment for moment, version in run.publisher.flips}
    return [step for step, moment in enumerate(run.trained_s) if moment < flips[step + 1]]


MODES = [
    ("fully_async", AsyncConfig(max_staleness=2)),
    ("fully_async", AsyncConfig(max_staleness=2, partial=Partial.ABORT)),
    ("fully_async", AsyncConfig(max_staleness=1, partial=Partial.WAIT, order=Order.FIRST_IN)),
    ("one_step_off", AsyncConfig()),
]


def go(folder, mode, asynchrony, **settings):
    made = Watched(
        folder=folder, mode=mode, asynchrony=asynchrony,
        **{"loop": LOOP, "sync_s": 0.6, "pool": ScriptedPool(pace=lambda request: 0.01), **settings},
    )  # fmt: skip
    return made.watch().go()


@pytest.mark.parametrize(("mode", "asynchrony"), MODES)
def test_the_next_step_trains_while_replicas_change_over(tmp_path, mode, asynchrony):
    run = go(tmp_path, mode, asynchrony)
    assert overlaps(run) == list(range(1, LOOP.steps))
    assert max(values["staleness/max"] for values in run.reporter.steps.values()) <= asynchrony.max_staleness
    assert [version for _, version in run.publisher.flips] == list(range(1, LOOP.steps + 2))
    assert sum("sync/version" in values for values in run.reporter.steps.values()) == LOOP.steps - 1
    assert run.reporter.steps[LOOP.steps]["sync/version"] == LOOP.steps + 1


@pytest.mark.parametrize("partial", [Partial.KEEP, Partial.ABORT])
def test_a_sync_that_lasts_longer_than_a_step_leaves_versions_out_and_is_waited_for_at_the_bound_alone(
    tmp_path, partial
):
    asynchrony = AsyncConfig(max_staleness=3, partial=partial)
    run = go(tmp_path, "fully_async", asynchrony, sync_s=1.5, loop=replace(LOOP, steps=24))
    assert max(values["staleness/max"] for values in run.reporter.steps.values()) <= 3
    versions = [version for _, version in run.publisher.flips]
    assert versions == sorted(set(versions))
    assert len(versions) < 20, "some were left out"
    assert versions[-1] == 25, "the last is served at the end"
    waited_s = sum(run.reporter.steps[step].get("time/sync_s", 0.0) for step in range(1, 24))
    assert waited_s == pytest.approx(0.0, abs=1e-6), (
        "training waits for what is copied out, on this clock at once"
    )
    bound = go(tmp_path / "bound", "fully_async", AsyncConfig(max_staleness=1), sync_s=1.5)
    assert [version for _, version in bound.publisher.flips] == list(range(1, LOOP.steps + 2))


class CopyingFor:
    """Takes `seconds` to copy the weights out, which must stand still until then: it is asserted where they are read."""

    def __init__(self, run, seconds):
        self.seconds, self.inner = seconds, run.publisher

    def __getattr__(self, name):
        return getattr(self.inner, name)

    async def publish(self, version, gathered=None):
        await asyncio.sleep(self.seconds if gathered is not None else 0.0)
        return await self.inner.publish(version, gathered)


@pytest.mark.parametrize(("mode", "asynchrony"), MODES[:2])  # the others wait also until generation rests
def test_a_step_waits_for_its_groups_while_weights_are_copied_out_and_trains_once_they_are(
    tmp_path, mode, asynchrony
):
    waited_s = {}
    for copy_s in (0.2, 5.0):
        pool = ScriptedPool(pace=lambda request: 0.3)
        run = ScriptedRun(
            folder=tmp_path / str(copy_s), mode=mode, asynchrony=asynchrony, loop=LOOP, pool=pool,
            train_s=lambda step: 0.1,
        )  # fmt: skip
        run.publisher = CopyingFor(run, copy_s)
        steps = run.go().reporter.steps
        waited_s[copy_s] = [steps[step].get("time/sync_s", 0.0) for step in range(2, LOOP.steps)]
    assert min(waited_s[0.2]) == pytest.approx(0.0, abs=1e-6), "where generation takes longer"
    assert max(waited_s[5.0]) > 1.0


@pytest.mark.parametrize(
    ("mode", "asynchrony"), [("sync", AsyncConfig()), ("fully_async", AsyncConfig(max_staleness=0))]
)
def test_without_staleness_a_step_waits_for_the_weights_that_made_its_tokens(tmp_path, mode, asynchrony):
    assert overlaps(go(tmp_path, mode, asynchrony)) == []


@pytest.mark.parametrize(("mode", "asynchrony"), MODES)
def test_validation_and_checkpoints_see_the_version_of_their_step(tmp_path, mode, asynchrony):
    loop = replace(LOOP, validate_every=3, save_every=2)
    run = go(tmp_path, mode, asynchrony, loop=loop)
    assert run.saved == {step: step + 1 for step in (2, 4, 6, 8)}
    assert run.validated == {step: step + 1 for step in (0, 3, 6, 8)}
    assert overlaps(run) == [1, 5, 7], "elsewhere steps go on at once"


@pytest.mark.parametrize(("mode", "asynchrony"), MODES)
def test_validation_is_made_beside_steps_by_the_version_of_its_own_where_timing_decides_anyway(
    tmp_path, mode, asynchrony
):
    looked_s = []

    def pace(request):
        looking = request.sampling.temperature == 0
        if looking:
            looked_s.append(now_s())
        return 0.5 if looking else 0.01

    loop = replace(LOOP, steps=24, validate_every=6)
    run = go(tmp_path, mode, asynchrony, loop=loop, pool=ScriptedPool(pace=pace), sync_s=0.1)
    told = {step: values for step, values in run.reporter.steps.items() if "reward/validation" in values}
    at_once = {step for step, values in told.items() if "time/validate_s" in values}
    assert run.publisher.flips[-1][1] == 25
    if asynchrony.partial is Partial.WAIT or mode == "one_step_off":
        assert at_once == told.keys() == {6, 12, 18, 24}
        return
    assert at_once == {24}, "the last one is waited for"
    made = {step: values["validation/version"] for step, values in told.items() if step != 24}
    assert [*made.values()] == [7, 13, 19]
    assert all(step >= version for step, version in made.items()), "steps went on meanwhile"
    began_s = sorted({*looked_s})[1:4]
    flips_s = [moment for moment, _ in run.publisher.flips]
    for began in began_s:
        ended = min(moment for moment in flips_s if moment > began)
        assert ended >= began + 0.5, "no weights change before it has ended"
        assert any(began < moment < ended for moment in run.trained_s)


def test_a_validation_beside_steps_that_fails_ends_the_run_with_its_error(tmp_path):
    pool, planted = ScriptedPool(pace=lambda request: 0.01), []
    run = Watched(
        folder=tmp_path,
        loop=replace(LOOP, validate_every=3),
        asynchrony=AsyncConfig(max_staleness=2),
        pool=pool,
    ).watch()
    generate = run.pool.generate_many

    async def failing(requests):
        if requests[0].sampling.temperature == 0 and run.policy.steps >= 3:
            planted.append(run.policy.steps)
            raise ValueError("planted")
        return await generate(requests)

    run.pool.generate_many = failing
    with pytest.raises(ValueError, match="planted"):
        run.go()
    assert planted
    assert run.policy.steps <= 6


@pytest.mark.parametrize(
    "asynchrony", [AsyncConfig(), AsyncConfig(max_staleness=3, order=Order.FIRST_IN, partial=Partial.WAIT)]
)
def test_what_a_deterministic_run_trains_does_not_depend_on_how_long_syncs_take(tmp_path, asynchrony):
    mode = "one_step_off" if asynchrony == AsyncConfig() else "fully_async"
    ends = {
        go(tmp_path / str(sync_s), mode, asynchrony, sync_s=sync_s).policy.history
        for sync_s in (0.001, 0.6, 1.9, 30.0)
    }
    assert len(ends) == 1


def test_a_run_whose_syncs_ended_beside_its_steps_is_replayed(tmp_path):
    asynchrony = AsyncConfig(max_staleness=3, partial=Partial.ABORT)
    pool = ScriptedPool(pace=lambda request: 0.3)
    run = ScriptedRun(folder=tmp_path / "run", loop=LOOP, asynchrony=asynchrony, pool=pool, sync_s=1.7).go()
    assert max(values["trajectory/versions_max"] for values in run.reporter.steps.values()) > 1
    again = ScriptedRun(
        folder=tmp_path / "again", loop=LOOP, asynchrony=asynchrony, replay=Schedule.of(run.journal.events())
    ).go()
    assert again.policy.history == run.policy.history
    assert again.history() == run.history()


class FailingPublisher:
    """Copies out, and fails then: for good, or until a second try has brought the weights of then."""

    def __init__(self, run, version, *, recovers):
        self.run, self.version, self.recovers, self.inner = run, version, recovers, run.publisher

    def __getattr__(self, name):
        return getattr(self.inner, name)

    async def publish(self, version, gathered=None):
        if version != self.version:
            return await self.inner.publish(version, gathered)
        gathered()
        await asyncio.sleep(0.5)
        if not self.recovers:
            raise SyncFailed("planted")
        await asyncio.sleep(5.0)  # meanwhile the next step has trained
        return replace(await self.inner.publish(self.run.policy.steps + 1), failures=("planted",))


def test_a_sync_that_fails_beside_a_step_ends_the_run_with_its_error(tmp_path):
    run = Watched(folder=tmp_path, loop=LOOP, asynchrony=AsyncConfig(max_staleness=2), sync_s=0.6).watch()
    run.publisher = FailingPublisher(run, 4, recovers=False)
    with pytest.raises(SyncFailed, match="planted"):
        run.go()
    assert run.publisher.flips[-1][1] == 3
    assert len(run.trained_s) <= 5, "nothing is trained for long on a version that cannot be served"


def test_newer_weights_that_a_second_try_brought_are_served_once_and_told_of(tmp_path):
    journal = MemoryJournal()
    run = Watched(
        folder=tmp_path, loop=LOOP, asynchrony=AsyncConfig(max_staleness=2), sync_s=0.6, journal=journal
    ).watch()
    run.publisher = FailingPublisher(run, 4, recovers=True)
    run.go()
    versions = [1, 2, 3, 6, 7, 8, 9]  # 4 failed, 5 was left out as it was tried again, which brought 6
    assert [version for _, version in run.publisher.flips] == versions
    flipped = [event for event in journal.events() if isinstance(event, Flipped)]
    assert [(event.steps, event.version) for event in flipped] == [(one - 1, one) for one in versions[1:]]
    assert max(values["staleness/max"] for values in run.reporter.steps.values()) <= 2
    assert sum(values.get("sync/failures", 0) for values in run.reporter.steps.values()) == 1
