"""`VllmEngine`: the generation interface over vLLM's AsyncLLM (0.32).

What it promises beyond the interface:

- Log-probs are vLLM's `processed_logprobs`: of the distribution that was drawn from. For greedy requests vLLM takes
  them before temperature and truncation, which is temperature 1, in batches of greedy requests and in mixed ones.
- Versions per token come from vLLM's own spans; the weights loaded at start are version 0.
- A request with a `seed` is drawn from a generator of its own. With fp32 on CPU its tokens do not depend on what else
  is in the batch; elsewhere as far as kernels are batch-invariant. Prefix caching changes the shapes a prompt is
  computed in, so with it on the last bits may differ.
- `pause(KEEP)` keeps the keys and values of running requests, which were computed by the old weights, and goes on with
  them; after a "finish" with prefix caching on, or with `{"recompute_kv": True}`, they are computed again.
- On CPU `sleep` and `wake` release nothing (vLLM ignores them there).

Operations of `control`, each forwarded to vLLM's call of the same purpose: "init" (payload: the backend's init info),
"start", "update" (payload: the backend's update info), "finish" (`{"version": int}`, or `{}` to leave the version as it
is), "shutdown". Payloads hold plain values. A worker that refuses an update raises `UpdateRefused` here.

With an `adapter` in the settings vLLM serves it through its own LoRA layers, and every request names it; see `lora`. The
backend then gets the adapter's A and B alone. vLLM forgets all adapters when an update session ends, so there the session
is opened once and stays open: "finish" only sets the version, and "shutdown" is refused.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportMissingTypeStubs=false
# vLLM types its interfaces in part.

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from offbeat_rollout.adapted import folder_adapter_specs
from offbeat_rollout.checks import check_config, check_request, eos_token_ids
from offbeat_rollout.clock import RequestClock
from offbeat_rollout.errors import ConfigError, EngineStateError, RequestError, UpdateRefused
from offbeat_rollout.interface import RolloutEngine
from offbeat_rollout.safetensors_header import folder_specs
from offbeat_rollout.types import Health, PauseMode, RolloutCapabilities
from offbeat_rollout.vllm.environment import check_environment, vllm_environment
from offbeat_rollout.vllm.lora import serve_nothing_yet, served_adapter
from offbeat_rollout.vllm.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence

    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    from offbeat_rollout.config import RolloutConfig
    from offbeat_rollout.types import Completion, GenerateRequest
    from offbeat_rollout.vllm.processes import Launched


class VllmEngine(RolloutEngine):
    """One vLLM engine and the processes it starts."""

    def __init__(self, config: RolloutConfig) -> None:
        super().__init__(config)
        self._llm: AsyncLLM | None = None
        self._launched: Launched | None = None
        self._version = 0
        self._vocab_size = 0
        self._eos: tuple[int, ...] = ()
        self._specs: list[tuple[str, tuple[int, ...], str]] = []
        self._running_ids: set[str] = set()
        self._adapter: LoRARequest | None = None
        self._session_open = False  # of weight updates; see the module for adapters
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
                    "seed",
                    "pause",
                    "abort",
                    "weight_transfer",
                    "adapter",
                    "recompute_kv",
                    "sleep_1",
                    "sleep_2",
                    "continuous_batching",
                    "prefix_caching",
                    "tensor_parallel",
                }
            ),
            missing={"load_weights": "weights come through the weight-transfer backend, in vLLM's workers"},
            sleep_devices=frozenset({"cuda"}),
        )

    @classmethod
    def environment(cls, config: RolloutConfig, cores: Sequence[int] = ()) -> dict[str, str]:
        """See `vllm_environment`."""
        return vllm_environment(config, cores)

    @property
    def version(self) -> int:
        """Version of the weights being served."""
        return self._version

    async def start(self) -> None:
        """Check the folder and the environment, then start vLLM's processes and wait until they can generate."""
        check_config(self.config, self.capabilities())
        if self._llm is not None:
            raise EngineStateError("the engine is running already; `stop` it before another `start`")
        self._specs = await asyncio.to_thread(_specs_of, self.config)
        self._eos = eos_token_ids(self.config.model_path)
        # vLLM reads its own environment here; the adapter only looks whether an entrypoint has set it.
        check_environment(self.config, os.environ)  # noqa: TID251

        from offbeat_rollout.vllm.processes import Launched

        launched = Launched()
        try:
            async with asyncio.timeout(self.config.start_timeout_s):
                llm = await asyncio.to_thread(launched.run, self.config)
                if self.config.adapter.rank:
                    await serve_nothing_yet(llm, self.config.adapter, self._specs)
        except TimeoutError:
            await asyncio.to_thread(launched.kill)
            raise EngineStateError(
                f"vLLM was not ready within {self.config.start_timeout_s} s (`start_timeout_s`); its processes were ended"
            ) from None
        except ConfigError:
            raise
        except Exception as error:
            await asyncio.to_thread(launched.kill)
            raise EngineStateError(f"vLLM did not start: {error}; its log says more") from error
        self._llm, self._launched = llm, launched
        self._progress.follow(llm)
        self._vocab_size = int(llm.model_config.get_vocab_size())
        self._version = 0
        self._session_open = False
        self._adapter = served_adapter() if self.config.adapter.rank else None

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return the completion of one request."""
        llm = self._running()
        self._check(request)
        self._running_ids.add(request.request_id)
        try:
            async with self._clock.over([request.request_id]):
                return await self._complete(llm, request)
        finally:
            self._running_ids.discard(request.request_id)

    async def generate_many(
        self, requests: Sequence[GenerateRequest], ended: Callable[[Completion], None] | None = None
    ) -> list[Completion]:
        """Return the completions of `requests`, in their order; all are checked before any is started."""
        self._running()
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
            await self._call(self._running().abort(known), "abort")

    async def pause(self, mode: PauseMode) -> None:
        """Stop scheduling; see the module for what KEEP does to keys and values."""
        llm = self._running()
        # Running requests of KEEP hold their cache; in the other modes nothing runs any more and it may go.
        clear_cache = mode is not PauseMode.KEEP
        await self._call(llm.pause_generation(mode=mode.value, clear_cache=clear_cache), "pause")
        self._progress.paused = True

    async def resume(self) -> None:
        """Schedule again."""
        await self._call(self._running().resume_generation(), "resume")
        self._progress.paused = False

    async def sleep(self, level: int) -> None:
        """Release device memory; running requests are aborted."""
        if level not in (1, 2):
            raise ConfigError(f"vllm sleeps at level 1 or 2, got {level}")
        await self._call(self._running().sleep(level=level, mode="abort"), "sleep")
        self._progress.paused = True

    async def wake(self, tags: Collection[str] | None = None) -> None:
        """Take memory back."""
        llm = self._running()
        await self._call(llm.wake_up(None if tags is None else list(tags)), "wake")
        async with asyncio.timeout(self.config.request_timeout_s):
            self._progress.paused = await llm.is_paused()  # it goes on by itself once all memory is back

    async def control(self, op: str, payload: Mapping[str, object]) -> dict[str, object]:
        """Run one of the operations the module names."""
        if op == "weight_specs":
            return {"specs": list(self._specs or await asyncio.to_thread(_specs_of, self.config))}
        llm = self._running()
        from vllm.distributed.weight_transfer.base import (
            WeightTransferInitRequest,
            WeightTransferUpdateRequest,
        )

        match op:
            case "init":
                request = WeightTransferInitRequest(init_info=dict(payload))
                await self._update_call(llm.init_weight_transfer_engine(request), op)
            case "start":
                if not (self._adapter and self._session_open):
                    await self._update_call(llm.start_weight_update(), op)
                    self._session_open = True
            case "update":
                request = WeightTransferUpdateRequest(update_info=dict(payload))
                try:
                    await self._update_call(llm.update_weights(request), op)
                except BaseException:
                    self._session_open = False  # vLLM closes it when an update fails
                    raise
            case "finish":
                return await self._finish(llm, payload)
            case "shutdown":
                if self._adapter:
                    raise UpdateRefused(
                        "vLLM would forget the adapter it serves; `stop` the engine instead of a shutdown of its updates"
                    )
                await self._update_call(llm.shutdown_weight_transfer_engine(), op)
            case _:
                raise ConfigError(
                    f"the vllm adapter has no operation {op!r}; "
                    "it has weight_specs, init, start, update, finish and shutdown"
                )
        return {}

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
        """End vLLM and see that its processes are gone."""
        llm, self._llm = self._llm, None
        launched, self._launched = self._launched, None
        if llm is not None and launched is not None:
            await asyncio.to_thread(launched.stop, llm)

    def _running(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineStateError("the engine is not running; call `start` first")
        if self._llm.errored:
            raise EngineStateError("vLLM's engine process died; its log says why. `stop` and start another")
        return self._llm

    def _check(self, request: GenerateRequest) -> None:
        check_request(request, self.config.max_model_len, self._vocab_size)
        if request.request_id in self._running_ids:
            raise RequestError(
                f"request id {request.request_id!r} is in use; ids must be unique while they run"
            )

    async def _complete(self, llm: AsyncLLM, request: GenerateRequest) -> Completion:
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        from offbeat_rollout.vllm.translate import completion, sampling_params

        # A rendered input: it goes to the engine as it is, without vLLM's thread for text.
        prompt: Any = {"type": "token", "prompt_token_ids": list(request.prompt_ids)}
        params = sampling_params(request, self._eos)
        try:
            async for output in llm.generate(prompt, params, request.request_id, lora_request=self._adapter):
                if output.finished:
                    done = completion(request, output)
                    self._progress.ended += len(done.token_ids)
                    return done
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineStateError(f"vLLM failed on request {request.request_id!r}: {error!r}") from error
        raise EngineStateError(f"vLLM ended request {request.request_id!r} without a result")

    async def _finish(self, llm: AsyncLLM, payload: Mapping[str, object]) -> dict[str, object]:
        version = payload.get("version")
        if version is not None and not isinstance(version, int):
            raise UpdateRefused(f"`finish` needs an integer `version`, got {version!r}; nothing was changed")
        label = None if version is None else str(version)
        if self._adapter is None:
            await self._update_call(llm.finish_weight_update(weight_version=label), "finish")
        elif label is not None:
            await self._update_call(llm.update_weight_version(label), "finish")
        if version is None:
            return {}
        self._version = version
        if self.config.prefix_caching or payload.get("recompute_kv", False):
            # Otherwise a new request could be given a prefix that the old weights computed.
            await self._call(llm.reset_prefix_cache(reset_running_requests=True), "finish")
        return {"version": version}

    async def _update_call(self, call: Coroutine[Any, Any, object], what: str) -> None:
        try:
            await self._call(call, what)
        except EngineStateError:
            raise
        except Exception as error:
            if "refused" in str(error).lower():
                raise UpdateRefused(str(error)) from error
            raise EngineStateError(f"vLLM's worker failed in `{what}`: {error}") from error

    async def _call(self, call: Coroutine[Any, Any, object], what: str) -> None:
        try:
            async with asyncio.timeout(self.config.request_timeout_s):
                await call
        except TimeoutError:
            raise EngineStateError(
                f"vLLM did not answer `{what}` within {self.config.request_timeout_s} s (`request_timeout_s`)"
            ) from None


def _specs_of(config: RolloutConfig) -> list[tuple[str, tuple[int, ...], str]]:
    return (
        folder_adapter_specs(config) if config.adapter.rank else folder_specs(config.model_path, config.dtype)
    )
