#!/usr/bin/env python3
"""The pause and the worst gap between two tokens while vLLM takes new weights: through us, or by its own cycle.

    uv run tools/bench/sync_vllm.py offbeat|native|small OUT.json [smallest]

`sync.py` runs this once per side, each in a process of its own. Two sides get the same model of about 100 MB, the same
eight requests in flight and the same number of updates. `small` is ours with the demo's model and nothing in flight: what
one sync of a synchronous run costs at least.
"""

# vLLM types its interface in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
import time
import uuid
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import native_gloo
import torch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

NUM_REQUESTS = 8
NUM_UPDATES = 8
NUM_SMALL_UPDATES = 20
FIRST_S, BETWEEN_S = 3.0, 1.0  # steady generation before the first update, and between two
MAX_TOKENS = 8000
LARGE = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 30,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
SMALL = {
    "vocab_size": 17, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 3, "num_key_value_heads": 3,
}  # fmt: skip
SHAPES = {"offbeat": LARGE, "native": LARGE, "small": SMALL}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # as a replica has it: the worker runs inside the engine's process
}  # fmt: skip


def main() -> int:
    """Measure one side and write the answer."""
    side, out = sys.argv[1], Path(sys.argv[2])
    smallest = "smallest" in sys.argv[3:]
    with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as scratch:
        model = _make_model(Path(scratch) / "model", SMALL if smallest else SHAPES[side])
        plugin = _plugin_folder(Path(scratch) / "plugin")
        os.environ |= ENVIRONMENT
        os.environ["PYTHONPATH"] = os.pathsep.join([str(plugin), str(Path(__file__).parent)])
        out.write_text(
            json.dumps(asyncio.run(_measure(side, model, Path(scratch) / "model", smallest=smallest)))
        )
    return 0


def _make_model(folder: Path, shape: dict[str, int]) -> torch.nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config.from_dict({"max_position_embeddings": 8192, "tie_word_embeddings": True, **shape})
    model = Qwen2ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def _plugin_folder(folder: Path) -> Path:
    """Make a folder that, on the import path, names `native_gloo.register` among vLLM's plugins."""
    about = folder / "bench_native-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: bench-native\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nbench_native = native_gloo:register\n")
    return folder


async def _measure(side: str, model: torch.nn.Module, folder: Path, *, smallest: bool) -> dict[str, object]:
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.v1.engine import utils
    from vllm.v1.engine.async_llm import AsyncLLM

    from offbeat_rollout.vllm.processes import Forking

    utils.get_mp_context = Forking  # as a replica has it: vLLM is imported once
    backend = native_gloo.BACKEND if side == "native" else "offbeat"
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)  # this process checks the name, too
    args = AsyncEngineArgs(
        model=str(folder), dtype="float32", max_model_len=8192, max_num_seqs=NUM_REQUESTS, enforce_eager=True,
        skip_tokenizer_init=True, weight_transfer_config=WeightTransferConfig(backend=backend),
        enable_prefix_caching=False,
    )  # fmt: skip
    llm = AsyncLLM.from_engine_args(args)
    try:
        update = await (_native(llm, model) if side == "native" else _ours(llm, model))
        if side == "small":
            return await _rest(model, update, 1 if smallest else NUM_SMALL_UPDATES)
        if smallest:
            return await _watch(llm, model, update, 1, first_s=0.5, between_s=0.2)
        return await _watch(llm, model, update, NUM_UPDATES)
    finally:
        llm.shutdown()


async def _watch(
    llm: Any,  # noqa: ANN401 -- vLLM's
    model: torch.nn.Module,
    update: Callable[[int], Awaitable[float]],
    num_updates: int,
    first_s: float = FIRST_S,
    between_s: float = BETWEEN_S,
) -> dict[str, object]:
    """Generate, update now and then, and time both; `update(version)` returns the seconds generation stood still."""
    times: list[list[float]] = [[] for _ in range(NUM_REQUESTS)]
    tasks = [asyncio.create_task(_generate(llm, seen), name=f"request {i}") for i, seen in enumerate(times)]
    await asyncio.sleep(first_s)
    steady = _worst_gap(times, time.perf_counter() - first_s / 2, time.perf_counter())
    pauses: list[float] = []
    gaps: list[float] = []
    took: list[float] = []
    for version in range(1, num_updates + 2):
        _change(model)
        begun = time.perf_counter()
        pauses.append(await update(version))
        took.append(time.perf_counter() - begun)
        await asyncio.sleep(between_s / 2)
        gaps.append(_worst_gap(times, begun, time.perf_counter()))
        if any(task.done() for task in tasks):
            raise RuntimeError("a request ended before the last update; raise MAX_TOKENS")
        await asyncio.sleep(between_s / 2)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    # The first update makes connections and touches fresh memory.
    return {
        "pause_ms": median(pauses[1:]) * 1e3, "worst_gap_ms": median(gaps[1:]) * 1e3,
        "pauses_ms": [pause * 1e3 for pause in pauses], "worst_gaps_ms": [gap * 1e3 for gap in gaps],
        "update_ms": median(took[1:]) * 1e3, "updates_ms": [each * 1e3 for each in took],
        "steady_gap_ms": steady * 1e3, "tokens": sum(map(len, times)), "requests": NUM_REQUESTS,
    }  # fmt: skip


async def _rest(model: torch.nn.Module, update: Any, num_updates: int) -> dict[str, object]:  # noqa: ANN401 -- vLLM's
    """Update a replica that nobody asks anything, and time that; `update(version)` as for `_watch`."""
    took: list[float] = []
    for version in range(1, num_updates + 2):
        _change(model)
        begun = time.perf_counter()
        await update(version)
        took.append(time.perf_counter() - begun)
        await asyncio.sleep(BETWEEN_S / 10)
    return {"update_ms": median(took[1:]) * 1e3, "updates_ms": [each * 1e3 for each in took]}


async def _generate(llm: Any, seen: list[float]) -> None:  # noqa: ANN401 -- vLLM's
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=1.0, max_tokens=MAX_TOKENS, ignore_eos=True, output_kind=RequestOutputKind.DELTA,
        detokenize=False,
    )  # fmt: skip
    async for _ in llm.generate({"prompt_token_ids": [3, 14, 15, 9, 26, 5, 35, 8]}, params, uuid.uuid4().hex):
        seen.append(time.perf_counter())  # noqa: PERF401 -- the watcher reads while it grows


def _worst_gap(times: list[list[float]], since: float, until: float) -> float:
    """Return the longest time between two tokens of one request that touches [since, until]."""
    worst = 0.0
    for seen in times:
        ends = [*seen, until]
        worst = max([worst, *(b - a for a, b in pairwise(ends) if b > since)])
    return worst


def _change(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=1e-3)


async def _ours(llm: Any, model: torch.nn.Module) -> Any:  # noqa: ANN401 -- vLLM's
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    from offbeat_ckptsync import (
        CheckpointEngineManager,
        ControlMember,
        LocalSource,
        Mailbox,
        ModuleSource,
        Sender,
        SyncConfig,
    )
    from offbeat_ckptsync.seams import GenerationGate

    class Gate(GenerationGate):
        async def pause(self) -> None:  # as the adapter of offbeat-rollout does
            await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)

        async def resume(self) -> None:
            await llm.resume_generation()

    async def control(op: str, payload: dict[str, object]) -> None:
        match op:
            case "start":
                await llm.start_weight_update()
            case "update":
                await llm.update_weights(WeightTransferUpdateRequest(update_info=payload))
            case _:
                version = payload.get("version")
                await llm.finish_weight_update(None if version is None else str(version))

    config = SyncConfig(transport="auto", bucket_mib=8.0)
    manager = CheckpointEngineManager(LocalSource(Sender(ModuleSource(model), config)), config)
    manager.add(ControlMember("vllm", control, mailbox=Mailbox(), config=config, gate=Gate()))

    async def update(version: int) -> float:
        return (await manager.sync(version)).pause_s

    return update


async def _native(llm: Any, model: torch.nn.Module) -> Any:  # noqa: ANN401 -- vLLM's
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

    from offbeat_ckptsync import ModuleSource

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    joining = asyncio.create_task(asyncio.to_thread(native_gloo.group, "127.0.0.1", port, 0), name="group")
    await llm.init_weight_transfer_engine(
        WeightTransferInitRequest(init_info={"host": "127.0.0.1", "port": port})
    )
    gloo = await joining
    tensors = [*ModuleSource(model).tensors()]
    about = {
        "names": [name for name, _ in tensors],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
        "shapes": [list(tensor.shape) for _, tensor in tensors],
    }

    def send() -> None:
        for _, tensor in tensors:
            gloo.broadcast(tensor, 0).wait()

    async def update(version: int) -> float:
        mark = time.perf_counter()
        await llm.pause_generation(mode="keep", clear_cache=False)
        await llm.start_weight_update()
        sending = asyncio.create_task(asyncio.to_thread(send), name="broadcast")
        await llm.update_weights(WeightTransferUpdateRequest(update_info=about))
        await sending
        await llm.finish_weight_update(str(version))
        await llm.resume_generation()
        return time.perf_counter() - mark

    return update


if __name__ == "__main__":
    sys.exit(main())
