"""The canary of a real engine: it answers alike while the weights are the same, and otherwise when they are not."""

from __future__ import annotations

import pytest
import torch

from offbeat_ckptsync import (
    CheckpointEngineManager,
    LocalSource,
    ModuleSource,
    Publisher,
    SyncConfig,
)
from offbeat_engine.testing import make_tiny_model
from offbeat_rollout import RolloutConfig
from offbeat_rollout.registry import adapter_class
from offbeat_trainer.bridge import EngineCanary, make_member

VOCAB = 32


@pytest.fixture
async def replicas(tmp_path):
    model = make_tiny_model(tmp_path / "tiny", vocab_size=VOCAB)
    config = RolloutConfig(model_path=str(model), max_model_len=32)
    made = [adapter_class("hf")(config) for _ in range(2)]
    for engine in made:
        await engine.start()
    yield made
    for engine in made:
        await engine.stop()


async def test_replicas_answer_alike_and_otherwise_after_a_sync(replicas, tmp_path):
    import transformers

    before = [await EngineCanary(engine)() for engine in replicas]
    assert before[0] == pytest.approx(before[1], abs=1e-5)
    assert len(before[0]) == 4
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tiny")
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.5)
    config = SyncConfig(transport="loopback", canary=True)
    manager = CheckpointEngineManager(LocalSource(Publisher(ModuleSource(trained), config)), config)
    for number, engine in enumerate(replicas):
        manager.add(await make_member(f"replica {number}", engine, config))
    report = await manager.sync(1)
    assert (set(report.members), report.fenced) == ({"replica 0", "replica 1"}, {})
    after = await EngineCanary(replicas[0])()
    assert max(abs(a - b) for a, b in zip(after, before[0], strict=True)) > config.canary_tolerance
