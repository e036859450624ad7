"""A run's syncs into one real SGLang server as GPUs have it: scheduling overlaps, few requests have room, and others are aborted."""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from offbeat_ckptsync import CheckpointEngineManager, LocalSource, ModuleSource, Sender, SyncConfig
from offbeat_ckptsync.toolkit.config import make_transport
from offbeat_rollout import Finish, GenerateRequest, SamplingParams
from offbeat_rollout.sglang import SglangConfig, SglangEngine
from offbeat_rollout.sglang.running import Running
from offbeat_rollout.sglang.server import SglangUpdates
from offbeat_rollout.testing import make_tiny_model, reference_logprobs, wait_for_tokens
from offbeat_trainer.cluster.weights import make_member

pytestmark = [pytest.mark.vllm, pytest.mark.sglang, pytest.mark.deep]

SYNC = SyncConfig(transport="loopback", bucket_mib=0.01)
PROMPT, NUM_TOKENS = (3, 4, 5), 230


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(tmp_path_factory):
    path = make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", tie_word_embeddings=False)
    engine = SglangEngine(
        SglangConfig(
            model_path=path,
            max_model_len=256,
            max_num_seqs=64,
            kv_cache_gib=0.0001,
            start_timeout_s=800,
            server_args={"disable_overlap_schedule": False, "schedule_conservativeness": 0.05},
        )
    )
    await engine.start()
    yield engine
    await engine.stop()


class Trained:
    """A model that changes, and what it was at each version."""

    def __init__(self, path):
        self.model = AutoModelForCausalLM.from_pretrained(path).eval()
        self.was = [self.state()]

    def state(self):
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def train(self):
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        self.was.append(self.state())

    def gap(self, done):
        """Return the largest difference between a log-prob and that of the model its version names, on all tokens before it."""
        found, sampling = [0.0], SamplingParams(max_tokens=NUM_TOKENS)
        for version in {int(version) for version in done.policy_versions}:
            self.model.load_state_dict(self.was[version])
            expected = reference_logprobs(self.model, PROMPT, done.token_ids.tolist(), sampling)
            named = zip(done.logprobs, expected, done.policy_versions, strict=True)
            found += [abs(one - other) for one, other, told in named if told == version]
        self.model.load_state_dict(self.was[-1])
        return max(found)


def begin(engine, names):
    return [
        asyncio.create_task(
            engine.generate(
                GenerateRequest(
                    request_id=name,
                    prompt_ids=PROMPT,
                    sampling=SamplingParams(max_tokens=NUM_TOKENS, seed=seed),
                )
            )
        )
        for seed, name in enumerate(names)
    ]


async def test_every_token_is_of_its_version_and_no_replica_is_lost_by_syncs_beside_aborts(
    engine, monkeypatch
):
    take, retractions = Running.take, {}

    def noted(self, said):
        retractions[self.request.request_id] = said.get("meta_info", {}).get("num_retractions") or 0
        return take(self, said)

    monkeypatch.setattr(Running, "take", noted)
    trained = Trained(engine.config.model_path)
    for turn, by in enumerate(("files", "tensors", "group", "files")):
        monkeypatch.setattr(SglangUpdates, "way", by)
        sender = Sender(ModuleSource(trained.model), SYNC, transport=make_transport("loopback", SYNC))
        manager = CheckpointEngineManager(LocalSource(sender), SYNC)
        manager.add(await make_member("replica", engine, SYNC, recompute_kv=turn % 2 == 1))
        names = [f"full{turn}-{number}" for number in range(24)]
        tasks = begin(engine, names)
        await wait_for_tokens(engine, 200 + 300 * turn)
        trained.train()
        await asyncio.gather(manager.sync(turn + 1), engine.abort(names[::3]))
        assert manager.members == ["replica"]
        await wait_for_tokens(engine, 400)
        await engine.abort(names[1::3])
        found = await asyncio.gather(*tasks)
        assert {done.finish for done in found[2::3]} == {Finish.LENGTH}
        assert max(trained.gap(done) for done in found) <= 1e-4
        assert any({turn, turn + 1} == set(done.policy_versions.tolist()) for done in found)
    # A pause retracts, too: the same load without one shows that the cache was full.
    alone = [f"alone{number}" for number in range(24)]
    await asyncio.gather(*begin(engine, alone))
    assert max(retractions[name] for name in alone) >= 1, "keys and values were never full"
    assert (await engine.health()).ok
