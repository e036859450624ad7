"""Truncated sampling: the trainer's log-probs are of the tokens that the sampler kept, as the sampler's are."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from offbeat_engine import Fsdp2Config, ModelConfig, OptimizerConfig, World, engine_class
from offbeat_engine.testing import make_tiny_model, random_batch
from offbeat_rollout import Completion, Finish, RolloutConfig, SamplingParams, TopLogprobs
from offbeat_rollout.toolkit.registry import adapter_class
from offbeat_trainer import Distill, DistillConfig, Prompt, Role, Score, TrainerError, reduce_metrics
from offbeat_trainer.algorithms.policy_loss import PolicyLoss
from offbeat_trainer.algorithms.roles import of_kept_tokens
from offbeat_trainer.config import GrpoConfig
from offbeat_trainer.data.assemble import KEPT, assemble
from offbeat_trainer.data.types import Group, Trajectory, Turn
from offbeat_trainer.loops.session import Session, _telling
from offbeat_trainer.rollouts.single import GroupGenerator

CUTS = [{"top_k": 6}, {"top_k": 9, "top_p": 0.3}, {"top_k": 6, "top_p": 0.7, "temperature": 0.5}]


class Groups:
    """A rollout that only generates: satisfies what `Session.sample` asks of one."""

    def __init__(self, replica):
        self._generator = GroupGenerator(replica.generate_many, replica.abort)

    async def run(self, prompt, sampling, n):
        group = await self._generator.complete(prompt, sampling, n)
        return replace(group, scores=tuple(Score(reward=float(i)) for i in range(n)))


async def sampled(path, changes, count=6):
    """Return groups that `Session.sample` makes with `changes`, of a Hugging Face sampler."""
    replica = adapter_class("hf")(RolloutConfig(model_path=path, max_model_len=64))
    await replica.start()
    try:
        prompts = [Prompt(uid=str(n), text="", token_ids=(5 + n, 6, 7)) for n in range(4)]
        verbs = SimpleNamespace(
            steps=0,
            _num_samples=0,
            sampling=SimpleNamespace(max_tokens=7, temperature=1.0, stop=()),
            task=SimpleNamespace(stop_token_ids=lambda: ()),
            seed=3,
            loop=SimpleNamespace(group_size=count),
            training_rollout=Groups(replica),
        )
        return await Session.sample(verbs, prompts, **changes)
    finally:
        await replica.stop()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), initializer_range=0.1)


@pytest.fixture(scope="module")
def role(path):
    engine = engine_class("fsdp2")(
        Fsdp2Config(model=ModelConfig(path=path), optimizer=OptimizerConfig(lr=0.0)), World()
    )
    engine.init_model()
    yield Role(engine)
    engine.close()


def batch_of(groups, temperature):
    num = sum(len(group.trajectories) for group in groups)
    advantages = torch.linspace(-1, 1, num, dtype=torch.float64)
    return assemble(groups, {"advantages": advantages}, temperature=temperature)


@pytest.mark.parametrize("changes", CUTS)
def test_the_trainer_finds_the_log_probs_of_the_sampler_and_by_the_whole_distribution_others(
    path, role, changes
):
    groups = asyncio.run(sampled(path, changes))
    batch = batch_of(groups, changes.get("temperature", 1.0))
    mask, sampler = batch["loss_mask"], batch["rollout_logprobs"]
    torch.testing.assert_close(role.whole_logprobs(batch), sampler, atol=1e-4, rtol=0)
    whole = role.whole_logprobs(batch.exclude(KEPT.key))
    assert (sampler - whole)[mask].min() > -1e-4, "what is kept is at most all"
    assert (sampler - whole)[mask].mean() > 0.05
    found = reduce_metrics(role.train([batch], PolicyLoss(config=GrpoConfig(), max_completion_tokens=7)))
    assert found["mismatch/max_abs_logprob_diff"] < 1e-4
    assert found["offpolicy/ratio_mean"] == pytest.approx(1, abs=1e-4)
    shares = role.shares(batch)
    role.judge(shares, "old_logprobs")
    assert not shares[0]["old_logprobs"][~mask].any()


def kept_at_random(seed, vocab=9, most=4):
    """Float64 logits [B, T, V] and a batch with up to `most` kept tokens at a place, the drawn one among them; at some none is told."""
    batch = random_batch(6, seed=seed)
    batch["loss_mask"][2] = False
    random = np.random.default_rng(seed)
    shape = tuple(batch["loss_mask"].shape)
    batch["input_ids"] = torch.from_numpy(random.integers(0, vocab, shape))
    kept = np.full((*shape, most), -1)
    for b, t in batch["loss_mask"].nonzero().tolist():
        if random.random() < 0.8:
            other = [v for v in random.permutation(vocab) if v != int(batch["input_ids"][b, t])]
            count = random.integers(0, most)
            kept[b, t, : count + 1] = random.permutation([int(batch["input_ids"][b, t]), *other[:count]])
    batch[KEPT.key] = torch.from_numpy(kept)
    return batch, torch.from_numpy(random.standard_normal((*shape, vocab)))


def predictions_of(logits_BTV, batch):
    """What an engine answers, zero outside the mask."""
    logp = logits_BTV.log_softmax(-1) * batch["loss_mask"][..., None]
    logprobs = logp.gather(-1, batch["input_ids"][..., None]).squeeze(-1)
    top = logp.gather(-1, batch[KEPT.key].clamp(min=0))
    return TensorDict({"logprobs": logprobs, "top_logprobs": top}, batch_size=[len(logp)])


def reference(logits_BTV, batch):
    """log q of each token, in plain loops."""
    found = np.zeros(tuple(batch["loss_mask"].shape))
    for b, t in batch["loss_mask"].nonzero().tolist():
        powers = np.exp(logits_BTV[b, t].numpy())
        kept = [v for v in batch[KEPT.key][b, t].tolist() if v >= 0] or range(len(powers))
        found[b, t] = np.log(powers[int(batch["input_ids"][b, t])] / sum(powers[v] for v in kept))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_log_probs_are_of_the_kept_tokens_in_value_and_gradient(seed):
    batch, logits = kept_at_random(seed)
    leaf = logits.clone().requires_grad_()
    found = of_kept_tokens(predictions_of(leaf, batch), batch)["logprobs"]
    np.testing.assert_allclose(found.detach().numpy(), reference(logits, batch), atol=1e-12)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    (found * weights).sum().backward()
    assert not leaf.grad[~batch["loss_mask"]].any()
    for b, t in batch["loss_mask"].nonzero().tolist()[:6]:
        for v in range(logits.shape[-1]):
            step = torch.zeros_like(logits)
            step[b, t, v] = 1e-6
            slope = (
                (reference(logits + step, batch) - reference(logits - step, batch)) * weights.numpy()
            ).sum() / 2e-6
            assert float(leaf.grad[b, t, v]) == pytest.approx(slope, abs=1e-7)
    some = torch.tensor([4, 1])
    part = of_kept_tokens(predictions_of(logits, batch)[some], batch[some])["logprobs"]
    torch.testing.assert_close(part, found.detach()[some])


@pytest.mark.parametrize("mistake", ["whole", "one less", "filled up"])
def test_a_planted_mistake_is_seen(mistake):
    batch, logits = kept_at_random(1)
    wrong, kept = batch.clone(), batch[KEPT.key]
    if mistake == "whole":
        wrong = wrong.exclude(KEPT.key)
    elif mistake == "one less":
        wrong[KEPT.key] = torch.cat((kept[..., 1:], torch.full_like(kept[..., :1], -1)), -1)
    else:
        wrong[KEPT.key] = torch.where(kept.amax(-1, keepdim=True) >= 0, kept.clamp(min=0), kept)
    found = of_kept_tokens(predictions_of(logits, batch), wrong)["logprobs"]
    assert np.abs(found.numpy() - reference(logits, batch)).max() > 0.05


def test_the_expected_gradient_is_that_of_what_is_sampled_and_by_the_whole_distribution_it_is_not():
    """The kept mass is no constant: its gradient is left over wherever what is kept earns something."""
    draw = torch.Generator().manual_seed(0)
    logits_V, rewards_V = (torch.randn(7, generator=draw, dtype=torch.float64) for _ in range(2))
    rewards_V = rewards_V + 2
    kept = torch.tensor([5, 1, 2])
    leaf = logits_V.clone().requires_grad_()
    earned = (leaf[kept].softmax(0) * rewards_V[kept]).sum()
    (wanted,) = torch.autograd.grad(earned, leaf)

    def gradient(key):
        total = torch.zeros((), dtype=torch.float64)
        for token, share in zip(kept.tolist(), logits_V[kept].softmax(0).tolist(), strict=True):
            batch = TensorDict(
                {
                    "loss_mask": torch.ones(1, 1, dtype=torch.bool),
                    "input_ids": torch.tensor([[token]]),
                    KEPT.key: kept.view(1, 1, 3),
                },
                batch_size=[1],
            )
            found = of_kept_tokens(predictions_of(leaf.view(1, 1, -1), batch), batch.exclude(key))["logprobs"]
            total = total + share * rewards_V[token] * found.sum()
        return torch.autograd.grad(total, leaf)[0]

    torch.testing.assert_close(gradient("nothing"), wanted)
    assert (gradient(KEPT.key) - wanted).abs().max() > 0.1


def told(ids, logprobs):
    with np.errstate(divide="ignore"):
        tops = TopLogprobs(token_ids=np.array(ids, np.int32), logprobs=np.log(np.array(logprobs, np.float32)))
    return replace(
        Completion.of(
            request_id="r", token_ids=[one[0] for one in ids], logprobs=[-1.0] * len(ids), policy_versions=[1] * len(ids),
            finish=Finish.STOP,
        ),
        top_logprobs=tops,
    )  # fmt: skip


CUT = told([[4, 5, 6, 7], [5, 4, 6, 7]], [[0.7, 0.3, 0, 0], [1, 0, 0, 0]])
LOOKED_AT = told([[4, 5, 6, 7]], [[0.5, 0.2, 0.1, 0.1]])


def test_what_was_kept_is_told_by_what_was_cut_and_a_look_at_likely_tokens_is_none():
    observed = Trajectory(
        turns=(Turn(completion=LOOKED_AT), Turn(completion=CUT, observed=np.array([9, 9], np.int32))),
        finish=Finish.STOP,
    )
    prompt, score = Prompt(uid="p", text="", token_ids=(1,)), Score(reward=1.0)
    group = Group(prompt=prompt, trajectories=(Trajectory.of(CUT), observed), scores=(score, score))
    none = [-1, -1]
    wanted = [[none, [4, 5], [5, -1], none, none, none], [none, none, none, none, [4, 5], [5, -1]]]
    assert assemble([group], {}, temperature=1.0)[KEPT.key].tolist() == wanted
    looked = Group(prompt=prompt, trajectories=(Trajectory.of(LOOKED_AT),), scores=(score,))
    assert KEPT.key not in assemble([looked], {}, temperature=1.0)


def test_kept_tokens_of_which_some_are_not_told_are_refused():
    some = told([[4, 5], [5, 4]], [[0.7, 0.2], [1, 0]])
    group = Group(
        prompt=Prompt(uid="p", text="", token_ids=(1,)),
        trajectories=(Trajectory.of(some),),
        scores=(Score(reward=1.0),),
    )
    with pytest.raises(
        TrainerError, match="more tokens were kept than the 2 that `top_logprobs` told at 1 places"
    ):
        assemble([group], {}, temperature=1.0)


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({}, 0),
        ({"top_logprobs": 3}, 3),
        ({"temperature": 0.0, "top_p": 0.5}, 0),
        ({"top_k": 4}, 8),
        ({"top_k": 4, "top_p": 0.5, "top_logprobs": 4}, 8),
        ({"top_k": 4, "top_logprobs": 5}, 5),
    ],
)
def test_what_was_kept_is_asked_for_where_something_is_cut(changes, asked):
    assert _telling(SamplingParams(max_tokens=1, **changes)).top_logprobs == asked


def test_top_p_alone_is_refused_and_likeliest_tokens_do_not_go_with_it(path, role):
    with pytest.raises(
        TrainerError, match=r"`top_p` 0.5 keeps as many tokens as it takes.*give a `top_k` as well"
    ):
        asyncio.run(sampled(path, {"top_p": 0.5}))
    batch, _ = kept_at_random(0)
    with pytest.raises(TrainerError, match="truncated sampling cut these"):
        role.judge_top([batch], "distill/teacher_top", 4)


def test_a_teacher_is_asked_of_the_same_kept_tokens(path, role):
    batch = batch_of(asyncio.run(sampled(path, CUTS[0])), 1.0)
    algorithm = Distill(config=DistillConfig(teacher_path=path))
    found = reduce_metrics(algorithm.learn({"policy": role, "teacher": role}, batch))
    assert found["distill/reverse_kl_nats"] == pytest.approx(0, abs=1e-5)
