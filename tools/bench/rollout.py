#!/usr/bin/env python3
"""Tokens per second of the generation adapters over those of the bare engine, in interleaved pairs.

    uv run tools/bench/rollout.py --json [--only vllm,sglang,seeds] [--pairs 9] [--requests 128] [--tokens 64]

Both sides get the same model and the same requests, all at once: prompts of 16 tokens, a fixed number of new ones, a seed each, the
drawn token's log-prob with every token. Of vLLM the bare side is an `AsyncLLM` of its own beside the adapter's, with vLLM's
defaults but for what both need (dtype, lengths, threads, cache memory). Of SGLang it is the adapter's own server, asked by a plain HTTP
client, one `/generate` a request, which is told of the end only. The two sides take turns, the first of a pair changes; `ratio` is
the median of the pairs' ratios, and the first pair does not count. `missed` names the adapters below `AIM`.

`seeds` says what it costs that SGLang honours them: an adapter with `deterministic` over one without.
"""

# vLLM types its interface in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, cast

from runner import guarded
from workload import SHAPES, Work, make_model

from offbeat_rollout import GenerateRequest, RolloutEngine, SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from offbeat_rollout.sglang import SglangEngine

AIM = 0.9
PROMPT_TOKENS = 16
CONTEXT = 512
Side = Callable[[list[GenerateRequest]], Awaitable[int]]
"""Completes all requests, and returns how many tokens that made."""

Sides = dict[str, Side]
"""Two of them by their names; speeds of the first are told over those of the second."""


def make_requests(round_: int, count: int, num_tokens: int) -> list[GenerateRequest]:
    """Return the requests of one round; both sides get the same."""
    dice = random.Random(round_)
    vocab = SHAPES["medium"].vocab
    return [
        GenerateRequest(
            request_id=f"{round_}-{i}",
            prompt_ids=tuple(dice.randrange(2, vocab) for _ in range(PROMPT_TOKENS)),
            sampling=SamplingParams(max_tokens=num_tokens, seed=dice.getrandbits(32)),
        )
        for i in range(count)
    ]


def of_adapter(engine: RolloutEngine) -> Side:
    """Return the side that asks `engine`."""

    async def side(requests: list[GenerateRequest]) -> int:
        return sum(done.num_tokens for done in await engine.generate_many(requests))

    return side


def sglang_engine(folder: str, num_requests: int, *, deterministic: bool = True) -> SglangEngine:
    """Return one that is not started yet."""
    from offbeat_rollout.sglang import SglangConfig, SglangEngine

    return SglangEngine(
        SglangConfig(
            model_path=folder,
            max_model_len=CONTEXT,
            max_num_seqs=num_requests,
            deterministic=deterministic,
            start_timeout_s=900,
        )
    )


@asynccontextmanager
async def sglang(folder: str, num_requests: int) -> AsyncGenerator[Sides]:
    """Give the adapter, and a plain client of its server."""
    from aiohttp import ClientSession, TCPConnector

    engine = sglang_engine(folder, num_requests)
    await engine.start()

    async def one(session: ClientSession, request: GenerateRequest) -> int:
        sampling = request.sampling
        told = {"max_new_tokens": sampling.max_tokens, "temperature": 1.0, "sampling_seed": sampling.seed}
        body = {"input_ids": list(request.prompt_ids), "sampling_params": told, "return_logprob": True}
        async with session.post("/generate", json=body) as answer:
            said = json.loads(await answer.read())
        return len(said["meta_info"]["output_token_logprobs"])

    server = cast("Any", engine)._server  # noqa: SLF001 nobody else needs to know it
    headers = {"Authorization": f"Bearer {server.key}"}
    try:
        async with ClientSession(server.url, connector=TCPConnector(limit=0), headers=headers) as session:

            async def bare(requests: list[GenerateRequest]) -> int:
                return sum(await asyncio.gather(*(one(session, request) for request in requests)))

            yield {"adapter": of_adapter(engine), "bare": bare}
    finally:
        await engine.stop()


@asynccontextmanager
async def seeds(folder: str, num_requests: int) -> AsyncGenerator[Sides]:
    """Give an adapter whose server honours seeds, and one whose server does not."""
    engines = {
        name: sglang_engine(folder, num_requests, deterministic=name == "deterministic")
        for name in ("deterministic", "not")
    }
    try:
        for engine in engines.values():
            await engine.start()
        yield {name: of_adapter(engine) for name, engine in engines.items()}
    finally:
        for engine in engines.values():
            await engine.stop()


@asynccontextmanager
async def vllm(folder: str, num_requests: int) -> AsyncGenerator[Sides]:
    """Give the adapter, and an engine of vLLM's own."""
    from offbeat_rollout.vllm import VllmConfig, VllmEngine, vllm_environment

    config = VllmConfig(
        model_path=folder, max_model_len=CONTEXT, max_num_seqs=num_requests, start_timeout_s=900
    )
    os.environ |= vllm_environment(config)
    engine = VllmEngine(config)
    await engine.start()
    try:
        from vllm import AsyncEngineArgs
        from vllm import SamplingParams as VllmSampling
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.async_llm import AsyncLLM

        args = AsyncEngineArgs(
            model=folder, dtype="float32", max_model_len=CONTEXT, max_num_seqs=num_requests, skip_tokenizer_init=True,
            kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30), enforce_eager=True,
            # Without these two it dies of seeded prompts on CPU.
            enable_chunked_prefill=False, max_num_batched_tokens=max(2048, PROMPT_TOKENS * num_requests),
        )  # fmt: skip
        llm = await asyncio.to_thread(AsyncLLM.from_engine_args, args)

        async def one(request: GenerateRequest) -> int:
            sampling = request.sampling
            params = VllmSampling(
                max_tokens=sampling.max_tokens, temperature=1.0, seed=sampling.seed, logprobs=0, detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )  # fmt: skip
            prompt = {"prompt_token_ids": list(request.prompt_ids)}
            async for output in llm.generate(cast("Any", prompt), params, f"bare {request.request_id}"):
                if output.finished:
                    return len(output.outputs[0].token_ids)
            raise RuntimeError("vLLM ended a request without a result")

        async def bare(requests: list[GenerateRequest]) -> int:
            return sum(await asyncio.gather(*map(one, requests)))

        try:
            yield {"adapter": of_adapter(engine), "bare": bare}
        finally:
            llm.shutdown()
    finally:
        await engine.stop()


ENGINES = {"vllm": vllm, "sglang": sglang, "seeds": seeds}


async def measure(name: str, folder: str, arguments: argparse.Namespace) -> dict[str, object]:
    """Return the speeds of both sides, in tokens per second, and the median of their ratios."""
    async with ENGINES[name](folder, arguments.requests) as sides:
        speeds: dict[str, list[float]] = {side: [] for side in sides}
        turns = [*sides.items()]
        for round_ in range(arguments.pairs + 1):
            requests = make_requests(round_, arguments.requests, arguments.tokens)
            for side, call in turns:
                mark = time.perf_counter()
                num_tokens = await call(requests)
                speeds[side].append(num_tokens / (time.perf_counter() - mark))
                if num_tokens != arguments.requests * arguments.tokens:
                    raise RuntimeError(
                        f"{name}, {side}: made {num_tokens} tokens; all must be of full length"
                    )
            turns.reverse()
            print(f"{name}: { ({side: round(each[-1]) for side, each in speeds.items()}) }", file=sys.stderr)
    counted = {side: each[1:] for side, each in speeds.items()}
    ratios = [ours / theirs for ours, theirs in zip(*counted.values(), strict=True)]
    return {
        "ratio": round(median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        **{f"{side}_tokens_per_s": round(median(each), 1) for side, each in counted.items()},
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default=",".join(ENGINES), help="parts to measure, by commas")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64, help="of each completion")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as scratch:
        folder = Path(scratch) / "model"
        parameters = make_model(folder, SHAPES["medium"], Work())
        names = arguments.only.split(",")
        engines = {name: asyncio.run(measure(name, str(folder), arguments)) for name in names}
    missed = [
        name for name, found in engines.items() if name != "seeds" and cast("float", found["ratio"]) < AIM
    ]
    result = {
        "engines": engines, "aim": AIM, "missed": missed, "parameters": parameters, "requests": arguments.requests,
        "tokens": arguments.tokens, "torch": version("torch"), "load_before": load,
    }  # fmt: skip
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
