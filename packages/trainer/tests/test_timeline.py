"""Where the time went: idle accounts, the sentence, and a trace that Perfetto's format describes."""

import asyncio
import json

import pytest

from offbeat_trainer.config import (
    AsyncConfig,
    EnvironmentConfig,
    LoopConfig,
    Order,
    RewardConfig,
    RewardFrom,
)
from offbeat_trainer.rollouts.environment import Feedback
from offbeat_trainer.rollouts.scorer import TaskScorer
from offbeat_trainer.watch.watchdog import GENERATION, TRAINER, Timeline
from scripted import ScriptedPool, ScriptedRun, ScriptedTask, run_virtual

LOOP = LoopConfig(
    steps=10, prompts_per_step=4, group_size=1, validate_every=0, validation_prompts=1, save_every=0, sample_every=0
)  # fmt: skip


def by_cause(timeline):
    return {(one.who, one.cause): one.seconds for one in timeline.idle()}


def test_idle_time_by_hand():
    timeline = Timeline()

    async def main():
        with timeline.phase("generate"), timeline.generating("0"):
            await asyncio.sleep(3)
        with timeline.phase("train"):
            with timeline.generating("1"):
                await asyncio.sleep(1)
            await asyncio.sleep(2)
        with timeline.phase("sync"):
            with timeline.phase("drain"), timeline.generating("2"):
                await asyncio.sleep(0.5)
            await asyncio.sleep(1)
        with timeline.phase("generate"), timeline.scoring():
            with timeline.generating("3"):
                await asyncio.sleep(0.5)
            await asyncio.sleep(4)
        timeline.tail(2.0)
        return by_cause(timeline)

    causes = run_virtual(main())
    assert causes == pytest.approx(
        {
            (TRAINER, "generate"): 3.5, (TRAINER, "drain"): 0.5, (TRAINER, "sync"): 1, (TRAINER, "tail"): 2,
            (TRAINER, "reward"): 4, (GENERATION, "train"): 2, (GENERATION, "sync"): 1, (GENERATION, "reward"): 4,
        }
    )  # fmt: skip
    assert timeline.total_s == 12
    assert timeline.rewards_s == 4
    assert timeline.sentence() == "trainer waited 33% of the steps' time for rewards"
    values = {metric.key: metric.reduction.value() for metric in timeline.metrics()}
    assert values == pytest.approx({"idle/trainer_fraction": 9 / 12, "idle/generation_fraction": 7 / 12})


def run_with(folder, mode, *, token_s, train_s, **options):
    pool = ScriptedPool(pace=token_s if callable(token_s) else lambda request: token_s)
    return ScriptedRun(
        folder=folder, mode=mode, loop=LOOP, pool=pool, train_s=lambda step: train_s, **options
    ).go()


def test_the_sentence_names_what_it_was(tmp_path):
    slow = run_with(tmp_path / "a", "sync", token_s=1.0, train_s=1.0)
    assert slow.timeline.sentence().startswith("trainer waited ")
    assert "for generation" in slow.timeline.sentence()
    training = run_with(tmp_path / "b", "fully_async", token_s=0.02, train_s=5.0)
    assert "generation waited 9" in training.timeline.sentence()
    assert "staleness bound" in training.timeline.sentence()
    syncing = run_with(tmp_path / "c", "fully_async", token_s=0.001, train_s=0.01, sync_s=10.0)
    assert "for the weight sync" in syncing.timeline.sentence()


class Guess:
    """One turn, and what it is worth is the task's to say."""

    def reset(self, prompt, seed):
        return []

    def step(self, action):
        return Feedback(observation=[], reward=0.0, done=True)


class SlowScorer(TaskScorer):
    """Takes 20 s for each group, on the clock of the loop."""

    async def score(self, group):
        await asyncio.sleep(20)
        return await super().score(group)


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
@pytest.mark.parametrize("environment", [None, Guess], ids=["one turn", "several turns"])
def test_slow_rewards_are_not_slow_generation(tmp_path, mode, environment):
    task = ScriptedTask()
    run = run_with(
        tmp_path, mode, token_s=0.01, train_s=1.0, task=task, scorer=SlowScorer(task.score, RewardConfig()),
        environment=environment, turns=EnvironmentConfig(reward_from=RewardFrom.TASK),
    )  # fmt: skip
    generate_s, reward_s = (
        sum(values[f"time/{phase}_s"] for values in run.reporter.steps.values()) for phase in ("generate", "reward")
    )  # fmt: skip
    assert generate_s < LOOP.steps * 0.2  # 12 tokens take 0.12 s
    assert reward_s > LOOP.steps * 20 / 4
    assert run.timeline.sentence().endswith("of the steps' time for rewards")


def test_the_long_tail_is_told_apart(tmp_path):
    def tail(request):
        return 5.0 if request.prompt_ids[0] % 4 == 1 else 0.01

    run = run_with(
        tmp_path,
        "fully_async",
        token_s=tail,
        train_s=0.1,
        asynchrony=AsyncConfig(max_staleness=0, order=Order.FIRST_IN),
    )
    assert "for the longest 2% of generations alone" in run.timeline.sentence()
    causes = by_cause(run.timeline)
    assert 0 < causes[TRAINER, "tail"] <= causes[TRAINER, "generate"]


def test_a_run_that_overlaps_well_idles_little(tmp_path):
    settings = {"token_s": 0.1, "train_s": 1.0, "asynchrony": AsyncConfig(max_staleness=4)}
    sync = run_with(tmp_path / "a", "sync", **settings).timeline
    ahead = run_with(tmp_path / "b", "fully_async", **settings).timeline
    assert ahead.idle_seconds(TRAINER) < 0.5 * sync.idle_seconds(TRAINER)


def test_the_trace_is_what_perfetto_reads(tmp_path):
    timeline = Timeline(tmp_path / "trace.json")
    run_with(tmp_path, "fully_async", token_s=0.1, train_s=1.0, timeline=timeline)
    unfinished = (tmp_path / "trace.json").read_text()
    timeline.close()
    timeline.close()
    events = [event for event in json.loads((tmp_path / "trace.json").read_text()) if event]
    json.loads(unfinished.rstrip().rstrip(",") + "]") if unfinished else None  # what a killed run leaves
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert set(tracks.values()) >= {"trainer", "generation", "sync", "ready groups"}
    assert all(event["tid"] in tracks and event["pid"] == 1 for event in events)
    spans = [event for event in events if event["ph"] == "X"]
    assert {"train", "sync", "generate"} <= {event["name"] for event in spans}
    assert all(event["dur"] >= 0 for event in spans)
    begun = [event["id"] for event in events if event["ph"] == "b"]
    assert len(begun) == len(set(begun)) == 40 + 2  # and those of two validations
    assert sorted(begun) == sorted(event["id"] for event in events if event["ph"] == "e")
    assert sum(event["ph"] == "i" for event in events) == LOOP.steps


def test_of_a_long_run_the_last_part_stays_in_two_files(tmp_path):
    limit = 4000
    timeline = Timeline(tmp_path / "trace.json", max_bytes=limit)
    for number in range(1000):
        timeline.mark(f"track {number % 3}", f"event {number}")
    timeline.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.before.json", "trace.json"]
    drawn = []
    for name in ("trace.before.json", "trace.json"):
        assert (tmp_path / name).stat().st_size < limit + 200
        events = json.loads((tmp_path / name).read_text())
        tracks = {event["tid"]: event["args"]["name"] for event in events if event.get("ph") == "M"}
        drawn += [(tracks[event["tid"]], event["name"]) for event in events if event.get("ph") == "i"]
    first = 1000 - len(drawn)
    assert len(drawn) > 20
    assert drawn == [(f"track {number % 3}", f"event {number}") for number in range(first, 1000)]
