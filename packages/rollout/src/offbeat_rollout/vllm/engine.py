"""`VllmEngine`: the generation interface over vLLM's AsyncLLM (0.32).

What it promises beyond the interface:

- Log-probs are vLLM's `processed_logprobs`: of the distribution that was drawn from. For greedy requests vLLM takes
  them before temperature and truncation, which is temperature 1, in batches of greedy requests and in mixed ones.
- Versions per token come from vLLM's own spans; the weights loaded at start are version 0.
- A request with a `seed` is drawn from a generator of its own. With fp32 on CPU its tokens do not depend on what else
  is in the batch; elsewhere as far as kernels are batch-invariant. Prefix caching changes the shapes a prompt is
  computed in, so with it on the last bits may differ.
- `pause(KEEP)` keeps the keys and values of running requests, which were computed by the old weights, and goes on with
  them; after an update with `recompute_kv` they are computed again.
- Cached prefixes (`prefix_caching`) are salted with the number of updates, so a request that begins after an update finds
  none of older weights. A request that has no token yet when an update ends begins anew, under the new salt.
- On CPU `sleep` and `wake` release nothing (vLLM ignores them there).

New weights come through `updates`.

Our values to vLLM's and back.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportMissingTypeStubs=false
# vLLM types its interfaces in part.

from __future__ import annotations

import asyncio
import os
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from offbeat_rollout.config import require_config
from offbeat_rollout.errors import ConfigError, EngineStateError, RequestError, RolloutError
from offbeat_rollout.interface import RolloutEngine, check_request, eos_token_ids
from offbeat_rollout.toolkit.clock import RequestClock, Work
from offbeat_rollout.types import (
    Completion,
    Finish,
    Health,
    PauseMode,
    RolloutCapabilities,
    RolloutFeature,
    TopLogprobs,
    version_spans,
)
from offbeat_rollout.vllm import recording
from offbeat_rollout.vllm.arguments import check_arguments, check_heads
from offbeat_rollout.vllm.config import VllmConfig
from offbeat_rollout.vllm.processes import Launched, build_vllm, check_environment, vllm_environment
from offbeat_rollout.vllm.updates import VllmUpdates, answer_of, serve_nothing_yet, served_lora

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Sequence
    from typing import TypeVar

    from vllm import SamplingParams as VllmSamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    from offbeat_rollout.config import RolloutConfig
    from offbeat_rollout.types import GenerateRequest

    T = TypeVar("T")


def sampling_params(request: GenerateRequest, eos: Sequence[int]) -> VllmSamplingParams:
    """Return vLLM's parameters for a checked request; `eos` ends it like its own stop tokens."""
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    greedy = sampling.temperature == 0
    return VllmSamplingParams(
        temperature=sampling.temperature,
        top_p=1.0 if greedy else sampling.top_p,
        top_k=0 if greedy or sampling.top_k == -1 else sampling.top_k,
        max_tokens=sampling.max_tokens,
        # Every 64 bits are a seed here; vLLM takes those of a signed integer.
        seed=None if sampling.seed is None else sampling.seed % 2**63,
        stop_token_ids=sorted({*sampling.stop_token_ids, *eos}),
        ignore_eos=True,  # end-of-sequence tokens are in `stop_token_ids`, the same for every adapter
        logprobs=sampling.top_logprobs,  # beside the sampled token's own
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        skip_special_tokens=False,  # a text to stop at may be one
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def version_of(label: str | None) -> int:
    """Return the version a weight label names; vLLM calls the weights it started with "default"."""
    if label is None or label == "default":
        return 0
    try:
        return int(label)
    except ValueError:
        raise EngineStateError(
            f"vLLM serves weights labelled {label!r}, which is no version number; "
            "something other than this adapter updated them"
        ) from None


def completion(request: GenerateRequest, output: Any) -> Completion:  # noqa: ANN401 - vllm.RequestOutput
    """Return the completion in a finished `RequestOutput`."""
    answer = output.outputs[0]
    count = len(answer.token_ids)
    labelled = answer.weight_versions  # None where no label was ever given
    runs = [(0, count)] if labelled is None else [(version_of(s.version), s.end - s.start) for s in labelled]
    match answer.finish_reason:
        case "stop" | "length" | "abort" as reason:
            finish = Finish(reason)
        case other:
            raise EngineStateError(f"vLLM ended request {request.request_id!r} with {other!r}; see its log")
    # An entry per position for the sampled token, then those of the most likely ones.
    num_top, flat = request.sampling.top_logprobs, answer.logprobs
    logprobs = np.array(() if flat is None else flat.logprobs, np.float32).reshape(count, 1 + num_top)
    top = None
    if num_top:
        ids = np.array(() if flat is None else flat.token_ids, np.int32).reshape(count, 1 + num_top)
        top = TopLogprobs(token_ids=ids[:, 1:].copy(), logprobs=logprobs[:, 1:].copy())
    return Completion(
        request_id=request.request_id,
        token_ids=np.array(answer.token_ids, np.int32),
        logprobs=logprobs[:, 0].copy(),
        spans=version_spans(runs),
        finish=finish,
        stop_reason=answer.stop_reason,
        num_cached_tokens=output.num_cached_tokens,
        top_logprobs=top,
    )


class Progress:
    """Tokens made so far and who has one, read where vLLM keeps them: requests without queue, or their prompts are computed."""

    def __init__(self) -> None:
        self.ended = 0  # tokens of the requests that have ended
        self.paused = False
        self._llm: AsyncLLM | None = None

    def follow(self, llm: AsyncLLM) -> None:
        """Look at this engine from now on; it has made nothing yet."""
        self.ended, self.paused, self._llm = 0, False, llm

    def work(self) -> Work:
        """Return what is being done now."""
        made = self._made()
        return Work(
            tokens_made=self.ended + sum(made.values()),
            at_work={name: count for name, count in made.items() if count},
            paused=self.paused,
        )

    def without_tokens(self) -> list[str]:
        """Return the requests under way that have no token yet."""
        return [name for name, count in self._made().items() if not count]

    def _made(self) -> dict[str, int]:
        states = () if self._llm is None else self._llm.output_processor.request_states.values()
        return {
            state.external_req_id: state.detokenizer.num_output_tokens()
            for state in states
            if state.detokenizer is not None
        }


class VllmEngine(RolloutEngine):
    """One vLLM engine and the processes it starts."""

    Config = VllmConfig
    config: VllmConfig

    def __init__(self, config: RolloutConfig) -> None:
        super().__init__(config)
        self._llm: AsyncLLM | None = None
        self._launched: Launched | None = None
        self._updates = VllmUpdates(self.config, self._running, self._flip)
        self._version: int | None = 0
        self._num_flips = 0
        self._vocab_size = 0
        self._eos: tuple[int, ...] = ()
        self._running_ids: set[str] = set()
        self._begin_anew: set[str] = set()  # ended by us without a token, because the weights changed
        self._lora: LoRARequest | None = None
        self._progress = Progress()
        self._clock = RequestClock(config.request_timeout_s, self._progress.work)

    @classmethod
    def capabilities(cls) -> RolloutCapabilities:
        """Say what this adapter does."""
        return RolloutCapabilities(
            adapter="vllm",
            devices=frozenset({"cpu", "cuda"}),
            dtypes=frozenset({"float32", "bfloat16"}),
            features=frozenset(
                {
                    RolloutFeature.SEED,
                    RolloutFeature.PAUSE,
                    RolloutFeature.ABORT,
                    RolloutFeature.LORA,
                    RolloutFeature.TOP_LOGPROBS,
                    RolloutFeature.STOP_STRINGS,
                    RolloutFeature.ROUTED_EXPERTS,
                    RolloutFeature.RECOMPUTE_KV,
                    RolloutFeature.SLEEP_1,
                    RolloutFeature.SLEEP_2,
                    RolloutFeature.CONTINUOUS_BATCHING,
                    RolloutFeature.PREFIX_CACHING,
                    RolloutFeature.TENSOR_PARALLEL,
                }
            ),
            missing={
                "routed_experts_on_gpus": "vLLM 0.32 records them there in its Model Runner V2, which this adapter was not tried with; on a "
                "CPU its routers are listened to",
                "peer_copy": "weights are served in the form of vLLM's kernels (fused, prepacked), from which the checkpoint's "
                "tensors do not come back: a replacement is sent them by the trainer",
            },
            sleep_devices=frozenset({"cuda"}),
        )

    @classmethod
    def check(cls, config: RolloutConfig) -> None:
        """Refuse what vLLM cannot honour, `engine_args` and a model it has no kernel for included; see `arguments`."""
        super().check(config)
        vllm = require_config(config, VllmConfig)
        check_arguments(vllm)
        check_heads(vllm)

    @classmethod
    def environment(cls, config: RolloutConfig, cores: Sequence[int] = ()) -> dict[str, str]:
        """See `vllm_environment`."""
        return vllm_environment(config, cores)

    @property
    def version(self) -> int | None:
        """Version of the weights being served."""
        return self._version

    async def start(self) -> None:
        """Check the folder and the environment, then start vLLM's processes and wait until they can generate."""
        await asyncio.to_thread(self.check, self.config)  # it may import transformers, which takes seconds
        if self._launched is not None:
            raise EngineStateError("the engine is running already; `stop` it before another `start`")
        specs = await self._updates.specs()
        self._eos = eos_token_ids(self.config.model_path)
        # vLLM reads its own environment here; the adapter only looks whether an entrypoint has set it.
        check_environment(self.config, os.environ)  # noqa: TID251

        timeout_s = self.config.start_timeout_s
        self._launched = launched = Launched(partial(build_vllm, self.config))
        try:
            async with asyncio.timeout(timeout_s):
                llm = await asyncio.to_thread(launched.run, timeout_s)
                await llm.get_supported_tasks()  # it remembers them: no request waits for it later
                if self.config.lora.rank:
                    await serve_nothing_yet(llm, self.config.lora, specs)
                if self.config.record_experts:
                    await recording.begin(llm, timeout_s)
        except BaseException as error:  # also cancelled: nobody would end what the thread has begun
            self._launched = None
            await asyncio.to_thread(launched.end)
            if isinstance(error, TimeoutError):
                raise EngineStateError(
                    f"vLLM was not ready within {timeout_s} s (`start_timeout_s`); its processes were ended"
                ) from None
            if isinstance(error, RolloutError) or not isinstance(error, Exception):
                raise
            raise EngineStateError(f"vLLM did not start: {error}; its log says more") from error
        self._llm = llm
        self._progress.follow(llm)
        self._vocab_size = int(llm.model_config.get_vocab_size())
        self._version, self._num_flips = 0, 0
        self._updates.reset()
        self._lora = served_lora() if self.config.lora.rank else None

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return the completion of one request."""
        llm = self._serving()
        self._check(request)
        self._running_ids.add(request.request_id)
        try:
            async with self._clock.over([request.request_id]):
                return await self._complete(llm, request)
        finally:
            self._running_ids.discard(request.request_id)
            self._begin_anew.discard(request.request_id)

    async def generate_many(
        self, requests: Sequence[GenerateRequest], ended: Callable[[Completion], None] | None = None
    ) -> list[Completion]:
        """Return the completions of `requests`, in their order; all are checked before any is started."""
        self._serving()
        ids: set[str] = set()
        for request in requests:
            self._check(request)
            if request.request_id in ids:
                raise RequestError(
                    f"request id {request.request_id!r} came twice; ids must be unique while they run"
                )
            ids.add(request.request_id)
        return await super().generate_many(requests, ended)

    async def abort(self, request_ids: Collection[str]) -> None:
        """End these requests after the current step."""
        known = [request_id for request_id in request_ids if request_id in self._running_ids]
        if known:
            self._begin_anew.difference_update(known)
            await self._call(self._running().abort(known), "abort")

    async def pause(self, mode: PauseMode) -> None:
        """Stop scheduling; see the module for what KEEP does to keys and values."""
        # Cached prefixes may stay whatever comes: their salt says of which weights they are.
        llm = self._running()
        if mode is PauseMode.KEEP:
            # What `pause_generation` does, without its 20 ms for the last outputs of requests that end: here none does.
            await self._call(llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False), "pause")
        else:
            await self._call(llm.pause_generation(mode=mode.value, clear_cache=False), "pause")
        self._progress.paused = True

    async def resume(self) -> None:
        """Schedule again."""
        await self._call(self._running().resume_generation(), "resume")
        self._progress.paused = False

    async def sleep(self, level: int) -> None:
        """Release device memory; running requests are aborted."""
        if level not in (1, 2):
            raise ConfigError(f"vllm sleeps at level 1 or 2, got {level}")
        if level == 2 and self._lora:
            raise ConfigError(
                "vllm: updates bring low-rank matrices alone, so discarded base weights would not come back; sleep at level 1"
            )
        await self._call(self._running().sleep(level=level, mode="abort"), "sleep")
        self._progress.paused = True
        if level == 2:
            self._version = None

    async def wake(self, tags: Collection[str] | None = None) -> None:
        """Take memory back."""
        llm = self._running()
        await self._call(llm.wake_up(None if tags is None else list(tags)), "wake")
        self._progress.paused = await self._call(
            llm.is_paused(), "is_paused"
        )  # it goes on by itself once all memory is back

    def weight_updates(self) -> VllmUpdates:
        """Return the calls to the backend in vLLM's workers."""
        return self._updates

    async def health(self) -> Health:
        """Say whether vLLM's processes are there."""
        llm = self._llm
        ok = llm is not None and not llm.errored
        detail = "" if ok else ("not started" if llm is None else "the engine process died; its log says why")
        work = self._progress.work()
        return Health(
            ok=ok,
            version=self._version,
            num_running=len(self._running_ids),
            detail=detail,
            tokens_made=work.tokens_made,
            paused=work.paused,
        )

    async def stop(self) -> None:
        """End vLLM and see that its processes are gone; one that still starts, too."""
        self._llm = None
        launched, self._launched = self._launched, None
        if launched is not None:
            await asyncio.to_thread(launched.end)

    def _running(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineStateError("the engine is not running; call `start` first")
        if self._llm.errored:
            raise EngineStateError("vLLM's engine process died; its log says why. `stop` and start another")
        return self._llm

    def _serving(self) -> AsyncLLM:
        llm = self._running()
        if self._version is None:
            raise EngineStateError(
                "the weights were discarded (`sleep(2)`) and none have come since; update them before `generate`"
            )
        return llm

    def _check(self, request: GenerateRequest) -> None:
        check_request(request, self.config, self._vocab_size, self._running_ids)

    async def _complete(self, llm: AsyncLLM, request: GenerateRequest) -> Completion:
        while True:
            key = secrets.token_hex(8) if self.config.record_experts else None
            done = completion(request, await self._output(llm, request, key))
            if key is not None:
                done = await recording.recorded(llm, key, request, done, self.config.request_timeout_s)
            if done.num_tokens or request.request_id not in self._begin_anew:
                self._progress.ended += done.num_tokens
                return done
            self._begin_anew.discard(request.request_id)

    async def _output(self, llm: AsyncLLM, request: GenerateRequest, key: str | None) -> Any:  # noqa: ANN401 - vllm.RequestOutput
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        # A rendered input: it goes to the engine as it is, without vLLM's thread for text. Nothing is awaited between
        # here and vLLM's entry of the request, so that no update comes between a salt and its request.
        prompt: Any = {
            "type": "token",
            "prompt_token_ids": list(request.prompt_ids),
            "cache_salt": f"update {self._num_flips}",
        }
        params = sampling_params(request, self._eos)
        if key is not None:
            params.extra_args = {recording.KEY: key}
        try:
            async for output in llm.generate(prompt, params, request.request_id, lora_request=self._lora):
                if output.finished:
                    return output
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineStateError(f"vLLM failed on request {request.request_id!r}: {error!r}") from error
        raise EngineStateError(f"vLLM ended request {request.request_id!r} without a result")

    async def _flip(self, version: int, recompute_kv: bool) -> None:
        """Serve what the workers have as `version`."""
        llm = self._running()
        self._version = version
        self._num_flips += 1
        if recompute_kv and not await self._call(
            llm.reset_prefix_cache(reset_running_requests=True), "reset_prefix_cache"
        ):
            raise EngineStateError(
                f"vLLM kept keys and values of the weights before version {version} (a KV connector did not let go); "
                "start the engine anew, or update without `recompute_kv`"
            )
        # Their salt is that of the weights before: they would be given those weights' prefixes, and called new.
        late = self._progress.without_tokens()
        self._begin_anew.update(late)
        if late:
            await self._call(llm.abort(late), "abort")

    async def _call(self, call: Coroutine[Any, Any, T], what: str) -> T:
        return await answer_of(call, what, self.config.request_timeout_s)
