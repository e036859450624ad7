"""An adapter that is sent alone: what the sampler answers with it, against the trainer and against a merged export.

Real engine, real replica, real manager, real transport, once with each rollout adapter.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import replace

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from offbeat_ckptsync import SyncConfig, SyncFailed
from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.ends.sender import LocalSource, Sender
from offbeat_ckptsync.testing import Fault, FaultyTransport
from offbeat_ckptsync.toolkit.config import make_transport
from offbeat_engine import (
    Fsdp2Config,
    LoraConfig,
    LoraExport,
    ModelConfig,
    OptimizerConfig,
    SftLoss,
    World,
    engine_class,
)
from offbeat_engine.testing import random_batch
from offbeat_rollout import GenerateRequest, SamplingParams
from offbeat_rollout import LoraConfig as ReplicaLora
from offbeat_rollout.testing import make_tiny_model, reference_logprobs
from offbeat_rollout.toolkit.registry import adapter_class, adapter_environment
from offbeat_trainer.cluster.weights import EngineWeights, make_member

pytest.importorskip("peft")

VOCAB = 96
PROMPT = (3, 14, 15, 9, 26, 5)
LORA = LoraConfig(rank=3, alpha=12.0, export=LoraExport.ADAPTER)
SYNC = SyncConfig(bucket_mib=0.01)


def make_engine(path, lora=LORA):
    config = Fsdp2Config(model=ModelConfig(path=path), optimizer=OptimizerConfig(lr=2e-2), lora=lora)
    engine = engine_class("fsdp2")(config, World())
    engine.init_model()
    engine.set_loss_fn(SftLoss())
    return engine


def train(engine, seed):
    batch = random_batch(8, seed=seed)
    with engine.train_mode():
        for _ in range(3):
            engine.optimizer_zero_grad()
            engine.forward_backward_step(engine.shard_data(batch))
            engine.optimizer_step()


class House:
    """One replica that holds the base, and engines that publish to it."""

    def __init__(self, path, replica, member, folder):
        self.path, self.replica, self.member, self.folder = path, replica, member, folder
        self.version = 0
        self.fault = Fault("corrupt", 0, times=0)
        self.senders = []

    async def publish(self, engine):
        transport = FaultyTransport(make_transport("broadcast", SYNC), on_send=self.fault)
        sender = Sender(EngineWeights(engine), SYNC, transport=transport)
        self.senders.append(sender)
        manager = CheckpointEngineManager(LocalSource(sender), SYNC)
        manager.add(self.member)
        report = await manager.sync(self.version + 1)
        self.version += 1
        return report

    async def answer(self, seed=1):
        return await self.replica.generate(
            GenerateRequest(
                request_id=uuid.uuid4().hex,
                prompt_ids=PROMPT,
                sampling=SamplingParams(max_tokens=24, seed=seed),
            )
        )

    def trained(self, engine):
        """Return peft's own model of what `engine` holds: the trainer's forward, adapter beside the base."""
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        folder = self.folder / uuid.uuid4().hex
        engine.export_huggingface(str(folder))
        base = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        return PeftModel.from_pretrained(base, folder).eval(), load_file(folder / "adapter_model.safetensors")


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["hf", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow])],
)
async def house(request, tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("adapter")
    path = make_tiny_model(folder / "base", vocab_size=VOCAB)
    config = adapter_class(request.param).Config(
        model_path=path,
        max_model_len=128,
        max_num_seqs=8,
        kv_cache_gib=0.25,
        lora=ReplicaLora(rank=LORA.rank, alpha=LORA.alpha),
    )
    saved = dict(os.environ)
    os.environ.update(adapter_environment(request.param, config))
    replica = adapter_class(request.param)(config)
    await replica.start()
    house = House(path, replica, await make_member("replica 0", replica, SYNC), folder)
    try:
        yield house
    finally:
        for sender in house.senders:
            sender.close()
        await replica.stop()
        os.environ.clear()
        os.environ.update(saved)


def difference(completion, model):
    expected = reference_logprobs(
        model, PROMPT, completion.token_ids.tolist(), SamplingParams(max_tokens=completion.num_tokens)
    )
    return max(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True))


async def test_before_the_first_sync_the_base_answers(house):
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(house.path, dtype=torch.float32)
    assert difference(await house.answer(), base) <= 1e-4


async def test_the_adapter_alone_travels_and_is_what_the_sampler_answers_with(house):
    engine = make_engine(house.path)
    before = await house.answer()
    for seed in (1, 2):
        train(engine, seed)
        report = await house.publish(engine)
        completion = await house.answer()
        model, adapter = house.trained(engine)
        assert difference(completion, model) <= 1e-4
        assert set(completion.policy_versions) == {house.version}
        assert completion.logprobs.tolist() != before.logprobs.tolist(), (
            "an adapter that changes nothing shows nothing"
        )
        before = completion
        # Bytes on the wire: A and B, each at the next multiple of 256, and no byte of the base.
        assert report.num_tensors == len(adapter)
        raw = sum(tensor.nbytes for tensor in adapter.values())
        assert raw <= report.num_bytes < raw + 256 * len(adapter)
        base = sum(tensor.nbytes for tensor in model.get_base_model().state_dict().values())
        assert report.num_bytes < base / 4


async def test_the_merged_export_gives_the_same_answers(house):
    engine = make_engine(house.path)
    train(engine, 3)
    await house.publish(engine)
    _, adapter = house.trained(engine)
    merged = make_engine(house.path, replace(LORA, export=LoraExport.MERGED))
    train(merged, 3)
    weights = dict(merged.named_weights())

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(house.path, dtype=torch.float32)
    model.load_state_dict({**model.state_dict(), **weights})
    assert difference(await house.answer(), model) <= 1e-4
    # And the two are one: the merged weight is the base plus what was sent.
    name = "model.layers.1.mlp.down_proj"
    base = AutoModelForCausalLM.from_pretrained(house.path, dtype=torch.float32).state_dict()[
        f"{name}.weight"
    ]
    a, b = (adapter[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    assert_close(weights[f"{name}.weight"], base + 4.0 * b @ a)


async def test_a_failure_before_the_flip_leaves_the_old_adapter_answering_bit_for_bit(house):
    engine = make_engine(house.path)
    train(engine, 4)
    await house.publish(engine)
    before = await house.answer()
    train(engine, 5)
    house.fault.left = 1
    with pytest.raises(SyncFailed, match="arrived with digest"):
        await house.publish(engine)
    after = await house.answer()
    assert (after.token_ids.tolist(), after.logprobs.tolist()) == (
        before.token_ids.tolist(),
        before.logprobs.tolist(),
    )
    await house.publish(engine)
    assert difference(await house.answer(), house.trained(engine)[0]) <= 1e-4


@pytest.mark.parametrize(
    ("lora", "named"),
    [
        (
            replace(LORA, rank=4),
            r"layers\.0\.mlp\.down_proj\.lora_A\.weight' has shape \(4, 128\), expected \(3, 128\)",
        ),
        (
            replace(LORA, targets=("q_proj",)),
            r"missing tensor 'base_model\.model\.model\.layers\.0\.mlp\.down_proj\.lora_A\.weight'",
        ),
        (
            replace(LORA, export=LoraExport.MERGED),
            r"unknown tensor 'model\.embed_tokens\.weight'|missing tensor",
        ),
    ],
)
async def test_another_rank_other_targets_and_whole_weights_are_refused_by_name(house, lora, named):
    before = await house.answer()
    with pytest.raises(SyncFailed, match=named):
        await house.publish(make_engine(house.path, lora))
    after = await house.answer()
    assert (after.token_ids.tolist(), after.logprobs.tolist()) == (
        before.token_ids.tolist(),
        before.logprobs.tolist(),
    )


async def test_a_request_in_flight_goes_on_under_the_new_adapter(house):
    import asyncio

    engine = make_engine(house.path)
    train(engine, 6)
    long = asyncio.create_task(
        house.replica.generate(
            GenerateRequest(
                request_id=uuid.uuid4().hex,
                prompt_ids=PROMPT,
                sampling=SamplingParams(max_tokens=120, seed=2),
            )
        ),
        name="long request",
    )
    await asyncio.sleep(0)
    before = house.version
    report = await house.publish(engine)
    done = await long
    assert done.num_tokens == 120
    assert set(done.policy_versions) <= {before, house.version}
    if house.version in done.policy_versions:
        assert report.worst_gap_s is not None
        assert 0 < report.worst_gap_s <= report.total_s
    assert (await house.publish(engine)).worst_gap_s is None  # nothing is under way
    assert difference(await house.answer(), house.trained(engine)[0]) <= 1e-4
