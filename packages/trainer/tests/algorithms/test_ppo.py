"""What PPO makes of scored groups, beside plain Python; its runs are in test_local_run.py."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat_engine import ModelConfig, OptimizerConfig, engine_class
from offbeat_engine.testing import make_tiny_model, random_batch
from offbeat_engine.testing.ranks import RankPool
from offbeat_rollout import Completion, Finish
from offbeat_trainer import Role, StepShape, reduce_metrics
from offbeat_trainer.algorithms.ppo import Ppo, whitened
from offbeat_trainer.config import PpoConfig
from offbeat_trainer.data.assemble import assemble
from offbeat_trainer.data.types import Group, Prompt, Score, Trajectory
from offbeat_trainer.errors import TrainerError


def group(lengths, rewards):
    made = [
        Completion.of(
            request_id="r",
            token_ids=[3] * length,
            logprobs=[-1.0] * length,
            policy_versions=[1] * length,
            finish=Finish.STOP,
        )
        for length in lengths
    ]
    scores = tuple(Score(reward=reward, correct=False) for reward in rewards)
    return Group(
        prompt=Prompt(uid="p", text="", token_ids=(1, 2)),
        trajectories=tuple(map(Trajectory.of, made)),
        scores=scores,
    )


def test_the_last_token_of_a_completion_has_its_reward():
    groups = [group([1, 3], [1.0, -2.0]), group([0, 2], [5.0, 0.5])]
    batch = assemble(groups, Ppo(config=PpoConfig()).targets(groups), temperature=1.0)
    assert batch["ppo/rewards"].tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 0, -2], [0] * 5, [0, 0, 0, 0.5, 0]]


def test_a_reward_that_is_no_number_is_refused():
    with pytest.raises(TrainerError, match="has reward nan"):
        Ppo(config=PpoConfig()).targets([group([1, 1], [0.0, math.nan])])


@given(st.integers(0, 1000), st.floats(0.01, 100), st.floats(-100, 100))
def test_whitened_values_have_mean_0_and_variance_1_under_the_mask(seed, spread, shift):
    batch = random_batch(4, seed=seed)
    mask_BT = batch["loss_mask"]
    values_BT = torch.randn(mask_BT.shape, generator=torch.Generator().manual_seed(seed)) * spread + shift
    got_BT = whitened(values_BT, mask_BT)
    inside_N = got_BT[mask_BT].double()
    assert float(inside_N.mean()) == pytest.approx(0, abs=1e-4)
    assert float(inside_N.var()) == pytest.approx(1, abs=1e-2)
    assert not got_BT[~mask_BT].any()


def test_a_batch_without_a_trained_token_is_whitened_to_nothing():
    assert whitened(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool)).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize(("name", "value"), [("clip_low", 1.1), ("dual_clip", 0.5), ("correction_high", 0.5)])
def test_bounds_of_the_policy_loss_are_its_own(name, value):
    [refusal] = Ppo(config=PpoConfig(**{name: value})).check()
    assert refusal.setting == f"algorithm.{name}"


LAYOUTS = {"fsdp2": {}, "megatron": {"tensor_parallel_size": 2}}
STEPS, UPDATES = 3, 2


def learned(world, path, engines):
    """Return the metrics of each step of PPO whose policy and critic are of the named `engines`."""
    torch.set_num_threads(1)
    algorithm = Ppo(
        config=PpoConfig(), step=StepShape(group_size=2, updates_per_step=UPDATES, max_completion_tokens=8)
    )
    roles = {}
    for role, name in engines.items():
        cls = engine_class(name)
        head = algorithm.roles()[role].head
        config = cls.Config(
            model=ModelConfig(path=path, head=head), optimizer=OptimizerConfig(lr=1e-3), **LAYOUTS[name]
        )
        engine = cls(config, world)
        engine.init_model()
        roles[role] = Role(engine)
    groups = [
        group([2, 5], [1.0, 0.0]),
        group([3, 1], [0.0, 2.0]),
        group([4, 4], [1.5, 0.5]),
        group([6, 2], [0.0, 1.0]),
    ]
    batch = assemble(groups, algorithm.targets(groups), temperature=1.0)
    said = [reduce_metrics(algorithm.learn(roles, batch)) for _ in range(STEPS)]
    for role in roles.values():
        role.engine.close()
    return said


@pytest.fixture(scope="module")
def two_ranks():
    pool = RankPool(2, 600.0)
    yield pool
    pool.stop()


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("policy", "critic"), [("megatron", "fsdp2"), ("fsdp2", "megatron"), ("megatron", "megatron")]
)
def test_policy_and_critic_of_other_engines_come_to_the_same(tmp_path, two_ranks, policy, critic):
    path = make_tiny_model(tmp_path / "tiny")
    plain = two_ranks.run(learned, path, {"policy": "fsdp2", "critic": "fsdp2"})[0]
    mixed = two_ranks.run(learned, path, {"policy": policy, "critic": critic})[0]
    for one, other in zip(plain, mixed, strict=True):
        for key in ("train/loss", "train/grad_norm", "value/mean", "value/explained_variance"):
            assert other[key] == pytest.approx(one[key], rel=1e-4, abs=1e-5), key
