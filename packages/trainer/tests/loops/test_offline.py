"""Learning from written rows, on a real engine in one process: metrics, held-out rows, stops and resumes."""

import json

import pytest
import torch

from offbeat_engine import Fsdp2Config, ModelConfig, OptimizerConfig, World, engine_class
from offbeat_engine.testing import make_tiny_model
from offbeat_trainer import Example, Learner, LoopConfig, Role, Sft, SftConfig, reduce_metrics
from offbeat_trainer.algorithms.learner import LocalPolicy
from offbeat_trainer.data.metrics import Mean, Metric
from offbeat_trainer.loops.offline import OfflineSession, run_offline
from offbeat_trainer.loops.outcome import Outcome
from offbeat_trainer.loops.run_store import RunStore
from offbeat_trainer.loops.session import StopRequest
from offbeat_trainer.watch.jsonl import JsonlReporter

SFT = Sft(config=SftConfig())
CLOCKS = ("time", "memory/")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def examples(step, count=6):
    """Prompts are answered by the token after their last, three times."""
    draw = torch.Generator().manual_seed(step)
    starts = torch.randint(3, 60, (count,), generator=draw).tolist()
    return [Example(prompt_ids=(1, one), completion_ids=(one + 1,) * 3) for one in starts]


async def run(folder, model, *, steps=6, resume=False, stop_at=None, validate=None):
    engine = engine_class("fsdp2")(
        Fsdp2Config(model=ModelConfig(path=model), optimizer=OptimizerConfig(lr=3e-3)), World()
    )
    engine.init_model()
    learner = Learner(SFT, {"policy": Role(engine)}, checkpoints=str(folder), keep=2)
    policy, stop, outcome = LocalPolicy(learner, timeout_s=600), StopRequest(), Outcome()
    store, reporter = RunStore(folder / "state", keep=2), JsonlReporter(folder)
    start = await policy.load(None) if resume else 0
    if resume:
        reporter.truncate_after(start)
        outcome.loss_before = store.load(start).loss_before

    def batch(step):
        stop.requested = step == stop_at
        return SFT.batch(examples(step))

    session = OfflineSession(
        policy=policy,
        batch=batch,
        held_out=SFT.batch(examples(1000, 12)),
        reporter=reporter,
        store=store,
        loop=LoopConfig(steps=steps, validate_every=3, save_every=2),
        validate=validate,
        stop=stop,
    )
    await run_offline(session, outcome, start)
    reporter.close()
    learner.close()
    return outcome


def history(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(CLOCKS)} for line in lines]


async def test_what_was_learned_shows_in_held_out_rows_and_in_the_metrics_of_every_step(tmp_path, model):
    outcome = await run(tmp_path, model, steps=12)
    lines = history(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["step"] for line in lines if "validation/loss" in line] == [3, 6, 9, 12]
    assert all(line["train/loss"] > 0 and line["policy/entropy_nats"] > 0 for line in lines)
    assert outcome.loss_after == lines[-1]["validation/loss"] < outcome.loss_before - 0.5
    assert outcome.summary()["loss_before"] == outcome.loss_before
    assert (outcome.steps, outcome.interrupted) == (12, False)


async def test_a_stopped_run_goes_on_to_the_bit(tmp_path, model):
    whole = await run(tmp_path / "whole", model)
    stopped = await run(tmp_path / "parted", model, stop_at=2)
    assert (stopped.steps, stopped.interrupted) == (3, True)
    rest = await run(tmp_path / "parted", model, resume=True)
    assert history(tmp_path / "parted") == history(tmp_path / "whole")
    assert (rest.loss_before, rest.loss_after) == (whole.loss_before, whole.loss_after)


async def test_a_run_that_lost_steps_does_them_again(tmp_path, model):
    await run(tmp_path / "whole", model)
    await run(tmp_path / "lost", model, steps=5)
    for path in (tmp_path / "lost").glob("policy/step_5"):
        path.rename(tmp_path / "gone")
    await run(tmp_path / "lost", model, resume=True)
    assert history(tmp_path / "lost") == history(tmp_path / "whole")


async def test_completions_are_measured_where_held_out_rows_are_looked_at(tmp_path, model):
    asked = []

    async def validate(clock, step, title):
        asked.append((step, title))
        return [Metric("accuracy/validation", Mean(step / 100))]

    outcome = await run(tmp_path, model, validate=validate)
    assert asked == [(0, "before"), (3, ""), (6, "after")]
    assert (outcome.accuracy_before, outcome.accuracy_after) == (0.0, 0.06)


def test_the_held_out_loss_is_that_of_a_step_that_would_train_on_them(tmp_path, model):
    engine = engine_class("fsdp2")(Fsdp2Config(model=ModelConfig(path=model), micro_batch_tokens=16), World())
    engine.init_model()
    roles, batch = {"policy": Role(engine)}, SFT.batch(examples(3, 9))
    said = reduce_metrics(SFT.evaluate(roles, batch))
    trained = reduce_metrics(SFT.learn(roles, batch))
    assert said == {"validation/loss": pytest.approx(trained["train/loss"], abs=1e-6)}
    assert reduce_metrics(SFT.evaluate(roles, batch))["validation/loss"] < said["validation/loss"]
    engine.close()
