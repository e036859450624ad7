"""On-policy distillation beside its formula in plain Python, exact expectations, and a model that becomes its teacher."""

import math

import pytest
import torch
from tensordict import TensorDict

from offbeat_engine import Fsdp2Config, LossScale, ModelConfig, OptimizerConfig, World, engine_class
from offbeat_engine.testing import make_tiny_model, random_batch
from offbeat_trainer import Distill, DistillConfig, Proximal, Role, StepShape, reduce_metrics
from offbeat_trainer.algorithms.distill import DistillLoss
from offbeat_trainer.algorithms.roles import role_engines


def loss_of(**settings):
    return DistillLoss(config=DistillConfig(teacher_path="t", **settings), max_completion_tokens=8)


def made(seed=0):
    batch = random_batch(6, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    policy_BT, teacher_BT, old_BT, sampler_BT = (
        -2 * torch.rand(batch["loss_mask"].shape, generator=draw) for _ in range(4)
    )
    batch["distill/teacher_logprobs"], batch["rollout_logprobs"] = teacher_BT, sampler_BT
    return policy_BT, old_BT, batch


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("gain_clip", [0.0, 0.5])
def test_a_token_is_worth_what_the_teacher_finds_likelier_however_the_batch_is_cut(several, gain_clip):
    policy_BT, old_BT, batch = made()
    if several:
        batch["old_logprobs"] = old_BT
    mask_BT, wanted, reverse_kl = batch["loss_mask"], 0.0, 0.0
    for b, t in mask_BT.nonzero().tolist():
        policy, teacher, sampler = (
            float(one[b, t])
            for one in (policy_BT, batch["distill/teacher_logprobs"], batch["rollout_logprobs"])
        )
        old = float(old_BT[b, t]) if several else policy
        gain = teacher - old
        reverse_kl -= gain
        gain = min(max(gain, -gain_clip), gain_clip) if gain_clip else gain
        ratio = math.exp(policy - old)
        surrogate = max(-ratio * gain, -min(max(ratio, 0.8), 1.2) * gain)
        wanted += min(math.exp(old - sampler), 2.0) * surrogate
    num_tokens = int(mask_BT.sum())
    scale = LossScale(num_tokens=num_tokens, num_sequences=6)
    for parts in ([slice(0, 6)], [slice(0, 2), slice(2, 6)]):
        outputs = [
            loss_of(gain_clip=gain_clip)(
                TensorDict({"logprobs": policy_BT[part]}, batch_size=[part.stop - part.start]),
                batch[part],
                scale,
            )
            for part in parts
        ]
        assert float(sum(one.loss for one in outputs)) == pytest.approx(wanted / num_tokens, abs=1e-5)
        found = float(sum(one.sums["distill/reverse_kl_nats"] for one in outputs))
        assert found == pytest.approx(reverse_kl / num_tokens, abs=1e-5)


def test_the_expected_gradient_is_that_of_the_reverse_kl():
    draw = torch.Generator().manual_seed(1)
    logits_V, teacher_V = (torch.randn(5, generator=draw, dtype=torch.float64) for _ in range(2))
    teacher_V = teacher_V.log_softmax(-1)
    leaf_V = logits_V.clone().requires_grad_()
    policy_V = leaf_V.log_softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for token in range(5):  # each as often as the policy samples it
        batch = TensorDict(
            {
                "loss_mask": torch.ones(1, 1, dtype=torch.bool),
                "distill/teacher_logprobs": teacher_V[token].view(1, 1),
            },
            batch_size=[1],
        )
        predictions = TensorDict({"logprobs": policy_V[token].view(1, 1)}, batch_size=[1])
        output = loss_of()(predictions, batch, LossScale(num_tokens=1, num_sequences=1))
        total = total + policy_V[token].exp().detach() * output.loss
    got_V = torch.autograd.grad(total, leaf_V)[0]
    policy_V = leaf_V.log_softmax(-1)
    wanted_V = torch.autograd.grad((policy_V.exp() * (policy_V - teacher_V)).sum(), leaf_V)[0]
    assert torch.allclose(got_V, wanted_V, atol=1e-12)


@pytest.mark.parametrize("updates", [1, 2])
def test_the_reverse_kl_to_the_teacher_comes_down_on_tokens_that_the_policy_samples(tmp_path, updates):
    """One token after a prompt, sampled by the policy anew in each step: the gradient of many of them."""
    paths = [make_tiny_model(tmp_path / name, seed=seed) for name, seed in (("policy", 0), ("teacher", 1))]
    algorithm = Distill(config=DistillConfig(teacher_path=paths[1]), step=StepShape(updates_per_step=updates))
    told = Fsdp2Config(model=ModelConfig(path=paths[0]), optimizer=OptimizerConfig(lr=3e-3))
    roles = {}
    for name, config in role_engines(algorithm.roles(), told, infers_alone=True).items():
        engine = engine_class("fsdp2")(config, World())
        engine.init_model()
        roles[name] = Role(engine)
    said = []
    for step in range(12):
        torch.manual_seed(step)
        batch = sampled(roles["policy"])
        said.append(reduce_metrics(algorithm.learn(roles, batch))["distill/reverse_kl_nats"])
    assert sum(said[-3:]) < 0.6 * sum(said[:3])
    for role in roles.values():
        role.engine.close()


def sampled(policy, count=128, vocab=64):
    """Return sequences of one prompt token and one that the policy drew after it."""
    every = torch.cartesian_prod(torch.tensor([7, 9]), torch.arange(vocab))
    whole = TensorDict(
        {
            "input_ids": every,
            "lengths": torch.full((len(every),), 2),
            "loss_mask": torch.tensor([[False, True]]).repeat(len(every), 1),
        },
        batch_size=[len(every)],
    )
    logprobs_PV = policy.whole_logprobs(whole)[:, 1].view(2, vocab)
    drawn_PN = torch.multinomial(logprobs_PV.exp(), count // 2, replacement=True)
    rows = torch.cat([drawn_PN[0], vocab + drawn_PN[1]])
    return whole[rows[torch.randperm(count)]]


def test_settings_that_cannot_be():
    found = Distill(config=DistillConfig(proximal=Proximal.ROLLOUT, clip_low=1.1)).check()
    assert {item.setting for item in found} == {
        "algorithm.teacher_path",
        "algorithm.proximal",
        "algorithm.clip_low",
    }
