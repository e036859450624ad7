"""The canary of the run's own replicas: two that agree are committed, one that loaded something else is found out."""

import pytest
import torch

from offbeat_ckptsync import SyncConfig, SyncFailed
from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.ends.sender import LocalSource, Sender
from offbeat_engine import Fsdp2Config, ModelConfig, OptimizerConfig, SftLoss, World, engine_class
from offbeat_engine.testing import make_tiny_model, random_batch
from offbeat_rollout import RolloutConfig
from offbeat_rollout.toolkit.registry import adapter_class
from offbeat_trainer.cluster.weights import EngineWeights, make_member

SYNC = SyncConfig(transport="loopback", canary=True)


class House:
    """A training engine, and replicas that a manager knows; those in `torn` load their last tensor wrong."""

    def __init__(self, engine):
        self.engine = engine
        self.fenced = {}
        self.torn = set()
        self.manager = CheckpointEngineManager(
            LocalSource(Sender(EngineWeights(engine), SYNC)), SYNC, on_fence=self.on_fence
        )

    async def on_fence(self, name, reason):
        self.fenced[name] = reason

    async def add(self, name, replica):
        load = replica.load

        async def hurt(tensors, version, *, recompute_kv):
            if name in self.torn:
                *rest, (last, tensor) = tensors
                tensors = [*rest, (last, tensor * 0.5)]
            await load(tensors, version, recompute_kv=recompute_kv)

        replica.load = hurt  # between verified digests and live weights: where only the canary looks
        self.manager.add(await make_member(name, replica, SYNC))

    def train(self):
        batch = random_batch(8, seed=1)
        with self.engine.train_mode():
            self.engine.optimizer_zero_grad()
            self.engine.forward_backward_step(self.engine.shard_data(batch))
            self.engine.optimizer_step()


@pytest.fixture
async def house(tmp_path, request):
    torch.set_num_threads(1)
    model = str(make_tiny_model(tmp_path / "tiny"))
    engine = engine_class("fsdp2")(
        Fsdp2Config(model=ModelConfig(path=model), optimizer=OptimizerConfig(lr=1e-2)), World()
    )
    engine.init_model()
    engine.set_loss_fn(SftLoss())
    house = House(engine)
    replicas = []
    for index in range(request.param):
        replica = adapter_class("hf")(RolloutConfig(model_path=model, max_model_len=64))
        await replica.start()
        replicas.append(replica)
        await house.add(f"replica {index}", replica)
    yield house
    for replica in replicas:
        await replica.stop()


@pytest.mark.parametrize("house", [2], indirect=True)
async def test_two_that_agree_are_committed_and_two_that_differ_are_both_fenced_off(house):
    house.train()
    report = await house.manager.sync(1)
    assert sorted(report.members) == ["replica 0", "replica 1"]
    assert report.fenced == {}
    house.train()
    house.torn.add("replica 1")
    with pytest.raises(SyncFailed, match=r"canary: answers .* away from what is right"):
        await house.manager.sync(2)  # nobody can say which of two is right
    assert sorted(house.fenced) == ["replica 0", "replica 1"]


@pytest.mark.parametrize("house", [3], indirect=True)
async def test_one_of_three_that_differs_is_fenced_off_alone(house):
    house.train()
    house.torn.add("replica 1")
    report = await house.manager.sync(1)
    assert sorted(report.members) == ["replica 0", "replica 2"]
    assert "canary" in report.fenced["replica 1"]
    assert house.manager.members == ["replica 0", "replica 2"]


@pytest.mark.parametrize("house", [0], indirect=True)
async def test_only_ranks_that_send_are_given_weights(house):
    source = EngineWeights(house.engine)
    whole = dict(source.tensors())
    assert all(torch.equal(tensor, whole[name]) for name, tensor in source.tensors_on({0, 1}))
    assert [*source.tensors_on({1})] == [(name, None) for name in whole]
