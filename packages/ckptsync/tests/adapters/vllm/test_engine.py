"""Real vLLM on the CPU: syncs of different weights, checked against Transformers by log-probabilities."""

from __future__ import annotations

import asyncio
import json
import multiprocessing as mp
import os
import signal
import uuid
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
import torch

from dying_manager import MOMENTS, manage
from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.control.members import ControlMember
from offbeat_ckptsync.control.ranks import Mailbox
from offbeat_ckptsync.ends.sender import LocalSource, Sender
from offbeat_ckptsync.ends.sinks import ModuleSource
from offbeat_ckptsync.errors import SyncFailed
from offbeat_ckptsync.seams import GenerationGate
from offbeat_ckptsync.testing import Fault, FaultyTransport
from offbeat_ckptsync.toolkit.config import SyncConfig, make_transport
from offbeat_ckptsync.toolkit.threads import in_thread
from offbeat_ckptsync.toolkit.wire import encode

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
]

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8]
CONFIG = SyncConfig(bucket_mib=0.25)


class Source(ModuleSource):
    """A module's weights with names and tensors changed by a test."""

    def __init__(self, module):
        super().__init__(module)
        self.change = lambda named: named

    def manifest(self):
        from offbeat_ckptsync.ends.manifest import manifest_of

        return manifest_of(self.tensors())

    def tensors(self):
        yield from self.change(dict(super().tensors())).items()


class LocalSync(GenerationGate):
    """vLLM behind a `ControlMember`, Transformers as source and reference."""

    def __init__(self, llm, model, mailbox):
        self.llm = llm
        self.model = model
        self.source = Source(model)
        self.fault = Fault("corrupt", 0, times=0)
        transport = FaultyTransport(make_transport("broadcast", CONFIG), on_send=self.fault)
        self.sender = Sender(self.source, CONFIG, transport=transport)
        self.version = 0
        self.begin_anew(mailbox)

    def begin_anew(self, mailbox):
        self.manager = CheckpointEngineManager(LocalSource(self.sender), CONFIG)
        self.manager.add(ControlMember("vllm-0", self.control, mailbox=mailbox, config=CONFIG, gate=self))

    async def control(self, op, payload):
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        match op:
            case "start":
                await self.llm.start_weight_update()
            case "update":
                await self.llm.update_weights(WeightTransferUpdateRequest(update_info=payload))
            case "finish":
                version = payload.get("version")
                await self.llm.finish_weight_update(None if version is None else str(version))

    async def pause(self):
        await self.llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self):
        await self.llm.resume_generation()

    async def sync(self):
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        return await self.sync_again()

    async def sync_again(self):
        report = await self.manager.sync(self.version + 1)
        self.version += 1
        return report

    async def generate(self, max_tokens=12, begun=None):
        from vllm import SamplingParams

        params = SamplingParams(temperature=1.0, seed=1, max_tokens=max_tokens, logprobs=0, ignore_eos=True)
        last = None
        async for output in self.llm.generate({"prompt_token_ids": PROMPT}, params, uuid.uuid4().hex):
            last = output.outputs[0]
            if begun is not None:
                begun.set()
        return last

    async def logprobs(self):
        out = await self.generate()
        ids = list(out.token_ids)
        return ids, torch.tensor([step[token].logprob for step, token in zip(out.logprobs, ids, strict=True)])

    def reference(self, ids):
        with torch.no_grad():
            logits = self.model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]

    async def assert_serves_the_model(self):
        ids, got = await self.logprobs()
        assert (got - self.reference(ids)).abs().max() <= 1e-4


@asynccontextmanager
async def serving(folder, config, num_ranks=1):
    """Serve a model of `config`, which is written to `folder`."""
    # By itself vLLM gives each of several workers a NUMA node of its own, and refuses where there are fewer.
    binding = {} if num_ranks == 1 else {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    saved = dict(os.environ)
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "WARNING",
        **binding,
    }  # fmt: skip
    from transformers import AutoModelForCausalLM
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    args = AsyncEngineArgs(
        model=str(folder), dtype="float32", max_model_len=512, enforce_eager=True, skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs", weight_transfer_config=WeightTransferConfig(backend="offbeat"),
        enable_prefix_caching=False, tensor_parallel_size=num_ranks,
    )  # fmt: skip
    llm = AsyncLLM.from_engine_args(args)
    made = LocalSync(llm, model, Mailbox())
    try:
        yield made
    finally:
        made.sender.close()
        llm.shutdown(timeout=20.0)  # else its ranks are killed, and leave what they share
        os.environ.clear()
        os.environ.update(saved)


SHAPE = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[1, pytest.param(2, marks=pytest.mark.deep)],
    ids=["one_rank", "two_ranks"],
)
async def local(request, tmp_path_factory):
    from transformers import Qwen2Config

    config = Qwen2Config(**SHAPE, tie_word_embeddings=True)
    async with serving(tmp_path_factory.mktemp("tiny"), config, request.param) as made:
        yield made


@pytest.mark.parametrize("expert_size", [64, pytest.param(48, marks=pytest.mark.deep)])
async def test_experts_are_served_as_they_were_sent(tmp_path, expert_size):
    """On a CPU vLLM prepacks them, and of 48 channels fills up what its kernel lacks; updates must come by the same way."""
    from transformers import Qwen3MoeConfig
    from transformers.core_model_loading import revert_weight_conversion

    config = Qwen3MoeConfig(
        **SHAPE,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=expert_size,
        initializer_range=0.1,
    )
    async with serving(tmp_path, config) as made:
        made.source.change = lambda named: revert_weight_conversion(made.model, named)
        await made.assert_serves_the_model()
        for _ in range(2):
            await made.sync()
            await made.assert_serves_the_model()


async def test_several_versions_are_each_served_as_transformers_computes_them(local):
    await local.assert_serves_the_model()
    for _ in range(4):
        report = await local.sync()
        await local.assert_serves_the_model()
        assert await local.llm.get_weight_version() == str(report.version)
        print(f"total {report.total_s:.4f} pause {report.pause_s:.4f} load {report.load_s:.4f} begin {report.begin_s:.4f} "
              f"transfer {report.transfer_s:.4f} flip {report.flip_s:.4f}")  # fmt: skip


async def test_a_request_in_flight_survives_a_sync_and_says_which_tokens_are_whose(local):
    before = local.version
    begun = asyncio.Event()
    running = asyncio.create_task(local.generate(max_tokens=400, begun=begun), name="long request")
    await begun.wait()
    report = await local.sync()
    assert not running.done(), "the request was to be in flight during the sync"
    out = await running
    assert len(out.token_ids) == 400
    print("pause_s", report.pause_s, "spans", out.weight_versions)
    assert out.weight_versions[-1].version == str(report.version)
    assert len(out.weight_versions) == 2, f"{before} then {report.version}: {out.weight_versions}"
    await local.assert_serves_the_model()


def renamed(named):
    return {
        name.replace("layers.1.mlp.up_proj", "layers.1.mlp.upward"): tensor for name, tensor in named.items()
    }


def missing(named):
    return {name: tensor for name, tensor in named.items() if name != "model.norm.weight"}


def reshaped(named):
    return {**named, "model.norm.weight": torch.ones(129)}


def cast(named):
    return {**named, "model.norm.weight": named["model.norm.weight"].to(torch.bfloat16)}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (renamed, "unknown tensor 'model.layers.1.mlp.upward.weight'"),
        (missing, "missing tensor 'model.norm.weight'"),
        (reshaped, r"'model.norm.weight' has shape \(129,\), expected \(128,\)"),
        (cast, "'model.norm.weight' has dtype bfloat16, expected float32"),
    ],
)
async def test_weights_that_do_not_fit_are_refused_by_name_and_the_old_version_answers(local, change, named):
    await refused(local, lambda: setattr(local.source, "change", change), named)


async def test_a_flipped_byte_is_refused_and_the_old_version_answers(local):
    await refused(local, lambda: setattr(local.fault, "left", 1), "bucket 0 .* arrived with digest")


async def test_a_line_that_is_cut_leaves_the_old_version_answering(local):
    local.fault.kind = "die"
    await refused(local, lambda: setattr(local.fault, "left", 1), "bucket 0|could not be received")
    local.fault.kind = "corrupt"


async def refused(local, plant, named):
    ids, before = await local.logprobs()
    plant()
    with pytest.raises(SyncFailed, match=named) as caught:
        await local.sync()
    assert caught.value.served == {"vllm-0": local.version}
    after_ids, after = await local.logprobs()
    assert (after_ids, after.tolist()) == (ids, before.tolist()), "the old version answers bit for bit"
    local.source.change = lambda named: named
    await local.sync_again()
    await local.assert_serves_the_model()


async def serve(local, pipe, process, moment):
    """Do what a manager in another process asks of the engine, until it is dead."""
    while True:
        try:
            word, *given = json.loads(await in_thread(pipe.recv_bytes, name="manager asks"))
        except EOFError:
            return
        if moment == "begin" and word == "control" and given[1].get("op") == "begin":
            await in_thread(process.join, name="death")  # so the ranks have nobody left to answer
        failure = ""
        try:
            await getattr(local, word)(*given)
        except Exception as error:  # noqa: BLE001 -- told to who asked
            failure = repr(error)
        try:
            pipe.send_bytes(json.dumps(failure).encode())
        except OSError:
            return


@pytest.mark.deep
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_manager_that_is_killed_leaves_an_engine_that_the_next_one_syncs(local, tmp_path, moment):
    local.model.save_pretrained(tmp_path)
    before = await local.logprobs()
    context = mp.get_context("spawn")
    pipe, far = context.Pipe()
    settings = json.dumps(encode(CONFIG))
    process = context.Process(target=manage, args=(far, str(tmp_path), settings, local.version + 1, moment))
    process.start()
    far.close()
    await serve(local, pipe, process, moment)
    await in_thread(process.join, name="death")
    assert process.exitcode == -signal.SIGKILL
    if moment == "flip":
        local.version += 1  # it is served, paused and uncommitted
    else:
        ids, after = await local.logprobs()
        assert (ids, after.tolist()) == (before[0], before[1].tolist()), "the old version answers bit for bit"
    local.begin_anew(Mailbox())
    for _ in range(2):
        report = await local.sync()
        assert await local.llm.get_weight_version() == str(report.version)
        await local.assert_serves_the_model()
