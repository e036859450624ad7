"""Roles on a real engine of one rank."""

from dataclasses import replace

import pytest
import torch

from offbeat_engine import (
    ConfigError,
    Fsdp2Config,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    StepError,
    StepStats,
    World,
    engine_class,
)
from offbeat_engine.batch import SftLoss
from offbeat_engine.megatron.config import MegatronConfig
from offbeat_engine.testing import make_tiny_model, random_batch
from offbeat_trainer.algorithms.grpo import GroupPolicyGradient
from offbeat_trainer.algorithms.interface import StepShape
from offbeat_trainer.algorithms.learner import Learner
from offbeat_trainer.algorithms.roles import Role, RoleSpec, role_engines, split_evenly, stats_metrics
from offbeat_trainer.config import AlgorithmConfig
from offbeat_trainer.data.metrics import Last, Max, Mean, Metric, Sum, reduce_metrics
from offbeat_trainer.errors import PlanRefused

LR = 1e-2


class SeenBatches:
    """A loss that remembers what it was given: [(keys, sequences)]. Satisfies `LossFn`."""

    def __init__(self):
        self.seen = []

    def __call__(self, predictions, batch, ctx):
        self.seen.append((set(batch.keys()), batch.batch_size[0], batch))
        return SftLoss()(predictions, batch, ctx)


class Seen(GroupPolicyGradient):
    """Trains by `loss`, with `updates` steps a batch."""

    @classmethod
    def of(cls, loss, *, updates=1):
        made = cls(config=AlgorithmConfig(), step=StepShape(updates_per_step=updates))
        object.__setattr__(made, "loss", loss)
        return made

    def advantages(self, rewards_NG):
        return rewards_NG

    def loss_fn(self):
        return self.loss


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def new_engine(model, **changes):
    config = Fsdp2Config(
        model=ModelConfig(path=model), optimizer=OptimizerConfig(lr=LR), micro_batch_tokens=100_000, **changes
    )
    engine = engine_class("fsdp2")(config, World())
    engine.init_model()
    return engine


def by_sequence(batch, values_BT):
    """Return {tokens: values} of each sequence: an engine may order the sequences of a batch as it likes."""
    rows = zip(batch["lengths"].tolist(), batch["input_ids"].tolist(), values_BT.tolist(), strict=True)
    return {tuple(ids[:length]): values[:length] for length, ids, values in rows}


@pytest.mark.parametrize("num_parts", [1, 2, 3, 6])
def test_split_evenly_keeps_the_order_and_loses_nothing(num_parts):
    batch = random_batch(6)
    parts = split_evenly(batch, num_parts)
    assert [part.batch_size[0] for part in parts] == [6 // num_parts] * num_parts
    for key in batch.keys():  # noqa: SIM118 - iterating a TensorDict goes over its sequences
        assert torch.equal(torch.cat([part[key] for part in parts]), batch[key]), key


def test_runs_differ_by_one_where_sequences_were_left_out():
    batch = random_batch(6)
    parts = split_evenly(batch, 4)
    assert [len(part) for part in parts] == [1, 2, 1, 2]
    assert torch.equal(torch.cat([part["input_ids"] for part in parts]), batch["input_ids"])
    with pytest.raises(ValueError, match=r"3 sequences cannot be cut into 4 equal.*`updates_per_step`"):
        split_evenly(random_batch(3), 4)


def test_stats_become_metrics_with_the_right_reduction():
    stats = StepStats(
        loss=0.5, sums={"policy/entropy": 2.0}, maxes={"policy/ratio_max": 1.5}, num_tokens=90,
        num_loss_tokens=40, num_micro_batches=3, elapsed_s=2.0, mfu=0.25, peak_memory_bytes=1000,
        engine={"experts_idle": 1.0},
    )  # fmt: skip
    assert {metric.key: metric.reduction for metric in stats_metrics(stats)} == {
        "train/loss": Mean(0.5),
        "train/micro_batches": Mean(3),
        "train/tokens": Mean(90),
        "policy/entropy": Mean(2.0),
        "policy/ratio_max": Max(1.5),
        "engine/experts_idle": Mean(1.0),
        "time/engine_s": Sum(2.0),
        "time/engine_tokens_per_s": Mean(90, 2.0),
        "time/mfu_fraction": Mean(0.5, 2.0),
        "memory/train_peak_bytes": Max(1000),
    }
    untold = replace(stats, mfu=None)  # a device whose peak nobody knows
    assert "time/mfu_fraction" not in {metric.key for metric in stats_metrics(untold)}


def test_one_update_is_one_step_on_the_whole_batch_without_extra_passes(model):
    loss = SeenBatches()
    metrics = Seen.of(loss).learn({"policy": Role(new_engine(model))}, random_batch(6))
    assert [(number, "old_logprobs" in keys, "ref_logprobs" in keys) for keys, number, _ in loss.seen] == [
        (6, False, False)
    ]
    assert Metric("train/lr", Last(LR)) in metrics
    assert reduce_metrics(metrics)["train/grad_norm"] > 0


def test_no_gradient_waits_in_host_memory_between_steps(model):
    engine = new_engine(model, offload_parameters=True)
    weights = engine._state.weights
    held = sum(copy.nbytes for _, copy in weights._away)
    assert held > 0
    for _ in range(2):
        Role(engine).train([random_batch(6)], SftLoss())
        assert sum(copy.nbytes for _, copy in weights._away) == held


def test_gradients_of_a_step_that_failed_are_dropped(model):
    class Failing(SeenBatches):
        def __call__(self, predictions, batch, ctx):
            raise ValueError("planned")

    engine, other = new_engine(model), new_engine(model)
    with pytest.raises(StepError, match="planned"):
        Role(engine).train([random_batch(6)], Failing())
    for each in (engine, other):
        Role(each).train([random_batch(6)], SftLoss())
    weights = dict(other.named_weights())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in engine.named_weights())


def test_several_updates_are_taken_against_the_policy_before_the_first(model):
    loss = SeenBatches()
    engine, frozen, untouched = new_engine(model), new_engine(model, inference_only=True), new_engine(model)
    batch = random_batch(6)
    share = untouched.shard_data(batch)
    before = Role(untouched).logprobs(share)
    expected = by_sequence(share, before)
    roles = {"policy": Role(engine), "reference": Role(frozen)}
    metrics = Seen.of(loss, updates=3).learn(roles, batch)
    assert [number for _, number, _ in loss.seen] == [2, 2, 2]
    for _, _, mini in loss.seen:
        for key in ("old_logprobs", "ref_logprobs"):
            for sequence, logprobs in by_sequence(mini, mini[key]).items():
                assert logprobs == pytest.approx(expected[sequence], abs=1e-5)
    assert [metric.key for metric in metrics].count("train/loss") == 3
    after = Role(engine).logprobs(engine.shard_data(batch))
    assert (after - before).abs().max() > 1e-3
    still = Role(frozen).logprobs(frozen.shard_data(batch))
    assert torch.equal(still, before)


def test_a_policy_with_adapters_is_held_to_the_base_under_them(model):
    loss, batch = SeenBatches(), random_batch(6)
    plain, engine = new_engine(model), new_engine(model, lora=LoraConfig(rank=4))
    share = plain.shard_data(batch)
    expected = by_sequence(share, Role(plain).logprobs(share))
    roles = {"policy": Role(engine), "reference": Role(engine, base=True)}
    for _ in range(3):
        Seen.of(loss).learn(roles, batch)
    share = loss.seen[-1][2]
    for sequence, logprobs in by_sequence(share, share["ref_logprobs"]).items():
        assert logprobs == pytest.approx(expected[sequence], abs=1e-5)
    now = Role(engine).logprobs(share)
    assert (now - share["ref_logprobs"]).abs().max() > 1e-3


def test_weights_that_wait_in_host_memory_come_once_for_all_mini_batches(model):
    engine = new_engine(model, offload_parameters=True)
    weights, fetched = engine._state.weights, []
    fetch = weights._fetch
    weights._fetch = lambda: (fetched.append(bool(weights._away)), fetch())
    Seen.of(SeenBatches(), updates=3).learn({"policy": Role(engine)}, random_batch(6))
    assert fetched == [True, True]  # for the log-probs before the first step, and for all three steps


def test_supervising_uses_a_loss_of_its_own_and_update_goes_back_to_the_algorithms(model, tmp_path):
    own = SeenBatches()
    roles = {"policy": Role(new_engine(model))}
    learner = Learner(Seen.of(own), roles, checkpoints=str(tmp_path), keep=1)
    losses = [reduce_metrics(learner.supervise(random_batch(6)))["train/loss"] for _ in range(5)]
    assert losses[-1] < losses[0]
    assert len(own.seen) == 0
    learner.update(random_batch(6))
    assert len(own.seen) == 1


ENGINE = Fsdp2Config(
    model=ModelConfig(path="start"), optimizer=OptimizerConfig(lr=LR), offload_optimizer=True
)
POLICY = RoleSpec(trained=True)


def test_each_role_has_an_engine_as_it_asked_for():
    slow = replace(ENGINE.optimizer, lr=1e-7)
    roles = {
        "policy": POLICY,
        "reference": RoleSpec(trained=False),
        "teacher": RoleSpec(trained=False, path="large", offload=True),
        "critic": RoleSpec(trained=True, head="value", lr=1e-7, offload=False),
    }
    frozen = replace(ENGINE, inference_only=True)
    assert role_engines(roles, ENGINE, infers_alone=True) == {
        "policy": ENGINE,
        "reference": frozen,
        "teacher": replace(
            frozen, model=replace(ENGINE.model, path="large"), offload_parameters=True, offload_optimizer=True
        ),
        "critic": replace(
            ENGINE, model=replace(ENGINE.model, head="value"), optimizer=slow, offload_optimizer=False
        ),
    }
    assert role_engines(roles, ENGINE, infers_alone=False)["reference"] == ENGINE


def test_a_role_may_have_another_engine_which_is_told_what_engines_have_in_common():
    policy = MegatronConfig(model=ENGINE.model, micro_batch_tokens=77, tensor_parallel_size=2)
    roles = {
        "policy": POLICY,
        "critic": RoleSpec(trained=True, head="value", engine="fsdp2"),
        "reference": RoleSpec(trained=False, engine="fsdp2"),
        "teacher": RoleSpec(trained=False, path="t", engine="megatron"),
    }
    made = role_engines(roles, policy, infers_alone=False)
    fsdp2 = Fsdp2Config(model=ENGINE.model, micro_batch_tokens=77)
    assert made["critic"] == replace(fsdp2, model=replace(ENGINE.model, head="value"))
    assert made["reference"] == replace(fsdp2, inference_only=True)
    assert made["teacher"] == replace(policy, model=replace(ENGINE.model, path="t"), inference_only=True)
    with pytest.raises(ConfigError, match="no training engine named 'fsdp3'"):
        role_engines({**roles, "critic": replace(roles["critic"], engine="fsdp3")}, policy, infers_alone=True)


def test_under_adapters_lies_the_reference_and_other_models_have_none():
    engine = replace(ENGINE, lora=LoraConfig(rank=4))
    roles = {
        "policy": POLICY,
        "reference": RoleSpec(trained=False),
        "teacher": RoleSpec(trained=False, path="t"),
    }
    made = role_engines(roles, engine, infers_alone=True)
    assert (made["policy"], made["reference"], made["teacher"].lora.rank) == (engine, None, 0)


@pytest.mark.parametrize(
    "roles",
    [
        {},
        {"actor": POLICY},
        {"policy": RoleSpec(trained=False)},
        {"policy": replace(POLICY, head="value")},
        {"policy": replace(POLICY, engine="fsdp2")},
    ],
)
def test_roles_without_a_policy_that_generates_are_refused(roles):
    with pytest.raises(PlanRefused, match="needs a role 'policy' that is trained"):
        role_engines(roles, ENGINE, infers_alone=True)


class WithCritic(Seen):
    """A policy, and a second model that is trained beside it."""

    def roles(self):
        return {"policy": POLICY, "critic": RoleSpec(trained=True)}

    def learn(self, roles, batch):
        for role in roles.values():
            role.train(role.shares(batch), SftLoss())
        return []


def test_every_trained_role_is_saved_under_its_name_and_goes_back_to_the_step_of_the_policy(model, tmp_path):
    def learner():
        roles = {name: Role(new_engine(model)) for name in ("policy", "critic")}
        return roles, Learner(WithCritic.of(SftLoss()), roles, checkpoints=str(tmp_path), keep=1)

    roles, first = learner()
    said = {}
    for step in (1, 2):
        first.update(random_batch(6, seed=step))
        said[step] = {
            name: role.logprobs(role.engine.shard_data(random_batch(6))) for name, role in roles.items()
        }
        first.save(step, block=False)
    first.update(random_batch(6, seed=3))

    def ends(*_, **__):
        raise InterruptedError("the process ends between the two checkpoints of step 3")

    roles["policy"].engine.save_checkpoint = ends
    with pytest.raises(InterruptedError):
        first.save(3, block=False)
    again, second = learner()
    assert second.load(None) == 2
    for name, role in again.items():
        assert torch.equal(role.logprobs(role.engine.shard_data(random_batch(6))), said[2][name]), name
    assert not torch.equal(said[1]["critic"], said[2]["critic"])
    first.close()
    second.close()
