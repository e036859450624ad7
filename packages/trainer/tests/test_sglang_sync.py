"""Weights for a real SGLang server: through the rollout adapter, as a run sends them, and by offbeat-ckptsync's own member."""

from __future__ import annotations

import itertools

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from offbeat_ckptsync import (
    CheckpointEngineManager,
    LocalSource,
    ModuleSource,
    Sender,
    SyncConfig,
    SyncFailed,
)
from offbeat_ckptsync.adapters.sglang import Loading, PauseMode, SglangMember, SglangServer, Way
from offbeat_ckptsync.adapters.sglang import member as member_module
from offbeat_ckptsync.ends.manifest import manifest_of
from offbeat_ckptsync.testing import Fault, FaultyTransport
from offbeat_ckptsync.toolkit.config import make_transport
from offbeat_ckptsync.transports.rendezvous import gpu_uuid
from offbeat_rollout import EngineStateError, GenerateRequest, SamplingParams
from offbeat_rollout.sglang import SglangConfig, SglangEngine
from offbeat_rollout.sglang.server import SglangUpdates
from offbeat_rollout.testing import make_tiny_model, reference_logprobs
from offbeat_trainer.cluster.weights import make_member

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.deep,
    pytest.mark.sglang,
]

SYNC = SyncConfig(transport="loopback", bucket_mib=0.01)
PROMPT = (3, 4, 5)
ids = itertools.count()


class House:
    """A server, a trainer's model that changes, and what the two say of the same tokens."""

    def __init__(self, path, engine):
        self.engine, self.model = engine, AutoModelForCausalLM.from_pretrained(path).eval()
        self.server = SglangServer(engine._server.url, api_key=engine._server.key)
        self.version = 0

    def manager(self, *members, fault=None):
        sent = make_transport("loopback", SYNC)
        transport = FaultyTransport(sent, on_send=Fault("corrupt", 0, times=0) if fault is None else fault)
        manager = CheckpointEngineManager(
            LocalSource(Sender(ModuleSource(self.model), SYNC, transport=transport)), SYNC
        )
        for member in members:
            manager.add(member)
        return manager

    def train(self):
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))

    async def sync(self, manager):
        self.train()
        self.version += 1
        return await manager.sync(self.version)

    async def gap(self):
        """Return how far the server's log-probs are from those of the trainer's model, and the version it names."""
        sampling = SamplingParams(max_tokens=24, seed=1)
        done = await self.engine.generate(
            GenerateRequest(request_id=f"a{next(ids)}", prompt_ids=PROMPT, sampling=sampling)
        )
        expected = reference_logprobs(self.model, PROMPT, done.token_ids.tolist(), sampling)
        return max(abs(a - b) for a, b in zip(done.logprobs, expected, strict=True)), set(
            done.policy_versions
        )


DEVICES = [
    pytest.param(("cpu", 1), id="one rank"),
    pytest.param(("cpu", 2), id="two ranks"),
    # Never run: no GPU was there. The server takes the first, and whoever sends over NCCL the last.
    pytest.param(("cuda", 1), id="one GPU", marks=pytest.mark.gpu(2)),
    pytest.param(("cuda", 2), id="two GPUs", marks=pytest.mark.gpu(3)),
]


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=DEVICES)
async def house(request, tmp_path_factory):
    device, num_ranks = request.param
    path = make_tiny_model(
        tmp_path_factory.mktemp("model") / "tiny",
        tie_word_embeddings=False,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    engine = SglangEngine(
        SglangConfig(
            model_path=path,
            max_model_len=128,
            kv_cache_gib=0.1,
            start_timeout_s=800,
            device=device,
            gpu_memory_fraction=0.2,
            tensor_parallel_size=num_ranks,
        )
    )
    await engine.start()
    yield House(path, engine)
    await engine.stop()


@pytest.mark.parametrize("by", [*Way])
async def test_a_run_s_syncs_are_served_version_by_version(house, monkeypatch, by):
    if by is Way.GROUP and house.engine.config.device == "cuda":
        pytest.skip("NCCL sends from a GPU that is none of the server's")
    monkeypatch.setattr(SglangUpdates, "way", str(by))
    manager = house.manager(await make_member("replica 0", house.engine, SYNC))
    for _ in range(3):
        report = await house.sync(manager)
        gap, versions = await house.gap()
        assert gap <= 1e-4
        assert versions == {house.version} == {house.engine.version}
        assert report.members["replica 0"].load_s > 0
    assert not any(house.engine._server.memory.iterdir()), "what was loaded is removed"


async def test_a_replica_that_did_not_load_what_it_was_sent_serves_no_more(house, monkeypatch):
    """What is planted: between our look at the file and the server's, a bit of it flips."""
    load = SglangServer.load

    def spoilt(self, folder, *how, **more):
        weights = load_file(f"{folder}/model.safetensors")
        weights["model.norm.weight"].view(torch.int32)[7] ^= 1
        save_file(weights, f"{folder}/model.safetensors", {"format": "pt"})
        load(self, folder, *how, **more)

    manager = house.manager(await make_member("replica 0", house.engine, SYNC))
    with monkeypatch.context() as patch:
        patch.setattr(SglangServer, "load", spoilt)
        with pytest.raises(SyncFailed, match=r"does not hold what it was given: 1 parameters, .*model\.norm"):
            await house.sync(manager)
    assert not (await house.engine.health()).ok
    with pytest.raises(EngineStateError, match=f"an update to version {house.version} failed"):
        await house.gap()
    house.engine._requests.failure = ""  # for the next tests: nobody else can make it whole
    await house.engine.resume()
    await house.sync(house.manager(await make_member("replica 0", house.engine, SYNC)))
    assert (await house.gap())[0] <= 1e-4


async def test_a_flipped_byte_is_refused_and_the_old_version_serves_on(house):
    fault = Fault("corrupt", 0, times=1)
    manager = house.manager(await make_member("replica 0", house.engine, SYNC), fault=fault)
    before = {name: tensor.clone() for name, tensor in house.model.state_dict().items()}
    served = house.version
    with pytest.raises(SyncFailed, match="arrived with digest"):
        await house.sync(manager)
    trained = {name: tensor.clone() for name, tensor in house.model.state_dict().items()}
    house.model.load_state_dict(before)
    gap, versions = await house.gap()
    assert gap <= 1e-4
    assert versions == {served}
    house.model.load_state_dict(trained)
    await house.sync(manager)
    assert (await house.gap())[0] <= 1e-4


def ways_from(engine, by):
    """Where a member sends from, and what it knows of the server's devices."""
    ranks = engine.config.tensor_parallel_size
    if engine.config.device == "cpu" or by is Way.FILES:
        return {}
    sender = torch.cuda.device_count() - 1 if by is Way.GROUP else 0
    return {"device": f"cuda:{sender}", "gpus": tuple(gpu_uuid(index) for index in range(ranks))}


def member(house, folder, **loading):
    loading |= ways_from(house.engine, loading["by"])
    transport = make_transport("loopback", SYNC)
    # The folder that the adapter had the server load from is there no more.
    expected = manifest_of(house.model.named_parameters())
    loading = Loading(folder=folder / "weights", expected=expected, **loading)
    return SglangMember("sglang-0", house.server, transport, SYNC, loading)


@pytest.mark.parametrize("pause_mode", [*PauseMode])
@pytest.mark.parametrize("by", [*Way])
async def test_the_member_s_server_holds_what_was_sent(house, tmp_path, by, pause_mode):
    manager = house.manager(member(house, tmp_path, by=by, pause_mode=pause_mode))
    for _ in range(2):
        await house.sync(manager)
        gap, versions = await house.gap()
        assert gap <= 1e-4
        assert versions == {house.version}


async def test_a_name_that_sglang_does_not_know_is_a_success_to_it_and_none_to_the_member(
    house, tmp_path, monkeypatch
):
    in_parts = member_module.in_parts

    def renamed(whole, *how):
        return in_parts(
            {name + "s" * (name == "model.norm.weight"): tensor for name, tensor in whole.items()}, *how
        )

    manager = house.manager(member(house, tmp_path, by=Way.TENSORS))
    with monkeypatch.context() as patch:
        patch.setattr(member_module, "in_parts", renamed)
        with pytest.raises(
            SyncFailed, match=r"does not hold what it was given: 1 parameters, .*'model\.norm\.weight'"
        ):
            await house.sync(manager)
    assert manager.members == []
    assert house.server.model_info(60)[0] == str(house.version), (
        "the server says that it serves the new version"
    )
