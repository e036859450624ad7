"""DPO beside its formula in plain Python, its gradient beside differences, and what must not go unnoticed."""

import math
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from offbeat_engine import (
    Fsdp2Config,
    LoraConfig,
    LossScale,
    ModelConfig,
    OptimizerConfig,
    World,
    engine_class,
)
from offbeat_engine.testing import make_tiny_model
from offbeat_engine.testing.ranks import RankPool
from offbeat_trainer import Dpo, DpoConfig, Pair, Role, StepShape, TrainerError, reduce_metrics
from offbeat_trainer.algorithms.roles import role_engines, split_evenly

NUM_PAIRS = 5


def loss_of(**settings):
    return Dpo(config=DpoConfig(**settings)).loss_fn()


def pairs(count=NUM_PAIRS, seed=0):
    draw = torch.Generator().manual_seed(seed)

    def tokens(most):
        length = int(torch.randint(1, most + 1, (1,), generator=draw))
        return tuple(torch.randint(3, 60, (length,), generator=draw).tolist())

    return [
        Pair(prompt_ids=(1, *tokens(4)), chosen_ids=tokens(7), rejected_ids=tokens(7)) for _ in range(count)
    ]


def made(seed=0, dtype=torch.float32):
    """A batch, and log-probs of policy and reference in it."""
    batch = Dpo(config=DpoConfig()).batch(pairs(seed=seed))
    draw = torch.Generator().manual_seed(seed)
    shape = batch["loss_mask"].shape
    policy_BT, ref_BT = (-2 * torch.rand(shape, generator=draw, dtype=torch.float64) for _ in range(2))
    batch["ref_logprobs"] = ref_BT.to(dtype)
    return batch, policy_BT.to(dtype)


def scale_of(batch):
    mask_BT = batch["loss_mask"]
    return LossScale(num_tokens=int(mask_BT.sum()), num_sequences=len(mask_BT), num_units=len(mask_BT) // 2)


def plain(batch, policy_BT, beta, smooth):
    """Return the loss, the mean margin and the accuracy, in float64 and plain Python."""
    mask, ref = batch["loss_mask"].tolist(), batch["ref_logprobs"].tolist()
    policy = policy_BT.tolist()

    def reward(row):
        places = [place for place, trained in enumerate(mask[row]) if trained]
        return beta * (math.fsum(policy[row][p] for p in places) - math.fsum(ref[row][p] for p in places))

    losses, margins = [], []
    for pair in range(len(mask) // 2):
        margin = reward(2 * pair) - reward(2 * pair + 1)
        margins.append(margin)
        losses.append((1 - smooth) * math.log1p(math.exp(-margin)) + smooth * math.log1p(math.exp(margin)))
    return (
        math.fsum(losses) / len(losses),
        math.fsum(margins) / len(margins),
        sum(margin > 0 for margin in margins) / len(margins),
    )


def call(loss_fn, policy_BT, batch, scale):
    return loss_fn(TensorDict({"logprobs": policy_BT}, batch_size=[len(policy_BT)]), batch, scale)


@pytest.mark.parametrize("smooth", [0.0, 0.1])
@pytest.mark.parametrize("beta", [0.1, 0.7])
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_metrics_are_those_of_the_paper_however_the_pairs_are_cut(seed, beta, smooth):
    batch, policy_BT = made(seed)
    loss, margin, accuracy = plain(batch, policy_BT, beta, smooth)
    loss_fn, scale = loss_of(beta=beta, label_smoothing=smooth), scale_of(batch)
    order = torch.tensor([3, 8, 2, 9])  # pairs 1 and 4, not side by side
    rest = torch.tensor([row for row in range(2 * NUM_PAIRS) if row not in order])
    for rows in ([torch.arange(2 * NUM_PAIRS)], [order, rest]):
        outputs = [call(loss_fn, policy_BT[part], batch[part], scale) for part in rows]
        assert float(sum(output.loss for output in outputs)) == pytest.approx(loss, abs=1e-6)
        sums = {key: float(sum(output.sums[key] for output in outputs)) for key in outputs[0].sums}
        assert sums["dpo/reward_margin"] == pytest.approx(margin, abs=1e-6)
        assert sums["dpo/reward_chosen"] - sums["dpo/reward_rejected"] == pytest.approx(margin, abs=1e-6)
        assert sums["accuracy/train"] == pytest.approx(accuracy, abs=1e-6)


def test_the_gradient_is_that_of_differences():
    batch, policy_BT = made(dtype=torch.float64)
    loss_fn, scale, step = loss_of(beta=0.5, label_smoothing=0.05), scale_of(batch), 1e-5
    wanted_BT = torch.zeros_like(policy_BT)
    for b, t in torch.cartesian_prod(*map(torch.arange, policy_BT.shape)).tolist():
        sides = []
        for sign in (1, -1):
            moved_BT = policy_BT.clone()
            moved_BT[b, t] += sign * step
            sides.append(plain(batch, moved_BT, 0.5, 0.05)[0])
        wanted_BT[b, t] = (sides[0] - sides[1]) / (2 * step)
    leaf_BT = policy_BT.clone().requires_grad_()
    call(loss_fn, leaf_BT, batch, scale).loss.backward()
    assert torch.allclose(leaf_BT.grad, wanted_BT, atol=1e-8)
    chosen_B = batch["dpo/chosen"]
    assert leaf_BT.grad[chosen_B].max() <= 0 <= leaf_BT.grad[~chosen_B].min()
    assert not leaf_BT.grad[~batch["loss_mask"]].any()


def test_a_policy_that_is_the_reference_has_the_loss_ln_2():
    batch, _ = made()
    output = call(loss_of(beta=0.3), batch["ref_logprobs"], batch, scale_of(batch))
    assert float(output.loss) == pytest.approx(math.log(2), abs=1e-6)
    assert float(output.sums["accuracy/train"]) == 0  # neither is preferred


def test_a_swapped_pair_and_a_wrong_count_change_the_loss():
    batch, policy_BT = made()
    right = float(call(loss_of(beta=0.5), policy_BT, batch, scale_of(batch)).loss)
    swapped = batch.clone()
    swapped["dpo/chosen"][:2] = ~swapped["dpo/chosen"][:2]
    assert abs(float(call(loss_of(beta=0.5), policy_BT, swapped, scale_of(batch)).loss) - right) > 1e-3
    rows = replace(scale_of(batch), num_units=2 * NUM_PAIRS)
    assert float(call(loss_of(beta=0.5), policy_BT, batch, rows).loss) == pytest.approx(right / 2)


@pytest.mark.parametrize("rows", [[0, 1, 2], [1, 2, 3], [0, 0, 1, 1], [0, 2]])
def test_a_torn_pair_is_an_error(rows):
    batch, policy_BT = made()
    chosen = torch.tensor(rows)
    with pytest.raises(TrainerError, match="pairs are torn"):
        call(loss_of(beta=0.5), policy_BT[chosen], batch[chosen], scale_of(batch))


def test_mini_batches_hold_whole_pairs():
    batch, _ = made()
    with pytest.raises(ValueError, match="5 units cannot be cut into 2 equal"):
        split_evenly(batch, 2)
    for part in split_evenly(batch, 5):
        assert part["dpo/chosen"].tolist() == [True, False]
        assert len(set(part["unit"].tolist())) == 1
    with pytest.raises(ValueError, match="units must lie together"):
        split_evenly(batch[torch.tensor([0, 2, 1, 3])], 2)


def test_the_batch_of_pairs_is_what_they_are():
    batch = Dpo(config=DpoConfig()).batch(pairs())
    for number, pair in enumerate(pairs()):
        for row, ids in ((2 * number, pair.chosen_ids), (2 * number + 1, pair.rejected_ids)):
            mask_T = batch["loss_mask"][row]
            assert tuple(batch["input_ids"][row][mask_T].tolist()) == ids
            assert tuple(batch["input_ids"][row][: len(pair.prompt_ids)].tolist()) == pair.prompt_ids
            assert (int(batch["unit"][row]), bool(batch["dpo/chosen"][row])) == (number, row % 2 == 0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def learned(world, path, *, updates=1, steps=4, **settings):
    """Return what is said of the pairs before, after each step, and after, as metrics."""
    algorithm = Dpo(config=DpoConfig(beta=0.5), step=StepShape(updates_per_step=updates))
    optimizer = OptimizerConfig(lr=1e-2 if "lora" in settings else 1e-3)
    told = Fsdp2Config(model=ModelConfig(path=path), optimizer=optimizer, **settings)
    roles, engines = {}, role_engines(algorithm.roles(), told, infers_alone=True)
    for name, config in engines.items():
        engine = roles["policy"].engine if config is None else engine_class("fsdp2")(config, world)
        if config is not None:
            engine.init_model()
        roles[name] = Role(engine, base=config is None)
    batch = algorithm.batch(pairs())
    said = [reduce_metrics(algorithm.evaluate(roles, batch))]
    said += [reduce_metrics(algorithm.learn(roles, batch)) for _ in range(steps)]
    said.append(reduce_metrics(algorithm.evaluate(roles, batch)))
    for role in {id(role.engine): role for role in roles.values()}.values():
        role.engine.close()
    return said


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=4)])
def test_it_starts_at_ln_2_and_prefers_what_was_chosen_at_the_end(tiny, lora):
    before, first, *_, after = learned(World(), tiny, steps=12, lora=lora)
    assert before["validation/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert first["train/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert after["validation/loss"] < 0.5
    assert after["accuracy/validation"] == 1
    assert after["validation/reward_margin"] > 0.5
    expected = after["validation/reward_chosen"] - after["validation/reward_rejected"]
    assert after["validation/reward_margin"] == pytest.approx(expected, abs=1e-5)


WAYS = {
    "one at a time": {"micro_batch_tokens": 1},
    "padded": {"micro_batch_tokens": 30, "packing": False},
    "varlen": {"micro_batch_tokens": 30, "attention": "varlen"},
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_learned_does_not_depend_on_how_the_pairs_are_cut(tiny, way):
    whole, cut = learned(World(), tiny), learned(World(), tiny, **WAYS[way])
    same(whole, cut)


def same(one, other):
    for left, right in zip(one, other, strict=True):
        for key in (
            "train/loss",
            "train/grad_norm",
            "validation/loss",
            "dpo/reward_margin",
            "accuracy/train",
        ):
            if key in left:
                assert right[key] == pytest.approx(left[key], abs=2e-4), key


@pytest.fixture(scope="module")
def two_ranks():
    pool = RankPool(2, 600.0)
    yield pool
    pool.stop()


@pytest.mark.spawns
@pytest.mark.parametrize("way", [{}, {"sequence_parallel_size": 2}, {"micro_batch_tokens": 1}])
def test_two_ranks_come_to_what_one_does(tiny, way, two_ranks):
    whole = learned(World(), tiny, updates=5, steps=2)
    for said in two_ranks.run(learned_by, tiny, way):
        same(whole, said)


def learned_by(world, path, way):
    return learned(world, path, updates=5, steps=2, **way)
