"""The calls around training: bad values, bad batches, hooks, order, sharing rows among ranks."""

import inspect
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import offbeat_engine
from offbeat_engine import (
    BatchError,
    Fsdp2Config,
    LossOutput,
    ModelConfig,
    NonFinite,
    NonFiniteError,
    OptimizerConfig,
    SftLoss,
    StateError,
    StepContext,
    World,
)
from offbeat_engine.fsdp2 import Fsdp2Engine
from offbeat_engine.testing import RanksError, random_batch, reference_step

BATCHES = [random_batch(9, seed=0)]
HOUSE = str(Path(offbeat_engine.__file__).parent) + "/"


def config_of(path, **changes):
    return replace(Fsdp2Config(model=ModelConfig(path=path)), **changes)


def make_engine(config, world=None, loss_fn=None):
    engine = Fsdp2Engine(config, World() if world is None else world)
    engine.init_model()
    engine.set_loss_fn(SftLoss() if loss_fn is None else loss_fn)
    return engine


def test_a_training_step_is_followed_through_few_files(tiny):
    engine, entered, before = make_engine(config_of(str(tiny))), set(), sys.gettrace()

    def trace(frame, event, argument):
        code = frame.f_code  # of a function: bodies of modules and classes run at import
        if code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(HOUSE):
            entered.add(code.co_filename.removeprefix(HOUSE))

    def step():
        with engine.train_mode():
            engine.forward_backward_step(engine.shard_data(BATCHES[0]))
            engine.optimizer_step()
            engine.optimizer_zero_grad()
            engine.lr_scheduler_step()

    step()  # what is done once is not of a step
    sys.settrace(trace)
    try:
        step()
    finally:
        sys.settrace(before)
    assert "toolkit/step/micro_batches.py" in entered
    assert len(entered) <= 25, "\n".join(sorted(entered))


@dataclass(frozen=True)
class PoisonedLoss:
    """Finite everywhere but on the batch that holds token 63; its gradient is finite there too, or not."""

    gradient_too: bool

    def __call__(self, predictions, batch, scale):
        loss = SftLoss()(predictions, batch, scale).loss
        if not bool((batch["input_ids"] == 63).any()):
            return LossOutput(loss=loss)
        return LossOutput(loss=loss * float("nan") if self.gradient_too else loss + float("nan"))


def poisoned(world, path, choice, gradient_too):
    batch = random_batch(6, vocab_size=60, seed=world.rank)
    if world.rank == world.size - 1:
        batch["input_ids"][0, 0] = 63
    engine = make_engine(config_of(path, on_nonfinite=choice), world, PoisonedLoss(gradient_too))
    before = {name: tensor.clone() for name, tensor in engine.named_weights()}
    raised, norm = "", None
    with engine.train_mode():
        try:
            engine.forward_backward_step(batch)
        except NonFiniteError as error:
            raised = str(error)
        try:
            norm = engine.optimizer_step()
        except NonFiniteError as error:
            raised += str(error)
    same = all(torch.equal(before[name], tensor) for name, tensor in engine.named_weights())
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_step(random_batch(6, vocab_size=60, seed=7))
        return raised, norm, same, engine.optimizer_step()


@pytest.mark.parametrize("gradient_too", [True, False])
@pytest.mark.parametrize("choice", list(NonFinite))
def test_all_ranks_agree_on_a_loss_that_is_not_finite(tiny, two_ranks, choice, gradient_too):
    for raised, norm, same, later in two_ranks.run(poisoned, tiny, choice, gradient_too):
        assert same
        assert later == later > 0
        if choice is NonFinite.STOP:
            assert "the loss is nan" in raised
            assert norm is None
        else:
            assert raised == ""
            assert norm != norm


def bad_on_one_rank(world, path):
    engine = make_engine(config_of(path), world)
    batch = random_batch(3)
    if world.rank == 1:
        batch["lengths"] = batch["lengths"].float()
    with engine.train_mode(), pytest.raises(BatchError, match=r"rank 1: `lengths` must be"):
        engine.forward_backward_step(batch)
    return True


def test_a_bad_batch_on_one_rank_is_raised_on_all(tiny, two_ranks):
    assert two_ranks.run(bad_on_one_rank, tiny) == [True, True]


def shard_and_back(world, batch, path):
    engine = Fsdp2Engine(config_of(path), world)
    share = engine.shard_data(batch)
    return len(share["lengths"]), engine.unshard_data(share)


@pytest.mark.parametrize("num_sequences", [1, 7])
def test_unshard_undoes_shard(tiny, two_ranks, num_sequences):
    batch = random_batch(num_sequences, seed=3)
    results = two_ranks.run(shard_and_back, batch, tiny)
    assert sum(count for count, _ in results) == num_sequences
    for _, back in results:
        assert set(back.keys()) == set(batch.keys())
        assert all(torch.equal(back[key], batch[key]) for key in batch.keys())  # noqa: SIM118


@pytest.mark.parametrize("key", ["lengths", "input_ids"])
def test_rows_without_a_required_key_cannot_be_shared(tiny, key):
    batch = random_batch(3).exclude(key)
    with pytest.raises(
        BatchError, match=rf"needs `{key}` .* got .*loss_mask.*; make batches with `train_batch`"
    ):
        Fsdp2Engine(config_of(tiny), World()).shard_data(batch)


def test_hooks_run_once_per_micro_batch_and_are_heard(tiny):
    engine = make_engine(config_of(tiny, micro_batch_tokens=40))
    seen = []

    def halve(batch, ctx):
        seen.append(len(batch["lengths"]))
        mask = batch["loss_mask"].clone()
        mask[:, ::2] = False
        return batch.clone(recurse=False).update({"loss_mask": mask})

    def flip(predictions, batch, ctx):
        ctx.user["asked"] = True
        return predictions.clone(recurse=False).update({"logprobs": -predictions["logprobs"]})

    batch, ctx = BATCHES[0], StepContext()
    with engine.eval_mode():
        plain, _ = engine.forward_backward_step(batch, forward_only=True)
        hooked, _ = engine.forward_backward_step(
            batch, ctx, forward_only=True, preprocess_fn=halve, postprocess_fn=flip
        )
    expected = -plain["logprobs"].clone()
    expected[:, ::2] = 0
    assert_close(hooked["logprobs"], expected, rtol=0, atol=1e-5)
    assert sum(seen) == len(batch["lengths"])
    assert len(seen) == ctx.stats.num_micro_batches > 1
    assert ctx.user["asked"]


def test_a_given_scale_makes_accumulation_by_hand_exact(tiny):
    engine = make_engine(config_of(tiny))
    batch = BATCHES[0]
    reference = reference_step(tiny, [batch], SftLoss(), OptimizerConfig())
    with engine.train_mode():
        ctx = StepContext()
        engine.forward_backward_step(batch, ctx)
        engine.optimizer_zero_grad()
        for part in (batch[:4], batch[4:]):
            engine.forward_backward_step(part, StepContext(scale=ctx.scale))
        assert engine.optimizer_step() == pytest.approx(reference.grad_norms[0], rel=1e-5)


def test_methods_out_of_order_say_what_to_do(tiny):
    engine = Fsdp2Engine(config_of(tiny), World())
    with pytest.raises(StateError, match="call `init_model` first"):
        engine.weight_manifest()
    engine.init_model()
    with pytest.raises(StateError, match="called before"):
        engine.init_model()
    with pytest.raises(StateError, match=r"engine\.train_mode"):
        engine.forward_backward_step(BATCHES[0])
    with engine.train_mode():
        with pytest.raises(StateError, match="set_loss_fn"):
            engine.forward_backward_step(BATCHES[0])
        with pytest.raises(StateError, match="without a gradient"):
            engine.optimizer_step()
    with engine.eval_mode(), pytest.raises(StateError, match="training in eval_mode"):
        engine.forward_backward_step(BATCHES[0])
    engine.close()
    engine.close()


def test_an_empty_batch_on_every_rank_is_a_step_of_nothing(tiny):
    engine = make_engine(config_of(tiny))
    with engine.train_mode():
        predictions, loss, _ = engine.forward_backward_step(BATCHES[0][:0])
    assert loss == 0.0
    assert predictions["logprobs"].shape == (0, 24)


def boom(world):
    if world.rank == 1:
        raise ValueError("rank one is unwell")
    return "fine"


def test_an_error_of_one_rank_comes_back_with_its_rank(two_ranks):
    with pytest.raises(RanksError, match=r"(?s)rank 1: .*rank one is unwell"):
        two_ranks.run(boom)
