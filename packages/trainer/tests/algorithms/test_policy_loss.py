import math
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from offbeat_engine import LossScale, train_batch
from offbeat_trainer.algorithms.policy_loss import PolicyLoss, clipped_surrogate
from offbeat_trainer.config import Aggregation, GrpoConfig, KlEstimator
from offbeat_trainer.errors import PlanRefused, TrainerError

B, T = 6, 9
EVERYTHING = GrpoConfig(
    clip_low=0.2, clip_high=0.28, dual_clip=3.0, kl_coef=0.1, kl_estimator=KlEstimator.K3, entropy_coef=0.02
)


def make(config=EVERYTHING, max_completion_tokens=8):
    return PolicyLoss(config=config, max_completion_tokens=max_completion_tokens)


def some_batch(seed=0, spread=0.7):
    """Sequences of several lengths, the last without a completion; log-probabilities far enough apart to clip."""
    random = torch.Generator().manual_seed(seed)
    logprobs_BT = -torch.rand(B, T, generator=random) - 0.1
    lengths_B = torch.tensor([9, 5, 7, 4, 9, 2])
    position_T = torch.arange(T)
    mask_BT = (position_T >= 2) & (position_T < lengths_B[:, None])

    def noisy():
        return logprobs_BT + spread * torch.randn(B, T, generator=random)

    batch = train_batch(
        input_ids=torch.zeros(B, T, dtype=torch.int64),
        lengths=lengths_B,
        loss_mask=mask_BT,
        advantages=torch.randn(B, T, generator=random),
        old_logprobs=noisy(),
        ref_logprobs=noisy(),
        rollout_logprobs=noisy(),
    )
    predictions = TensorDict(
        {"logprobs": logprobs_BT, "entropy": torch.rand(B, T, generator=random)}, batch_size=[B]
    )
    return predictions.apply(torch.Tensor.requires_grad_), batch, whole(batch)


def whole(batch):
    return LossScale(num_tokens=int(batch["loss_mask"].sum()), num_sequences=batch.batch_size[0])


def token_loss(loss, predictions, batch, b, t):
    """The loss of one token with its metrics, in plain Python floats."""
    config = loss.config
    logprob, entropy = predictions["logprobs"][b, t].item(), predictions["entropy"][b, t].item()
    old = batch["old_logprobs"][b, t].item() if "old_logprobs" in batch else logprob
    ratio, advantage = math.exp(logprob - old), batch["advantages"][b, t].item()
    clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    objective = min(ratio * advantage, clipped * advantage)
    if config.dual_clip and advantage < 0:
        objective = max(objective, config.dual_clip * advantage)
    ref = batch["ref_logprobs"][b, t].item()
    kl = {
        "k1": logprob - ref,
        "k2": (logprob - ref) ** 2 / 2,
        "k3": math.exp(ref - logprob) - 1 - (ref - logprob),
        "abs": abs(logprob - ref),
    }
    kl["k3_plus"] = kl["k3"]
    weight = math.exp(old - batch["rollout_logprobs"][b, t].item())  # token by token, truncated: the default
    kl["unbiased"] = kl["k3"] * ratio * min(weight, config.correction_high)
    return {
        "loss": -objective * min(weight, config.correction_high)
        + config.kl_coef * kl[config.kl_estimator]
        - config.entropy_coef * entropy,
        "policy/clip_low_fraction": advantage < 0 and ratio < 1 - config.clip_low,
        "policy/clip_high_fraction": advantage > 0 and ratio > 1 + config.clip_high,
        "policy/clip_dual_fraction": bool(config.dual_clip) and advantage < 0 and ratio > config.dual_clip,
        "policy/approx_kl_nats": ratio - 1 - math.log(ratio),
        "policy/ref_kl_nats": kl[config.kl_estimator],
        "policy/entropy_nats": entropy,
        "offpolicy/ratio_mean": weight,
        "offpolicy/ratio_square_mean": weight**2,
        "offpolicy/truncated_fraction": weight > config.correction_high,
        "offpolicy/masked_fraction": False,
        "ratio": ratio,
    }


def plain(loss, predictions, batch):
    """The whole loss and its metrics, token by token."""
    rows = [
        [token_loss(loss, predictions, batch, b, t) for t in range(T) if batch["loss_mask"][b, t]]
        for b in range(B)
    ]
    tokens = [token for row in rows for token in row]
    totals = [sum(token["loss"] for token in row) for row in rows]
    value = {
        Aggregation.TOKEN_MEAN: sum(totals) / len(tokens),
        Aggregation.SEQ_MEAN_TOKEN_SUM: sum(totals) / B,
        Aggregation.SEQ_MEAN_TOKEN_MEAN: sum(t / len(r) for t, r in zip(totals, rows, strict=True) if r) / B,
        Aggregation.SEQ_MEAN_TOKEN_SUM_NORM: sum(totals) / B / loss.max_completion_tokens,
    }[loss.config.aggregation]
    means = {key: sum(token[key] for token in tokens) / len(tokens) for key in tokens[0] if "/" in key}
    peaks = {
        "policy/ratio_max": max(token["ratio"] for token in tokens),
        "offpolicy/ratio_max": max(token["offpolicy/ratio_mean"] for token in tokens),
    }
    return value, means, peaks


@pytest.mark.parametrize("aggregation", Aggregation)
@pytest.mark.parametrize("estimator", [one for one in KlEstimator if one is not KlEstimator.FULL])
@pytest.mark.parametrize("dual_clip", [0.0, 1.5])
@pytest.mark.parametrize("on_policy", [False, True])
def test_against_plain_python(aggregation, estimator, dual_clip, on_policy):
    config = replace(EVERYTHING, aggregation=aggregation, kl_estimator=estimator, dual_clip=dual_clip)
    predictions, batch, scale = some_batch()
    if on_policy:
        del batch["old_logprobs"]
    output = make(config)(predictions, batch, scale)
    value, means, peaks = plain(make(config), predictions, batch)
    assert output.loss.item() == pytest.approx(value, rel=1e-5, abs=1e-7)
    assert {key: total.item() for key, total in output.sums.items()} == pytest.approx(
        means, rel=1e-5, abs=1e-7
    )
    assert {key: peak.item() for key, peak in output.maxes.items()} == pytest.approx(peaks, rel=1e-5)
    if not on_policy:
        assert means["policy/clip_low_fraction"] > 0  # the case is not an empty one
        assert means["policy/clip_high_fraction"] > 0
        assert (means["policy/clip_dual_fraction"] > 0) == (dual_clip > 0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "loss", "slope"),
    [
        # slope = d loss / d ratio: -A where the gradient flows, 0 where a bound cut it.
        (1.1, 2.0, 0.0, -2.2, -2.0),  # inside the bounds
        (1.5, 2.0, 0.0, -2.56, 0.0),  # A > 0 above 1.28: clipped
        (0.5, 2.0, 0.0, -1.0, -2.0),  # A > 0 below 0.8: the pessimistic bound is the ratio itself
        (0.5, -2.0, 0.0, 1.6, 0.0),  # A < 0 below 0.8: clipped
        (5.0, -2.0, 0.0, 10.0, 2.0),  # A < 0 above: unbounded without the dual clip
        (5.0, -2.0, 3.0, 6.0, 0.0),  # ... and stopped at c |A| with it
        (5.0, 2.0, 3.0, -2.56, 0.0),  # the dual clip does not touch A > 0
        (1.0, 2.0, 3.0, -2.0, -2.0),  # both sides of the minimum tie: the gradient must not halve
    ],
)
def test_surrogate_by_hand(ratio, advantage, dual_clip, loss, slope):
    ratio_1 = torch.tensor([ratio], requires_grad=True)
    got = clipped_surrogate(ratio_1, torch.tensor([advantage]), 0.2, 0.28, dual_clip).loss
    (grad_1,) = torch.autograd.grad(got.sum(), ratio_1)
    assert got.item() == pytest.approx(loss)
    assert grad_1.item() == pytest.approx(slope)


def naive(loss, predictions, batch, scale):
    """The loss with token mean and k3, over the masked tokens alone, as one would write it on paper."""
    config, mask_BT = loss.config, batch["loss_mask"]
    logprobs_N, entropy_N = predictions["logprobs"][mask_BT], predictions["entropy"][mask_BT]
    advantages_N, ref_N = batch["advantages"][mask_BT], batch["ref_logprobs"][mask_BT]
    ratio_N = (logprobs_N - batch["old_logprobs"][mask_BT]).exp()
    clipped_N = ratio_N.clip(1 - config.clip_low, 1 + config.clip_high)
    objective_N = torch.min(ratio_N * advantages_N, clipped_N * advantages_N)
    floor_N = torch.max(objective_N, config.dual_clip * advantages_N)
    objective_N = torch.where(advantages_N < 0, floor_N, objective_N)
    weight_N = (
        (batch["old_logprobs"] - batch["rollout_logprobs"])[mask_BT].exp().clip(max=config.correction_high)
    )
    kl_N = (ref_N - logprobs_N).exp() - 1 - (ref_N - logprobs_N)
    return (
        -objective_N * weight_N + config.kl_coef * kl_N - config.entropy_coef * entropy_N
    ).sum() / scale.num_tokens


@pytest.mark.parametrize("seed", range(3))
def test_gradient_against_a_naive_formula(seed):
    predictions, batch, scale = some_batch(seed)
    leaves = (predictions["logprobs"], predictions["entropy"])
    got = torch.autograd.grad(make()(predictions, batch, scale).loss, leaves)
    wanted = torch.autograd.grad(naive(make(), predictions, batch, scale), leaves)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)
    assert wanted[0].any()


def test_on_policy_the_gradient_is_the_plain_policy_gradient():
    predictions, batch, scale = some_batch()
    del batch["old_logprobs"], batch["rollout_logprobs"]
    output = make(GrpoConfig())(predictions, batch, scale)
    (grad_BT,) = torch.autograd.grad(output.loss, predictions["logprobs"])
    wanted_BT = torch.where(batch["loss_mask"], -batch["advantages"] / scale.num_tokens, 0.0)
    torch.testing.assert_close(grad_BT, wanted_BT)
    assert output.maxes["policy/ratio_max"].item() == 1.0
    assert output.sums["policy/approx_kl_nats"].item() == 0.0


@pytest.mark.parametrize("aggregation", Aggregation)
@given(data=st.data())
def test_micro_batches_and_order_change_nothing(aggregation, data):
    loss = make(replace(EVERYTHING, aggregation=aggregation))
    predictions, batch, scale = some_batch(data.draw(st.integers(0, 100)))
    order = torch.tensor(data.draw(st.permutations(range(B))))
    cuts = data.draw(st.lists(st.integers(0, B), max_size=4).map(sorted))
    parts = [loss(predictions[i], batch[i], scale) for i in torch.tensor_split(order, cuts)]
    one = loss(predictions, batch, scale)
    torch.testing.assert_close(sum(part.loss for part in parts), one.loss, rtol=1e-5, atol=1e-6)
    for key, total in one.sums.items():
        torch.testing.assert_close(sum(part.sums[key] for part in parts), total, rtol=1e-5, atol=1e-6)
    for key, peak in one.maxes.items():
        assert max(part.maxes[key] for part in parts) == peak
    leaf_BT = predictions["logprobs"]
    (split_BT,) = torch.autograd.grad(sum(part.loss for part in parts), leaf_BT)
    (whole_BT,) = torch.autograd.grad(one.loss, leaf_BT)
    torch.testing.assert_close(split_BT, whole_BT, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_outside_the_mask_does_not_matter(poison):
    predictions, batch, scale = some_batch()
    outside_BT = ~batch["loss_mask"]
    clean = make()(predictions, batch, scale)
    for key in ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs"):
        batch[key] = batch[key].masked_fill(outside_BT, poison)
    poisoned = predictions.apply(lambda x: x.detach().masked_fill(outside_BT, poison).requires_grad_())
    got = make()(poisoned, batch, scale)
    assert got.loss.item() == clean.loss.item()
    assert {k: v.item() for k, v in got.sums.items()} == {k: v.item() for k, v in clean.sums.items()}
    assert {k: v.item() for k, v in got.maxes.items()} == {k: v.item() for k, v in clean.maxes.items()}
    (grad_BT,) = torch.autograd.grad(got.loss, poisoned["logprobs"])
    assert grad_BT.isfinite().all()
    assert not grad_BT[outside_BT].any()


@pytest.mark.parametrize("advantage", [-1e6, 0.0, 1e6])
@pytest.mark.parametrize("gap", [-1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("dual_clip", [0.0, 3.0])
def test_extremes_stay_finite(advantage, gap, dual_clip):
    predictions, batch, scale = some_batch()
    batch["advantages"] = torch.full((B, T), advantage)
    for key in ("old_logprobs", "ref_logprobs", "rollout_logprobs"):
        batch[key] = predictions["logprobs"].detach() + gap
    output = make(replace(EVERYTHING, dual_clip=dual_clip))(predictions, batch, scale)
    (grad_BT,) = torch.autograd.grad(output.loss, predictions["logprobs"])
    assert output.loss.isfinite()
    assert grad_BT.isfinite().all()
    assert all(value.isfinite() for value in (*output.sums.values(), *output.maxes.values()))


def test_an_empty_micro_batch_adds_zero_under_the_same_keys():
    predictions, batch, scale = some_batch()
    full, empty = make()(predictions, batch, scale), make()(predictions[:0], batch[:0], scale)
    empty.loss.backward()  # pipeline and data-parallel ranks run it all the same
    assert empty.loss.item() == 0
    assert (empty.sums.keys(), empty.maxes.keys()) == (full.sums.keys(), full.maxes.keys())
    assert not any(value.item() for value in (*empty.sums.values(), *empty.maxes.values()))


def test_metrics_hold_no_graph():
    output = make()(*some_batch())
    assert not any(value.requires_grad for value in (*output.sums.values(), *output.maxes.values()))


def test_it_travels():
    assert pickle.loads(pickle.dumps(make())) == make()


@pytest.mark.parametrize(
    ("key", "config"),
    [("advantages", GrpoConfig()), ("ref_logprobs", GrpoConfig(kl_coef=0.1))],
)
def test_a_batch_without_what_the_loss_needs_is_refused(key, config):
    predictions, batch, scale = some_batch()
    del batch[key]
    with pytest.raises(TrainerError, match=key):
        make(config)(predictions, batch, scale)


def test_it_asks_the_engine_for_the_gradient_of_the_entropy_only_when_it_needs_it():
    assert not make(GrpoConfig()).entropy_gradient
    assert make(GrpoConfig(entropy_coef=0.01)).entropy_gradient


def test_an_entropy_bonus_without_gradient_is_refused():
    predictions, batch, scale = some_batch()
    predictions["entropy"] = predictions["entropy"].detach()
    make(GrpoConfig())(predictions, batch, scale)
    with pytest.raises(TrainerError, match="gradient"):
        make(GrpoConfig(entropy_coef=0.01))(predictions, batch, scale)
    with pytest.raises(TrainerError, match="gives none"):
        make(GrpoConfig(entropy_coef=0.01))(predictions.exclude("entropy"), batch, scale)


@pytest.mark.parametrize(
    ("name", "value"),
    [("clip_low", 1.1), ("clip_low", -0.1), ("clip_high", -0.1), ("dual_clip", 0.5), ("kl_coef", -1.0)],
)
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(PlanRefused, match=name):
        make(replace(GrpoConfig(), **{name: value}))


COUNTS = torch.tensor([1, 3, 4, 2])  # of four tokens, as an older policy sampled them


def kl_gradient(estimator, old):
    """Return the gradient in the policy's logits of the KL term over tokens of an older policy, and that of the KL itself."""
    draw = torch.Generator().manual_seed(1)
    logits_V, ref_V = (torch.randn(4, generator=draw, dtype=torch.float64) for _ in range(2))
    sampler_V, ref_V = (COUNTS / COUNTS.sum()).double().log(), ref_V.log_softmax(-1)
    tokens_N = torch.arange(4).repeat_interleave(COUNTS)
    leaf_V = logits_V.clone().requires_grad_()
    policy_V = leaf_V.log_softmax(-1)
    one = {"rollout_logprobs": sampler_V, "ref_logprobs": ref_V, "advantages": torch.zeros(4).double()}
    one |= {"old_logprobs": policy_V.detach() + old} if old is not None else {}
    batch = TensorDict(
        {
            "loss_mask": torch.ones(10, 1, dtype=torch.bool),
            **{key: value[tokens_N][:, None] for key, value in one.items()},
        },
        batch_size=[10],
    )
    loss = make(GrpoConfig(kl_coef=1.0, kl_estimator=estimator, correction_high=1e6))
    predictions = TensorDict({"logprobs": policy_V[tokens_N][:, None]}, batch_size=[10])
    got_V = torch.autograd.grad(
        loss(predictions, batch, LossScale(num_tokens=10, num_sequences=10)).loss, leaf_V
    )[0]
    policy_V = leaf_V.log_softmax(-1)
    return got_V, torch.autograd.grad((policy_V.exp() * (policy_V - ref_V)).sum(), leaf_V)[0]


@pytest.mark.parametrize("old", [None, 0.0, 0.3])
def test_the_unbiased_kl_of_tokens_that_another_policy_sampled_has_the_gradient_of_the_kl(old):
    """Without proximal log-probs, with fresh ones, and with ones that the policy has left since."""
    got_V, wanted_V = kl_gradient(KlEstimator.UNBIASED, old)
    assert torch.allclose(got_V, wanted_V, atol=1e-9)


@pytest.mark.parametrize("estimator", [KlEstimator.K1, KlEstimator.K2, KlEstimator.K3])
def test_the_other_estimators_take_the_sampler_for_the_policy(estimator):
    got_V, wanted_V = kl_gradient(estimator, None)
    assert (got_V - wanted_V).abs().max() > 0.01
