"""What one call promises beside its numbers: keys that hooks add, what the scale counts, empty mini-batches, the schedule."""

import pytest
import torch

from offbeat_engine import (
    BatchError,
    Field,
    Fsdp2Config,
    LossOutput,
    ModelConfig,
    NonFinite,
    OptimizerConfig,
    Schedule,
    SftLoss,
    StateError,
    StepContext,
    World,
    learning_rate,
    register_field,
    train_batch,
)
from offbeat_engine.fsdp2 import Fsdp2Engine
from offbeat_engine.testing import random_batch

RISING = OptimizerConfig(lr=1e-2, weight_decay=0.5, warmup_steps=10, schedule=Schedule.LINEAR, total_steps=20)
TOP_K = register_field(
    Field(
        key="tests/top_k",
        dims="BTK",
        dtype=torch.float32,
        required=False,
        meaning="a teacher's best log-probs",
    )
)


def engine_of(path, world=None, **changes):
    config = Fsdp2Config(model=ModelConfig(path=path), optimizer=RISING, micro_batch_tokens=40, **changes)
    engine = Fsdp2Engine(config, World() if world is None else world)
    engine.init_model()
    engine.set_loss_fn(SftLoss())
    return engine


def add_keys(predictions, batch, ctx):
    width = batch["input_ids"].shape[1]
    per_token = torch.arange(width).float().expand(len(batch["lengths"]), width)
    twice = torch.stack([per_token, 2 * per_token], -1)
    # A TensorDict keeps what it is given, of any dtype.
    return predictions.update({"pairs": twice, "tokens": batch["input_ids"], "length": batch["lengths"]})


def add_to_the_first(predictions, batch, ctx):
    if ctx.user.setdefault("seen", False):
        return predictions
    ctx.user["seen"] = True
    return add_keys(predictions, batch, ctx)


def with_added(world, path, batch, hook, changes):
    engine = engine_of(path, world, **changes)
    share = engine.shard_data(batch)
    with engine.eval_mode():
        answers, _ = engine.forward_backward_step(share, forward_only=True, postprocess_fn=hook)
    assert answers.batch_size == share.batch_size
    return len(share["lengths"]), engine.unshard_data(answers)


@pytest.mark.parametrize("changes", [{}, {"sequence_parallel_size": 2}])
@pytest.mark.parametrize("num_sequences", [1, 7])
def test_keys_that_a_hook_adds_are_there_on_all_ranks(tiny, two_ranks, num_sequences, changes):
    batch = random_batch(num_sequences)
    for num_rows, whole in two_ranks.run(with_added, tiny, batch, add_keys, changes):
        assert num_rows <= num_sequences
        real = torch.arange(batch["input_ids"].shape[1])[None] < batch["lengths"][:, None]
        assert torch.equal(whole["tokens"], batch["input_ids"] * real)
        assert torch.equal(whole["length"], batch["lengths"])
        assert whole["pairs"].shape == (*batch["input_ids"].shape, 2)
        assert bool((whole["logprobs"][batch["loss_mask"]] < 0).all())


def test_sequences_of_which_a_hook_said_nothing_have_zeros(tiny, two_ranks):
    batch = random_batch(7)
    for _, whole in two_ranks.run(with_added, tiny, batch, add_to_the_first, {}):
        told = whole["length"] > 0
        assert 0 < int(told.sum()) < 7
        assert torch.equal(whole["length"][told], batch["lengths"][told])
        assert not bool(whole["pairs"][~told].any())


def test_training_can_leave_the_predictions_out(tiny):
    engine = engine_of(tiny)
    with engine.train_mode():
        with_them, loss, _ = engine.forward_backward_step(random_batch(5))
        without, same, _ = engine.forward_backward_step(random_batch(5), predict=False)
    assert loss == same
    assert (set(with_them.keys()), set(without.keys())) == ({"logprobs", "entropy"}, set())
    assert without.batch_size == (5,)


def keep_last(batch, ctx):
    mask = torch.zeros_like(batch["loss_mask"])
    rows = torch.arange(len(mask))
    mask[rows, batch["lengths"] - 1] = batch["loss_mask"][rows, batch["lengths"] - 1]
    return batch.clone().update({"loss_mask": mask})


def test_the_scale_counts_what_a_hook_leaves_under_the_mask(tiny):
    engine, batch, ctx = engine_of(tiny), random_batch(6), StepContext()
    narrowed = keep_last(batch, ctx)
    with engine.train_mode():
        _, expected, plain = engine.forward_backward_step(narrowed)
        _, loss, ctx = engine.forward_backward_step(batch, ctx, preprocess_fn=keep_last)
    assert loss == expected
    assert ctx.scale == plain.scale
    assert ctx.scale.num_tokens == ctx.stats.num_loss_tokens == int(narrowed["loss_mask"].sum())


class TeacherLoss:
    """Cross entropy against what a hook looked up; the key is no engine's."""

    def __call__(self, predictions, batch, scale):
        assert batch["tests/top_k"].shape == (*batch["input_ids"].shape, 3)
        weight_BT = batch["tests/top_k"].mean(-1)
        return LossOutput(loss=-(weight_BT * predictions["logprobs"]).sum() / scale.num_tokens)


def ask_teacher(batch, ctx):
    return batch.clone().update({"tests/top_k": torch.ones(*batch["input_ids"].shape, 3)})


def test_a_registered_key_is_checked_cut_and_given_to_the_loss(tiny):
    engine, batch = engine_of(tiny), random_batch(6)
    with engine.train_mode():
        _, expected, _ = engine.forward_backward_step(batch)
        engine.set_loss_fn(TeacherLoss())
        _, hooked, _ = engine.forward_backward_step(batch, preprocess_fn=ask_teacher)
        _, given, _ = engine.forward_backward_step(engine.shard_data(ask_teacher(batch, None)))
    assert hooked == given == pytest.approx(expected, rel=1e-6)
    with pytest.raises(
        BatchError, match=r"`tests/top_k` must be \[6, 24, K\] .*a teacher's best.*got \[6, 24\]"
    ):
        train_batch(**batch, **{"tests/top_k": torch.ones(6, 24)})
    with pytest.raises(BatchError, match=r"unknown key `tests/other`.*`register_field` adds"):
        train_batch(**batch, **{"tests/other": torch.ones(6, 24)})


def test_a_key_has_one_meaning():
    assert register_field(TOP_K) is TOP_K  # imported twice
    for key in ("tests/top_k", "advantages"):
        with pytest.raises(BatchError, match=f"`{key}` of a batch is taken"):
            register_field(Field(key=key, dims="B", dtype=torch.int64, required=False, meaning="another"))


def no_sequences():
    return random_batch(4)[:0]


def no_tokens():
    batch = random_batch(4)
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    return batch


def one_step(engine):
    engine.optimizer_zero_grad()
    engine.forward_backward_step(random_batch(4))
    return engine.optimizer_step(), engine.lr_scheduler_step()


def step_of_nothing(world, path, make):
    other = engine_of(path, world)
    with other.train_mode():
        expected = [one_step(other) for _ in range(2)]
    engine = engine_of(path, world)
    weights = {name: tensor.clone() for name, tensor in engine.named_weights()}
    with engine.train_mode():
        steps = [one_step(engine)]
        moved = {name: tensor.clone() for name, tensor in engine.named_weights()}
        engine.optimizer_zero_grad()
        predictions, loss, _ = engine.forward_backward_step(make())
        with pytest.raises(StateError, match="no gradients; no rank had a token under its `loss_mask`"):
            next(engine.named_gradients())
        norm, rate = engine.optimizer_step(), engine.lr_scheduler_step()
        still = {name: tensor.clone() for name, tensor in engine.named_weights()}
        steps.append(one_step(engine))
    assert steps == expected  # as if it had not been: moments and schedule too
    after = dict(other.named_weights())
    assert all(torch.equal(tensor, after[name]) for name, tensor in engine.named_weights())
    assert not all(torch.equal(weights[name], moved[name]) for name in weights)
    assert all(torch.equal(still[name], moved[name]) for name in still)
    return loss, norm, rate, predictions["logprobs"].shape


@pytest.mark.parametrize("make", [no_sequences, no_tokens])
def test_a_mini_batch_without_tokens_to_train_changes_nothing(tiny, two_ranks, make):
    expected = (0.0, 0.0, learning_rate(RISING, 1), (len(make()), 24))
    assert step_of_nothing(World(), tiny, make) == expected
    assert two_ranks.run(step_of_nothing, tiny, make) == [expected, expected]


class NanOnce:
    """NaN in its first call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, predictions, batch, scale):
        self.calls += 1
        output = SftLoss()(predictions, batch, scale)
        return LossOutput(loss=output.loss * float("nan")) if self.calls == 1 else output


def test_the_schedule_does_not_count_a_step_that_was_skipped(tiny):
    engine = engine_of(tiny, on_nonfinite=NonFinite.SKIP)
    engine.set_loss_fn(NanOnce())
    rates = []
    with engine.train_mode():
        for _ in range(3):
            engine.optimizer_zero_grad()
            engine.forward_backward_step(random_batch(2))
            engine.optimizer_step()
            rates.append(engine.lr_scheduler_step())
    assert rates == [learning_rate(RISING, step) for step in (0, 1, 2)]


def test_a_context_serves_one_call(tiny):
    engine, ctx = engine_of(tiny), StepContext()
    with engine.eval_mode():
        engine.forward_backward_step(random_batch(6), ctx, forward_only=True)
        with pytest.raises(StateError, match="counts of an earlier call"):
            engine.forward_backward_step(random_batch(3), ctx, forward_only=True)
        again, _ = engine.forward_backward_step(
            random_batch(3), StepContext(scale=ctx.scale), forward_only=True
        )
    assert len(again) == 3
