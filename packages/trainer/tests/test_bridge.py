"""A real engine as the receiving end of a sync: what is under way at the flip, and the canary after it."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch

from offbeat_ckptsync import (
    CheckpointEngineManager,
    LocalSource,
    ModuleSource,
    Sender,
    SyncConfig,
    SyncFailed,
)
from offbeat_rollout import (
    EngineStateError,
    GenerateRequest,
    PauseMode,
    RolloutConfig,
    RolloutFeature,
    SamplingParams,
    UpdateRefused,
)
from offbeat_rollout.hf import HfEngine
from offbeat_rollout.interface import WorkerUpdates
from offbeat_rollout.testing import ScriptedRollout, make_tiny_model, wait_for_tokens
from offbeat_rollout.toolkit.registry import adapter_class
from offbeat_trainer.cluster.weights import SharedGate, canary_logprobs, make_member
from offbeat_trainer.errors import PlanRefused

VOCAB = 32
LENGTH = 480


@pytest.fixture
async def replicas(tmp_path):
    model = make_tiny_model(tmp_path / "tiny", vocab_size=VOCAB)
    config = RolloutConfig(model_path=str(model), max_model_len=512)
    made = [adapter_class("hf")(config) for _ in range(2)]
    for engine in made:
        await engine.start()
    yield made
    for engine in made:
        await engine.stop()


@pytest.mark.parametrize("recompute_kv", [False, True])
async def test_a_sync_keeps_keys_and_values_or_has_them_computed_anew(replicas, tmp_path, recompute_kv):
    import transformers

    replica = replicas[0]
    other = make_tiny_model(tmp_path / "other", seed=1, vocab_size=VOCAB)
    trained = transformers.AutoModelForCausalLM.from_pretrained(other).eval()
    config = SyncConfig(transport="loopback")
    manager = CheckpointEngineManager(LocalSource(Sender(ModuleSource(trained), config)), config)
    manager.add(await make_member("replica 0", replica, config, recompute_kv=recompute_kv))
    request = GenerateRequest(
        request_id="long", prompt_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=LENGTH, seed=3)
    )
    work = asyncio.create_task(replica.generate(request))
    await wait_for_tokens(replica)
    await replica.pause(PauseMode.KEEP)  # on a busy machine it would be over before the weights have come
    report = await manager.sync(1)
    assert report.worst_gap_s is not None
    assert (
        report.transfer_s + report.load_s <= report.worst_gap_s <= report.total_s
    )  # it stood still all the time
    await replica.resume()
    done = await work
    flip = done.policy_versions.tolist().index(1)
    assert list(done.policy_versions) == [0] * flip + [1] * (LENGTH - flip)
    assert 0 < flip < LENGTH
    with torch.no_grad():
        logits = trained(torch.tensor([[1, 2, 3, *done.token_ids.tolist()]])).logits[0, 2:-1].double()
    expected = logits.log_softmax(-1).gather(1, torch.tensor(done.token_ids.tolist())[:, None])[:, 0]
    gap = float((expected - torch.tensor(done.logprobs.tolist(), dtype=torch.float64))[flip:].abs().max())
    assert gap <= 1e-4 if recompute_kv else gap > 1e-2, gap


@pytest.mark.parametrize("transport", ["shm", "loopback"])
async def test_a_transformers_replica_serves_shared_memory_from_where_it_lies(replicas, tmp_path, transport):
    import transformers

    config = SyncConfig(transport=transport)
    request = {"prompt_ids": (1, 2, 3), "sampling": SamplingParams(max_tokens=4, temperature=0.0)}
    trained = transformers.AutoModelForCausalLM.from_pretrained(
        make_tiny_model(tmp_path / "other", seed=1, vocab_size=VOCAB)
    ).eval()
    sender = Sender(ModuleSource(trained), config)
    manager = CheckpointEngineManager(LocalSource(sender), config)
    for number, engine in enumerate(replicas):
        manager.add(await make_member(f"replica {number}", engine, config))
    own = [each._worker._model.get_input_embeddings().weight.data_ptr() for each in replicas]
    for version in (1, 2, 3):
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.mul_(1.01)
        await manager.sync(version)
        for engine, before in zip(replicas, own, strict=True):
            model = engine._worker._model
            assert (model.get_input_embeddings().weight.data_ptr() == before) == (transport == "loopback")
            assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
            for name, tensor in trained.state_dict().items():
                assert torch.equal(tensor, model.state_dict()[name]), name
            done = await engine.generate(GenerateRequest(request_id=f"{version}", **request))
            assert list(done.policy_versions) == [version] * len(done.policy_versions)
    sender.close()


class Refusing(HfEngine):
    """A Transformers engine that refuses its first update, whether it is to adopt or to load it."""

    refused = False

    def refuse(self):
        if not self.refused:
            self.refused = True
            raise UpdateRefused("planted")

    async def adopt(self, *update, **more):
        self.refuse()
        return await super().adopt(*update, **more)

    async def load(self, *update, **more):
        self.refuse()
        await super().load(*update, **more)


@pytest.mark.parametrize("transport", ["shm", "loopback"])
async def test_an_update_that_the_engine_refuses_leaves_it_a_member_with_its_old_weights(tmp_path, transport):
    import transformers

    path = make_tiny_model(tmp_path / "tiny", vocab_size=VOCAB)
    engine = Refusing(RolloutConfig(model_path=str(path), max_model_len=64))
    await engine.start()
    try:
        config = SyncConfig(transport=transport)
        sender = Sender(ModuleSource(transformers.AutoModelForCausalLM.from_pretrained(path)), config)
        manager = CheckpointEngineManager(LocalSource(sender), config)
        manager.add(await make_member("replica 0", engine, config))
        with pytest.raises(SyncFailed, match="planted"):
            await manager.sync(1)
        assert (engine.version, list(manager.members), manager.fenced) == (0, ["replica 0"], {})
        assert list((await manager.sync(1)).members) == ["replica 0"]
        assert engine.version == 1
        sender.close()
    finally:
        await engine.stop()


class Sleeper(HfEngine):
    """A Transformers engine that says it gives memory back when it sleeps; it writes down when it is told to."""

    def __init__(self, config):
        super().__init__(config)
        self.told = []

    @classmethod
    def capabilities(cls):
        return dataclasses.replace(super().capabilities(), sleep_devices=frozenset({"cpu"}))

    async def sleep(self, level):
        self.told.append(("sleep", self.version))
        await super().sleep(level)

    async def wake(self, tags=None):
        self.told.append((*tags, self.version))
        await super().wake(tags)


async def test_on_shared_devices_an_engine_sleeps_from_its_rest_to_the_next_flip(tmp_path):
    import transformers

    path = make_tiny_model(tmp_path / "tiny", vocab_size=VOCAB)
    trained = transformers.AutoModelForCausalLM.from_pretrained(path)
    config = SyncConfig(transport="loopback")
    manager = CheckpointEngineManager(LocalSource(Sender(ModuleSource(trained), config)), config)
    engine = Sleeper(RolloutConfig(model_path=path, max_model_len=64))
    await engine.start()
    try:
        gate = SharedGate(engine)
        manager.add(await make_member("replica 0", engine, config, shared=gate))
        await manager.sync(1)
        assert engine.told == [("sleep", 0), ("weights", 0), ("kv_cache", 1)]
        request = GenerateRequest(
            request_id="r", prompt_ids=(1, 2), sampling=SamplingParams(max_tokens=4, seed=3)
        )
        assert set((await engine.generate(request)).policy_versions) == {1}
        await gate.rest()
        await gate.rest()
        with pytest.raises(EngineStateError, match="sleeps"):
            await engine.generate(request)
        with torch.no_grad():
            trained.model.norm.weight.mul_(1.5)
        await manager.sync(2)
        assert engine.told[3:] == [("sleep", 1), ("weights", 1), ("kv_cache", 2)]
        assert set((await engine.generate(request)).policy_versions) == {2}
    finally:
        await engine.stop()


class InWorkers(WorkerUpdates):
    """Updates of an engine that loads weights in workers of its own; written down."""

    def __init__(self):
        self.calls = []

    async def specs(self):
        return []

    async def init(self, info):
        self.calls.append(("init", dict(info)))

    async def begin(self):
        self.calls.append(("begin",))

    async def update(self, request):
        self.calls.append(("update", dict(request)))

    async def finish(self, version=None, *, recompute_kv=False):
        self.calls.append(("finish", version, recompute_kv))

    async def close(self):
        self.calls.append(("close",))


class Controlled(ScriptedRollout):
    """An engine whose workers take the weights."""

    features = frozenset({RolloutFeature.PAUSE, RolloutFeature.RECOMPUTE_KV})

    def __init__(self):
        super().__init__(RolloutConfig(model_path=""))
        self.updates = InWorkers()

    @classmethod
    def capabilities(cls):
        return dataclasses.replace(super().capabilities(), features=cls.features)

    def weight_updates(self):
        return self.updates


class Forgetful(Controlled):
    features = frozenset({RolloutFeature.PAUSE})


@pytest.mark.parametrize("recompute_kv", [False, True])
async def test_an_engine_with_workers_is_told_with_the_version(recompute_kv):
    engine = Controlled()
    member = await make_member("r", engine, SyncConfig(), recompute_kv=recompute_kv)
    control = member._ranks._control
    await control("start", {})
    await control("update", {"bucket": 0})
    await control("finish", {"version": 3})
    await control("finish", {})
    assert engine.updates.calls == [
        ("begin",),
        ("update", {"bucket": 0}),
        ("finish", 3, recompute_kv),
        ("finish", None, recompute_kv),
    ]


async def test_who_declares_that_it_hands_weights_on_is_a_source_for_joiners_and_nobody_else(replicas):
    for engine in (replicas[0], Controlled()):
        member = await make_member("r", engine, SyncConfig())
        said = RolloutFeature.PEER_COPY in engine.capabilities().features
        assert (member.peer() is not None) == said, engine.capabilities().adapter
    assert "the trainer" in adapter_class("vllm").capabilities().missing[RolloutFeature.PEER_COPY]


async def test_who_cannot_compute_keys_and_values_again_is_refused():
    with pytest.raises(PlanRefused, match=r"scripted cannot compute keys and values again; .*partial=abort"):
        await make_member("r", Forgetful(), SyncConfig(), recompute_kv=True)


async def test_replicas_answer_alike_and_otherwise_after_a_sync(replicas, tmp_path):
    import transformers

    before = [await canary_logprobs(engine) for engine in replicas]
    assert before[0] == pytest.approx(before[1], abs=1e-5)
    assert len(before[0]) == 4
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tiny")
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.5)
    config = SyncConfig(transport="loopback", canary=True)
    manager = CheckpointEngineManager(LocalSource(Sender(ModuleSource(trained), config)), config)
    for number, engine in enumerate(replicas):
        manager.add(await make_member(f"replica {number}", engine, config))
    report = await manager.sync(1)
    assert (set(report.members), report.fenced) == ({"replica 0", "replica 1"}, {})
    after = await canary_logprobs(replicas[0])
    assert max(abs(a - b) for a, b in zip(after, before[0], strict=True)) > config.canary_tolerance
