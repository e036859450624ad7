"""Divergences of policy and teacher beside float64 NumPy over whole vocabularies, and a model that becomes its teacher by each."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from offbeat_engine import Fsdp2Config, LossScale, ModelConfig, OptimizerConfig, World, engine_class
from offbeat_engine.testing import make_tiny_model, random_batch
from offbeat_trainer import Distill, DistillConfig, Role, StepShape, TrainerError, reduce_metrics
from offbeat_trainer.algorithms.distill import DivergenceLoss, divergence, with_rest
from offbeat_trainer.algorithms.roles import role_engines
from offbeat_trainer.algorithms.trial import trial
from offbeat_trainer.config import Divergence

KINDS = [one for one in Divergence if one is not Divergence.SAMPLED]
BETA, V = 0.3, 9


def kl(p, q):
    return sum(a * np.log(a / b) for a, b in zip(p, q, strict=True))


def reference(kind, policy, teacher, beta=BETA):
    """Return the divergence of two distributions [X], as the paper has it."""
    mixed = beta * teacher + (1 - beta) * policy
    return {
        "forward_kl": kl(teacher, policy),
        "reverse_kl": kl(policy, teacher),
        "jsd": beta * kl(teacher, mixed) + (1 - beta) * kl(policy, mixed),
    }[kind]


def made(seed=0):
    """A batch with a row that nothing is asked of, and distributions [B, T, V] of both models in float64."""
    batch = random_batch(6, seed=seed)
    batch["loss_mask"][2] = False
    draw = torch.Generator().manual_seed(seed)
    shape = (*batch["loss_mask"].shape, V)
    return batch, *(torch.randn(shape, generator=draw, dtype=torch.float64).softmax(-1) for _ in range(2))


def told(batch, policy_BTV, teacher_BTV, top_k):
    """Return the batch as the loss sees it, and the policy's log-probs of the teacher's likeliest tokens."""
    batch = batch.copy()
    probs_BTK, batch["top_ids"] = teacher_BTV.topk(top_k)
    batch["distill/teacher_top"] = probs_BTK.log()
    return batch, policy_BTV.gather(-1, batch["top_ids"]).log()


def call(kind, batch, policy_BTK, num_tokens):
    shape = batch["loss_mask"].shape
    predictions = TensorDict(
        {"top_logprobs": policy_BTK, "entropy": torch.zeros(shape)}, batch_size=[len(policy_BTK)]
    )
    scale = LossScale(num_tokens=num_tokens, num_sequences=6)
    return DivergenceLoss(divergence=kind, beta=BETA)(predictions, batch, scale)


def expected(kind, batch, policy_BTV, teacher_BTV, top_k):
    total = 0.0
    for b, t in batch["loss_mask"].nonzero().tolist():
        policy, teacher = policy_BTV[b, t].numpy(), teacher_BTV[b, t].numpy()
        order = np.argsort(-teacher)
        parts = [[*one[order[:top_k]], one[order[top_k:]].sum()] for one in (policy, teacher)]
        if top_k == V:
            parts = [one[:-1] for one in parts]
        total += reference(kind, *map(np.array, parts))
    return total / int(batch["loss_mask"].sum())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("top_k", [1, 4, V - 1, V])
@pytest.mark.parametrize("kind", KINDS)
def test_a_divergence_is_that_of_the_paper_over_likeliest_tokens_and_the_rest(kind, top_k, seed):
    batch, policy_BTV, teacher_BTV = made(seed)
    wanted, num_tokens = expected(kind, batch, policy_BTV, teacher_BTV, top_k), int(batch["loss_mask"].sum())
    batch, policy_BTK = told(batch, policy_BTV, teacher_BTV, top_k)
    for parts in ([torch.arange(6)], [torch.tensor([5, 0]), torch.tensor([3, 1, 2, 4])]):
        found = sum(float(call(kind, batch[part], policy_BTK[part], num_tokens).loss) for part in parts)
        assert found == pytest.approx(wanted, abs=1e-5 if top_k == V else 1e-9)
    policy_BTK[~batch["loss_mask"]] = -50.0
    assert float(call(kind, batch, policy_BTK, num_tokens).loss) == pytest.approx(found, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_more_tokens_bound_the_whole_divergence_from_below_ever_closer(kind):
    batch, policy_BTV, teacher_BTV = made()
    found = []
    for top_k in (1, 3, 6, V):
        cut, policy_BTK = told(batch, policy_BTV, teacher_BTV, top_k)
        found.append(float(call(kind, cut, policy_BTK, 1).loss))
    assert found == sorted(found)
    assert 0 < found[0] < found[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_differences_and_none_at_the_teacher(kind):
    batch, policy_BTV, teacher_BTV = made()
    logits_BTV = policy_BTV.log().requires_grad_()
    cut, _ = told(batch, policy_BTV, teacher_BTV, 4)

    def loss(at_BTV):
        return call(kind, cut, at_BTV.log_softmax(-1).gather(-1, cut["top_ids"]), 7).loss

    loss(logits_BTV).backward()
    at, step = logits_BTV.detach(), 1e-6
    for b, t in batch["loss_mask"].nonzero().tolist()[:4]:
        for v in range(V):
            moved = torch.zeros_like(at)
            moved[b, t, v] = step
            slope = float(loss(at + moved) - loss(at - moved)) / (2 * step)
            assert float(logits_BTV.grad[b, t, v]) == pytest.approx(slope, abs=1e-7)
    assert not logits_BTV.grad[~batch["loss_mask"]].any()
    same = teacher_BTV.log().requires_grad_()
    loss(same).backward()
    assert float(same.grad.abs().max()) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_the_other_direction_a_forgotten_rest_and_a_shift_are_seen(kind):
    batch, policy_BTV, teacher_BTV = made()
    right = expected(kind, batch, policy_BTV, teacher_BTV, 4)
    cut, policy_BTK = told(batch, policy_BTV, teacher_BTV, 4)
    num = int(batch["loss_mask"].sum())
    turned = cut.copy()
    turned["distill/teacher_top"] = policy_BTK
    shifted = call(kind, cut, policy_BTK.roll(1, 1), num)
    mask_BT = batch["loss_mask"]
    forgotten = divergence(kind, policy_BTK, cut["distill/teacher_top"], BETA)[mask_BT].sum() / num
    wrong = [call(kind, turned, cut["distill/teacher_top"], num).loss, shifted.loss, forgotten]
    for value in wrong:
        assert abs(float(value) - right) > 1e-4


def test_the_ends_of_the_mixture_are_the_two_kls():
    _, policy_BTV, teacher_BTV = made()
    policy_BTX, teacher_BTX = with_rest(policy_BTV[..., :4].log()), with_rest(teacher_BTV[..., :4].log())
    for beta, kind in ((1e-5, Divergence.FORWARD_KL), (1 - 1e-5, Divergence.REVERSE_KL)):
        mixed = divergence(Divergence.JSD, policy_BTX, teacher_BTX, beta) / min(beta, 1 - beta)
        assert torch.allclose(mixed, divergence(kind, policy_BTX, teacher_BTX, 0.5), rtol=1e-2)


def test_a_sampled_divergence_and_a_kl_term_are_refused_where_they_have_no_meaning():
    settings = DistillConfig(teacher_path="t", divergence=Divergence.JSD, kl_coef=0.1)
    assert [one.setting for one in Distill(config=settings).check()] == ["algorithm.kl_coef"]
    with pytest.raises(TrainerError, match="is `DistillLoss`"):
        divergence(Divergence.SAMPLED, torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), 0.5)


def test_a_trial_on_random_engines_leaves_likeliest_tokens_to_real_ones():
    assert trial(Distill(config=DistillConfig(teacher_path="t", divergence=Divergence.JSD)))


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_becomes_its_teacher(tmp_path, kind, updates):
    paths = [make_tiny_model(tmp_path / name, seed=seed) for name, seed in (("policy", 0), ("teacher", 1))]
    config = DistillConfig(teacher_path=paths[1], divergence=kind, top_k=16)
    algorithm = Distill(config=config, step=StepShape(updates_per_step=updates))
    roles, settings = {}, Fsdp2Config(model=ModelConfig(path=paths[0]), optimizer=OptimizerConfig(lr=3e-3))
    for name, one in role_engines(algorithm.roles(), settings, infers_alone=True).items():
        engine = engine_class("fsdp2")(one, World())
        engine.init_model()
        roles[name] = Role(engine)
    said = [
        reduce_metrics(algorithm.learn(roles, random_batch(8, seed=step % 2)))["distill/divergence_nats"]
        for step in range(24)
    ]
    assert said[-1] < 0.35 * said[0]
