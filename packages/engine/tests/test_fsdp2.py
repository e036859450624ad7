"""The engine against the plain reference: one rank, two ranks, packed, padded, in many micro-batches."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch.testing import assert_close

from offbeat_engine import (
    Dtype,
    Fsdp2Config,
    LossOutput,
    ModelConfig,
    OptimizerConfig,
    SftLoss,
    World,
)
from offbeat_engine.fsdp2 import Fsdp2Engine
from offbeat_engine.testing import (
    make_tiny_model,
    random_batch,
    reference_logprobs,
    reference_step,
    relative_error,
)
from offbeat_engine.testing.reference import load_reference

OPTIMIZER = OptimizerConfig(lr=1e-3, max_grad_norm=0.5, weight_decay=0.1, warmup_steps=2, eps=1e-4)


def config_of(path, **changes):
    base = Fsdp2Config(model=ModelConfig(path=path), optimizer=OPTIMIZER)
    return replace(base, **changes)


def make_engine(config, world=None, loss_fn=None):
    engine = Fsdp2Engine(config, World() if world is None else world)
    engine.init_model()
    engine.set_loss_fn(SftLoss() if loss_fn is None else loss_fn)
    return engine


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(world, config, batches, all_wrapped=False):
    """Train on `batches`; return losses, norms, last gradients, weights and predictions in batch order."""
    torch.set_num_threads(1)
    engine = make_engine(replace(config, reshard="always" if all_wrapped else "auto"), world)
    losses, norms = [], []
    with engine.train_mode():
        for batch in batches:
            engine.optimizer_zero_grad()
            predictions, loss, ctx = engine.forward_backward_step(engine.shard_data(batch))
            grads = {name: whole(param.grad).clone() for name, param in engine._state.updater.params.items()}
            losses.append(loss)
            norms.append(engine.optimizer_step())
            engine.lr_scheduler_step()
    predictions = engine.unshard_data(predictions)
    weights = {name: tensor.clone() for name, tensor in engine.named_weights()}
    assert [(w.name, w.shape, w.dtype) for w in engine.weight_manifest()] == [
        (name, tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()
    ]
    return losses, norms, grads, weights, dict(predictions.items()), ctx.stats


BATCHES = [random_batch(9, seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def reference(tiny):
    return reference_step(tiny, BATCHES, SftLoss(), OPTIMIZER)


def check_against(reference, got):
    losses, norms, grads, weights, _, _ = got
    assert losses == pytest.approx(reference.losses, abs=2e-6)
    assert norms == pytest.approx(reference.grad_norms, rel=1e-5)
    assert grads.keys() == reference.grads.keys()
    assert max(relative_error(grads[name], reference.grads[name]) for name in grads) <= 1e-4
    assert weights.keys() == reference.weights.keys()
    assert max(relative_error(weights[name], reference.weights[name]) for name in weights) <= 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"micro_batch_tokens": 30},
        {"micro_batch_tokens": 1},
        {"packing": False},
        {"packing": False, "attention": "eager", "micro_batch_tokens": 60},
        {"activation_checkpointing": True, "micro_batch_tokens": 60},
    ],
    ids=str,
)
def test_training_on_one_rank_is_the_reference(tiny, reference, changes):
    check_against(reference, train(World(), config_of(tiny, **changes), BATCHES))


@pytest.mark.parametrize(
    ("changes", "all_wrapped"),
    [
        ({}, False),
        ({"micro_batch_tokens": 30}, False),
        ({"micro_batch_tokens": 30}, True),
        ({"micro_batch_tokens": 60, "activation_checkpointing": True}, True),
    ],
    ids=["whole", "micro-batches", "layers", "layers-checkpointed"],
)
def test_training_on_two_ranks_is_the_reference(tiny, reference, two_ranks, changes, all_wrapped):
    first, second = two_ranks.run(train, config_of(tiny, **changes), BATCHES, all_wrapped)
    check_against(reference, first)
    assert first[0] == second[0]
    assert first[1] == second[1]
    assert first[5] == second[5]
    for mine, other in zip((first[3], first[4]), (second[3], second[4]), strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3", "mistral"])
@pytest.mark.parametrize(
    "layout", [{}, {"packing": False}, {"attention": "varlen"}], ids=["packed", "padded", "varlen"]
)
def test_log_probs_and_entropy_are_those_of_each_sequence_alone(tmp_path, family, layout):
    extra = {"sliding_window": 7} if family == "mistral" else {}
    path = make_tiny_model(tmp_path, family=family, **extra)
    batch = random_batch(20, max_tokens=40, seed=5)
    engine = make_engine(config_of(path, micro_batch_tokens=150, **layout))
    with engine.eval_mode():
        predictions, ctx = engine.forward_backward_step(batch, forward_only=True)
    with torch.no_grad():
        expected = reference_logprobs(load_reference(path), batch)
    assert float(expected["logprobs"].min()) < -3.0
    for name in ("logprobs", "entropy"):
        assert_close(predictions[name], expected[name], rtol=0, atol=1e-5)
        assert not bool(predictions[name][~batch["loss_mask"]].any())
    assert ctx.stats.num_loss_tokens == int(batch["loss_mask"].sum())
    assert ctx.stats.num_tokens == int(batch["lengths"].sum())
    assert ctx.stats.num_micro_batches > 1


def test_the_same_run_gives_the_same_bits(tiny):
    first, second = (train(World(), config_of(tiny, micro_batch_tokens=60), BATCHES) for _ in range(2))
    assert first[:2] == second[:2]
    assert all(torch.equal(first[3][name], second[3][name]) for name in first[3])


def test_random_init_takes_the_shape_and_draws_by_seed(tiny):
    def weights(seed):
        engine = make_engine(config_of(tiny, model=ModelConfig(path=tiny, random_init=True, seed=seed)))
        return dict(engine.named_weights())

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_untied_heads_are_their_own_weight(tmp_path):
    path = make_tiny_model(tmp_path, tie_word_embeddings=False)
    names = [spec.name for spec in make_engine(config_of(path)).weight_manifest()]
    assert names == [name for name, _ in load_reference(path).named_parameters()]
    assert "lm_head.weight" in names


@dataclass(frozen=True)
class EntropyLoss:
    """Mean negative entropy: nothing but its gradient moves the weights."""

    entropy_gradient: bool = True

    def __call__(self, predictions, batch, scale):
        return LossOutput(
            loss=-predictions["entropy"].sum() / scale.num_tokens,
            maxes={"entropy": predictions["entropy"].detach().max()},
        )


def test_a_loss_may_ask_for_the_gradient_of_the_entropy(tiny):
    expected = reference_step(tiny, BATCHES[:1], EntropyLoss(), OPTIMIZER)
    engine = make_engine(config_of(tiny, micro_batch_tokens=60), loss_fn=EntropyLoss())
    with engine.train_mode():
        _, loss, ctx = engine.forward_backward_step(BATCHES[0])
        grads = {name: param.grad for name, param in engine._state.updater.params.items()}
    assert loss == pytest.approx(expected.losses[0], abs=2e-6)
    assert max(relative_error(grads[name], expected.grads[name]) for name in grads) <= 1e-4
    with torch.no_grad():
        entropy = reference_logprobs(load_reference(tiny), BATCHES[0])["entropy"]
    assert ctx.stats.maxes["entropy"] == pytest.approx(float(entropy.max()), abs=1e-5)


def bf16_run(world, path, batches):
    return train(world, config_of(path, dtype=Dtype.BFLOAT16), batches)


def test_bf16_computes_in_bf16_and_steps_in_float32(tiny, reference, two_ranks):
    losses, norms, _, weights, _, _ = two_ranks.run(bf16_run, tiny, BATCHES)[0]
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert losses != reference.losses
    assert losses == pytest.approx(reference.losses, rel=0.03)
    assert norms == pytest.approx(reference.grad_norms, rel=0.1)


def test_bf16_on_one_rank_keeps_steps_that_bf16_weights_would_lose(tiny):
    small = replace(OPTIMIZER, lr=1e-6, warmup_steps=0)
    world = World()
    try:
        engine = make_engine(config_of(tiny, dtype=Dtype.BFLOAT16, optimizer=small), world)
        before = {n: whole(p).detach().clone() for n, p in engine._state.updater.params.items()}
        with engine.train_mode():
            engine.forward_backward_step(BATCHES[0])
            engine.optimizer_step()
        after = {n: whole(p).detach() for n, p in engine._state.updater.params.items()}
        assert {p.dtype for p in after.values()} == {torch.float32}
        assert all(not torch.equal(before[n], after[n]) for n in before)
    finally:
        world.leave()


def values_of(world, path):
    config = config_of(path, model=ModelConfig(path=path, head="value"))
    engine = make_engine(config, world)
    with engine.eval_mode():
        predictions, _ = engine.forward_backward_step(engine.shard_data(BATCHES[0]), forward_only=True)
    return engine.unshard_data(predictions)["values"], dict(engine.named_weights())


def test_the_value_head_reads_the_state_before_each_token(tiny, two_ranks):
    values, weights = values_of(World(), tiny)
    base, batch = load_reference(tiny), BATCHES[0]
    with torch.no_grad():
        for row, length in enumerate(batch["lengths"].tolist()):
            states = base.model(batch["input_ids"][row, None, :length]).last_hidden_state[0]
            expected = states @ weights["score.weight"][0] + weights["score.bias"]
            mask = batch["loss_mask"][row, 1:length]
            assert_close(values[row, 1:length][mask], expected[:-1][mask], rtol=0, atol=1e-5)
    assert_close(two_ranks.run(values_of, tiny)[0][0], values, rtol=0, atol=1e-5)


def uneven(world, path, batch):
    """Rank 1 has nothing at all."""
    mine = batch if world.rank == 0 else batch[:0]
    engine = make_engine(config_of(path, micro_batch_tokens=40), world)
    with engine.train_mode():
        _, loss, ctx = engine.forward_backward_step(mine)
        norm = engine.optimizer_step()
    return loss, norm, ctx.stats, {name: tensor.clone() for name, tensor in engine.named_weights()}


def test_a_rank_with_an_empty_batch_keeps_step(tiny, two_ranks):
    loss, norm, stats, weights = uneven(World(), tiny, BATCHES[0])
    for other in two_ranks.run(uneven, tiny, BATCHES[0]):
        assert other[0] == pytest.approx(loss, abs=1e-6)
        assert other[1] == pytest.approx(norm, rel=1e-5)
        assert other[2].num_micro_batches == stats.num_micro_batches > 1
        assert max(relative_error(other[3][name], weights[name]) for name in weights) <= 1e-5
