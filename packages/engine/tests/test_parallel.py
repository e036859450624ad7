"""Ranks that share sequences, or hold copies of the weights: the same numbers whatever the arrangement of ranks."""

from dataclasses import dataclass, replace

import pytest
import torch

from offbeat_engine import (
    BatchError,
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

BATCHES = [random_batch(9, seed=seed) for seed in range(2)]
OPTIMIZER = OptimizerConfig(lr=1e-3, max_grad_norm=0.5, weight_decay=0.1, eps=1e-4)


@dataclass(frozen=True)
class SequenceLoss:
    """Non-linear in the mean log-probability of a whole sequence (as GSPO is), with a gradient through entropy."""

    entropy_gradient: bool = True

    def __call__(self, predictions, batch, scale):
        count_B = batch["loss_mask"].sum(1).clamp(min=1)
        mean_B = predictions["logprobs"].sum(1) / count_B
        entropy_B = predictions["entropy"].sum(1) / count_B
        loss = ((1.0 + mean_B).square() - 0.1 * entropy_B).sum() / scale.num_sequences
        return LossOutput(
            loss=loss,
            sums={"tokens": batch["loss_mask"].sum(), "sequences": torch.tensor(len(count_B))},
            maxes={"mean": mean_B.detach().max()},
        )


def config_of(path, **changes):
    base = Fsdp2Config(model=ModelConfig(path=path), optimizer=OPTIMIZER)
    return replace(base, **changes)


def make_engine(config, world=None, loss_fn=None):
    engine = Fsdp2Engine(config, World() if world is None else world)
    engine.init_model()
    engine.set_loss_fn(SequenceLoss() if loss_fn is None else loss_fn)
    return engine


def train(world, config, batches, loss_fn=None, all_wrapped=False):
    """Train on `batches`; return everything a reference, or another rank, can be compared with."""
    torch.set_num_threads(1)
    engine = make_engine(replace(config, reshard="always" if all_wrapped else "auto"), world, loss_fn)
    out = {"losses": [], "norms": [], "predictions": [], "stats": []}
    for batch in batches:
        with engine.train_mode():
            engine.optimizer_zero_grad()
            predictions, loss, ctx = engine.forward_backward_step(engine.shard_data(batch))
            out["predictions"].append(dict(engine.unshard_data(predictions).items()))
            out["grads"] = {name: tensor.clone() for name, tensor in engine.named_gradients()}
            out["losses"].append(loss)
            out["stats"].append(ctx.stats)
            out["norms"].append(engine.optimizer_step())
            engine.lr_scheduler_step()
    out["weights"] = {name: tensor.clone() for name, tensor in engine.named_weights()}
    return out


def worst(got, expected):
    assert got.keys() == expected.keys()
    return max(relative_error(got[name], expected[name]) for name in got)


def check_against_plain(got, path, batches, loss_fn=None, optimizer=OPTIMIZER):
    """The bounds of the house, in float32: log-probabilities 1e-5, loss 1e-6 relative, gradients 1e-4 per tensor."""
    loss_fn = SequenceLoss() if loss_fn is None else loss_fn
    plain = reference_step(path, batches, loss_fn, optimizer)
    single = train(World(), config_of(path, optimizer=optimizer), batches, loss_fn)
    with torch.no_grad():
        asked = reference_logprobs(load_reference(path), batches[0])
    for key in ("logprobs", "entropy"):
        assert float((got["predictions"][0][key] - asked[key]).abs().max()) <= 1e-5
        for mine, alone in zip(got["predictions"], single["predictions"], strict=True):
            assert float((mine[key] - alone[key]).abs().max()) <= 1e-5
    for mine, expected in zip(got["losses"], plain.losses, strict=True):
        assert abs(mine - expected) <= 1e-6 * abs(expected)
    for mine, expected in zip(got["norms"], plain.grad_norms, strict=True):
        assert abs(mine - expected) <= 1e-5 * expected
    assert worst(got["grads"], plain.grads) <= 1e-4
    assert worst(got["weights"], plain.weights) <= 1e-5
    for mine, alone in zip(got["stats"], single["stats"], strict=True):
        for name in ("num_tokens", "num_loss_tokens"):
            assert getattr(mine, name) == getattr(alone, name)
        assert mine.sums == alone.sums
        assert abs(mine.maxes["mean"] - alone.maxes["mean"]) <= 1e-5


def check_same_on_all(results):
    """Every rank must hold the same, bit for bit."""
    first, *others = results
    for other in others:
        for key in ("losses", "norms", "stats"):
            assert other[key] == first[key]
        for key in ("grads", "weights"):
            assert all(torch.equal(other[key][name], first[key][name]) for name in first[key])
        for mine, ours in zip(other["predictions"], first["predictions"], strict=True):
            assert all(torch.equal(mine[key], ours[key]) for key in ours)


@pytest.mark.parametrize(
    ("changes", "all_wrapped"),
    [
        ({}, False),
        ({"micro_batch_tokens": 20}, False),
        ({"micro_batch_tokens": 20, "activation_checkpointing": True}, True),
        ({"micro_batch_tokens": 20, "attention": "varlen"}, False),
    ],
    ids=["whole", "micro-batches", "layers-checkpointed", "varlen"],
)
def test_two_ranks_that_share_sequences_are_the_reference(tiny, two_ranks, changes, all_wrapped):
    config = config_of(tiny, sequence_parallel_size=2, **changes)
    results = two_ranks.run(train, config, BATCHES, None, all_wrapped)
    check_against_plain(results[0], tiny, BATCHES)
    check_same_on_all(results)


@pytest.mark.parametrize(
    ("degree", "tokens"),
    [pytest.param(4, 16384, marks=pytest.mark.deep), (2, 20), pytest.param(4, 1, marks=pytest.mark.deep)],
    ids=str,
)
def test_four_ranks_in_groups_are_the_reference(tiny, four_ranks, degree, tokens):
    """Two key-value heads: at degree 4 each is held by two ranks."""
    config = config_of(tiny, sequence_parallel_size=degree, micro_batch_tokens=tokens)
    results = four_ranks.run(train, config, BATCHES)
    check_against_plain(results[0], tiny, BATCHES)
    check_same_on_all(results)


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("qwen2", {"hidden": 48, "num_attention_heads": 6, "num_key_value_heads": 3}),
        ("mistral", {"sliding_window": 7, "num_key_value_heads": 1}),
        ("gemma", {"num_key_value_heads": 4}),
    ],
    ids=["three-kv-heads", "window-one-kv-head", "as-many-kv-heads"],
)
def test_families_and_odd_numbers_of_heads(tmp_path, two_ranks, family, shape):
    path = make_tiny_model(tmp_path, family=family, **shape)
    got = two_ranks.run(train, config_of(path, sequence_parallel_size=2), BATCHES[:1])[0]
    check_against_plain(got, path, BATCHES[:1])


def short(num_sequences, num_tokens, loss=True):
    batch = random_batch(num_sequences, min_tokens=num_tokens, max_tokens=num_tokens, seed=5)
    batch["loss_mask"][:] = False
    if loss:
        batch["loss_mask"][:, -1] = True
    return batch


@pytest.mark.parametrize(
    "batch",
    [
        short(1, 2),
        pytest.param(short(1, 6), marks=pytest.mark.deep),
        pytest.param(short(3, 2), marks=pytest.mark.deep),
    ],
    ids=["one", "five", "three"],
)
def test_fewer_tokens_than_ranks(tiny, four_ranks, batch):
    """One token is fed on four ranks, or one rank's slice is all padding; all answers lie on few ranks."""
    config = config_of(tiny, sequence_parallel_size=4)
    results = four_ranks.run(train, config, [batch], SftLoss())
    check_same_on_all(results)
    got, plain = results[0], train(None, config_of(tiny), [batch], SftLoss())
    assert got["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    assert got["norms"] == pytest.approx(plain["norms"], rel=1e-5)


def one_group_idle(world, path, how):
    """Ranks 2 and 3 have nothing, or nothing under the mask; ranks 0 and 1 train in several micro-batches."""
    batch = BATCHES[0].clone()
    if world.rank >= 2:
        batch = batch[:0] if how == "empty" else batch
        batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    engine = make_engine(config_of(path, sequence_parallel_size=2, micro_batch_tokens=20), world, SftLoss())
    with engine.train_mode():
        predictions, loss, ctx = engine.forward_backward_step(batch)
        return loss, engine.optimizer_step(), predictions["logprobs"], ctx.stats.num_micro_batches


@pytest.mark.parametrize("how", ["empty", "masked"])
def test_a_group_without_work_keeps_step(tiny, four_ranks, how):
    plain = train(None, config_of(tiny), BATCHES[:1], SftLoss())
    for rank, (loss, norm, logprobs, num_micro) in enumerate(four_ranks.run(one_group_idle, tiny, how)):
        assert loss == pytest.approx(plain["losses"][0], rel=1e-6)
        assert norm == pytest.approx(plain["norms"][0], rel=1e-5)
        assert num_micro > 1
        if rank >= 2:
            assert not logprobs.any()
        else:
            assert torch.allclose(logprobs, plain["predictions"][0]["logprobs"], rtol=0, atol=1e-5)


def different_batches(world, path):
    engine = make_engine(config_of(path, sequence_parallel_size=2), world)
    batch = BATCHES[0].clone()
    if world.rank == 1:
        batch["input_ids"][0, 0] += 1
    with engine.train_mode(), pytest.raises(BatchError, match=r"ranks 0 and 1 share .* `shard_data`"):
        engine.forward_backward_step(batch)
    return True


def test_ranks_that_share_sequences_must_hold_the_same_ones(tiny, two_ranks):
    assert two_ranks.run(different_batches, tiny) == [True, True]


def shares(world, path, batch):
    engine = make_engine(config_of(path, sequence_parallel_size=2), world)
    share = engine.shard_data(batch)
    return share["input_ids"], engine.unshard_data(share)


@pytest.mark.parametrize("num_sequences", [1, 7])
def test_peers_take_the_same_share_and_give_it_back_once(tiny, four_ranks, num_sequences):
    batch = random_batch(num_sequences, seed=3)
    results = four_ranks.run(shares, tiny, batch)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[2][0], results[3][0])
    assert len(results[0][0]) + len(results[2][0]) == num_sequences
    for _, back in results:
        assert all(torch.equal(back[key], batch[key]) for key in batch.keys())  # noqa: SIM118


def no_entropy_gradient(world, path):
    seen = []

    def look(predictions, batch, ctx):
        seen.append((predictions["logprobs"].requires_grad, predictions["entropy"].requires_grad))
        return predictions

    engine = make_engine(
        config_of(path, sequence_parallel_size=2), world, SequenceLoss(entropy_gradient=False)
    )
    with engine.train_mode():
        engine.forward_backward_step(BATCHES[0], postprocess_fn=look)
    return seen


def test_entropy_does_not_seem_to_have_a_gradient_it_lacks(tiny, two_ranks):
    assert two_ranks.run(no_entropy_gradient, tiny) == [[(True, False)]] * 2


@pytest.mark.parametrize(
    ("changes", "all_wrapped"),
    [
        ({"shard_size": 2}, False),
        ({"shard_size": 2, "micro_batch_tokens": 20}, True),
        ({"shard_size": 1}, False),
        ({"shard_size": 2, "sequence_parallel_size": 2, "micro_batch_tokens": 20}, True),
        ({"shard_size": 2, "sequence_parallel_size": 4}, False),
        ({"shard_size": 4}, False),
    ],
    ids=str,
)
def test_copies_of_the_weights_train_as_one(tiny, four_ranks, changes, all_wrapped):
    results = four_ranks.run(train, config_of(tiny, **changes), BATCHES, None, all_wrapped)
    check_against_plain(results[0], tiny, BATCHES)
    check_same_on_all(results)


def saved_and_stepped(world, config, path, batches):
    """Take one step, save, take another."""
    engine = make_engine(config, world)
    step(engine, batches[0])
    engine.save_checkpoint(path, global_step=1)
    return step(engine, batches[1])


def loaded_and_stepped(world, config, path, batches):
    engine = make_engine(config, world)
    assert engine.load_checkpoint(path) == 1
    return step(engine, batches[1])


def step(engine, batch):
    with engine.train_mode():
        engine.optimizer_zero_grad()
        _, loss, _ = engine.forward_backward_step(engine.shard_data(batch))
        norm = engine.optimizer_step()
    engine.lr_scheduler_step()
    return loss, norm, {name: tensor.clone() for name, tensor in engine.named_weights()}


def test_a_checkpoint_of_copies_is_loaded_by_another_arrangement(tiny, two_ranks, four_ranks, tmp_path):
    hybrid = config_of(tiny, shard_size=2, sequence_parallel_size=2)
    loss, norm, weights = four_ranks.run(saved_and_stepped, hybrid, str(tmp_path), BATCHES)[0]
    again = four_ranks.run(loaded_and_stepped, hybrid, str(tmp_path), BATCHES)[0]
    assert again[:2] == (loss, norm)
    assert all(torch.equal(again[2][name], weights[name]) for name in weights)
    for changes in ({}, {"sequence_parallel_size": 2}):
        other = two_ranks.run(loaded_and_stepped, config_of(tiny, **changes), str(tmp_path), BATCHES)[0]
        assert other[0] == pytest.approx(loss, rel=1e-6)
        assert other[1] == pytest.approx(norm, rel=1e-5)
        assert worst(other[2], weights) <= 1e-5


def test_bf16_shares_sequences_too(tiny, two_ranks):
    """In bfloat16 heads and tokens are traded in bfloat16; the answers are float32 as ever."""
    config = config_of(tiny, sequence_parallel_size=2, dtype=Dtype.BFLOAT16)
    results = two_ranks.run(train, config, BATCHES, SftLoss())
    check_same_on_all(results)
    plain = reference_step(tiny, BATCHES, SftLoss(), OPTIMIZER)
    assert results[0]["losses"] != plain.losses
    assert results[0]["losses"] == pytest.approx(plain.losses, rel=0.03)
    assert results[0]["norms"] == pytest.approx(plain.grad_norms, rel=0.1)


def values(world, config):
    engine = make_engine(config, world)
    with engine.eval_mode():
        predictions, _ = engine.forward_backward_step(engine.shard_data(BATCHES[0]), forward_only=True)
    return engine.unshard_data(predictions)["values"]


def test_values_come_from_shared_sequences(tiny, two_ranks):
    config = config_of(tiny, model=ModelConfig(path=tiny, head="value"))
    expected = values(World(), config)
    assert expected.any()
    for mine in two_ranks.run(values, replace(config, sequence_parallel_size=2)):
        assert float((mine - expected).abs().max()) <= 1e-5
