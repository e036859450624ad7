"""GPG: centred rewards that give back what groups of equal rewards take, and a loss without a ratio."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from made_groups import PLANTED, caught, made_group
from offbeat_engine import LossScale
from offbeat_engine.testing import random_batch
from offbeat_trainer import GrpoConfig, StepShape, algorithm_class
from offbeat_trainer.algorithms.advantages import by_group, dr_grpo, gpg, samples_of
from offbeat_trainer.algorithms.trial import trial

BATCH = [(1.0, 0.0), (1.0, 1.0, 1.0), (0.5,), (2.0, 0.0, 4.0)]


def plain(batch):
    """Arithmetic of section 3: alpha is B over B less those of groups that have no gradient."""
    num_all = sum(len(rewards) for rewards in batch)
    num_flat = sum(len(rewards) for rewards in batch if len(set(rewards)) == 1)
    found = []
    for rewards in batch:
        for reward in rewards:
            flat = len(set(rewards)) == 1
            found.append(
                0.0 if flat else num_all / (num_all - num_flat) * (reward - sum(rewards) / len(rewards))
            )
    return torch.tensor(found, dtype=torch.float64)


def made(batch):
    return [made_group(str(index), rewards) for index, rewards in enumerate(batch)]


REWARD = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-20, 20, width=32))


@given(st.lists(st.lists(REWARD, min_size=1, max_size=4).map(tuple), min_size=1, max_size=6), st.data())
def test_against_plain_loops_in_any_order(batch, data):
    samples = samples_of(made(batch))
    torch.testing.assert_close(gpg(samples), plain(batch), rtol=1e-9, atol=1e-9)
    order = data.draw(st.permutations(range(len(samples.rewards))))
    torch.testing.assert_close(
        gpg(samples.at(order)), plain(batch)[torch.tensor(order)], rtol=1e-9, atol=1e-9
    )


def rewarded(_, samples):
    """Verl's alpha: over the completions whose reward is not 0."""
    return by_group(samples, dr_grpo) * len(samples.rewards) / int((samples.rewards != 0).sum())


MISTAKES = {**PLANTED, "alpha 1": lambda _, samples: by_group(samples, dr_grpo), "alpha of verl": rewarded}


@pytest.mark.parametrize("wrong", MISTAKES.values(), ids=MISTAKES)
def test_a_planted_mistake_is_caught(wrong):
    samples = samples_of(made(BATCH))

    def check(function):
        torch.testing.assert_close(function(samples), plain(BATCH), rtol=1e-9, atol=1e-9)

    assert caught(check, gpg, wrong)


@pytest.mark.parametrize("updates", [1, 2])
def test_the_gradient_is_the_plain_policy_gradient_wherever_the_policy_went(updates):
    algorithm = algorithm_class("gpg")(
        config=GrpoConfig(correction="none"), step=StepShape(updates_per_step=updates)
    )
    batch = random_batch(6)
    mask_BT = batch["loss_mask"]
    new_BT, old_BT = (
        -3 * torch.rand(mask_BT.shape, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)
    )
    new_BT.requires_grad_()
    if updates > 1:
        batch["old_logprobs"] = old_BT
    batch["advantages"] = torch.where(mask_BT, torch.linspace(-1, 1, 6)[:, None], 0.0)
    scale = LossScale(num_tokens=int(mask_BT.sum()), num_sequences=6)
    algorithm.loss_fn()(TensorDict({"logprobs": new_BT}, batch_size=[6]), batch, scale).loss.backward()
    torch.testing.assert_close(new_BT.grad, -batch["advantages"] / scale.num_tokens)
    assert algorithm.check() == []
    trial(algorithm)


def test_all_groups_flat_is_no_division_by_zero():
    algorithm = algorithm_class("gpg")(config=GrpoConfig())
    assert algorithm.targets(made([(1.0, 1.0), (0.0,)]))["advantages"].tolist() == [0.0] * 3
    assert algorithm.targets([])["advantages"].shape == (0,)
