"""`HfEngine`: the generation interface over plain Transformers.

A worker thread owns the model and generates in one running batch; the event loop only queues and collects. Requests
join between two tokens and leave when they end. With fp32 on CPU a request that names a `seed` gives the same tokens
and log-probs bit for bit whatever else is in the batch; in bfloat16 or on a GPU the random numbers are the same, and
the logits only as far as matrix kernels are batch-invariant.

An update is copied in between two tokens, and `UpdateRefused` names everything that does not fit. Low-rank matrices alone
are merged into the base weights when they come; what follows costs what it costs without.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from offbeat_rollout.errors import ConfigError, EngineStateError
from offbeat_rollout.interface import RolloutEngine, TensorUpdates, check_request
from offbeat_rollout.toolkit.clock import RequestClock, Work
from offbeat_rollout.types import Health, RolloutCapabilities, RolloutFeature

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from typing import TypeVar

    import torch

    from offbeat_rollout.config import RolloutConfig
    from offbeat_rollout.hf.worker import Answer, Worker
    from offbeat_rollout.types import Completion, GenerateRequest, PauseMode, WeightSpec

    T = TypeVar("T")

_STOP_TIMEOUT_S = 30.0


class HfEngine(RolloutEngine, TensorUpdates):
    """The reference engine: any full-attention causal model Transformers can load, on CPU or one GPU."""

    def __init__(self, config: RolloutConfig) -> None:
        super().__init__(config)
        self._worker: Worker | None = None
        self._pending: dict[str, asyncio.Future[Completion]] = {}
        self._failure: str | None = None
        self._clock = RequestClock(config.request_timeout_s, self._work)

    @classmethod
    def check(cls, config: RolloutConfig) -> None:  # noqa: D102
        super().check(config)
        from offbeat_rollout.hf.model import check_model

        check_model(config)

    @classmethod
    def capabilities(cls) -> RolloutCapabilities:
        """Say what this adapter does."""
        return RolloutCapabilities(
            adapter="hf",
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
                    RolloutFeature.RECOMPUTE_KV,
                    RolloutFeature.SLEEP_1,
                    RolloutFeature.CONTINUOUS_BATCHING,
                    RolloutFeature.PEER_COPY,
                    RolloutFeature.ROUTED_EXPERTS,
                }
            ),
            missing={
                "tensor_parallel": "one process, one device; use vllm",
                "prefix_caching": "equal prompts that arrive together are computed once, nothing is kept between batches",
                "sliding_window": "full attention only; use vllm",
                "sleep_2": "weights cannot be discarded, they have no other home",
            },
            sleep_devices=frozenset({"cuda"}),
        )

    @classmethod
    def environment(cls, config: RolloutConfig, cores: Sequence[int] = ()) -> dict[str, str]:
        """Return the thread count torch starts with; no network either."""
        del cores
        return {
            "HF_HUB_OFFLINE": "1",
            **({"OMP_NUM_THREADS": str(config.cpu_threads)} if config.device == "cpu" else {}),
        }

    @property
    def version(self) -> int:
        """Version of the weights being served."""
        return 0 if self._worker is None else self._worker.version

    async def start(self) -> None:
        """Load the model in the worker thread."""
        if self._worker is not None:
            raise EngineStateError("the engine is running already; `stop` it before another `start`")
        # Transformers takes seconds to import: in the default executor, so that the loop stays responsive.
        await asyncio.to_thread(self.check, self.config)
        make_worker = await asyncio.to_thread(_worker_class)
        loop = asyncio.get_running_loop()
        self._failure = None
        self._worker = make_worker(
            self.config,
            lambda answers: _post(loop, lambda: self._deliver(answers)),
            lambda error: _post(loop, lambda: self._fail(error)),
        )
        try:
            async with asyncio.timeout(self.config.start_timeout_s):
                await asyncio.wrap_future(self._worker.start())
        except TimeoutError:
            await self.stop()
            raise EngineStateError(
                f"loading {self.config.model_path!r} took more than {self.config.start_timeout_s} s (`start_timeout_s`)"
            ) from None
        except BaseException:
            await self.stop()
            raise

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return the completion of one request; it joins the running batch at the next token."""
        return (await self.generate_many([request]))[0]

    async def generate_many(
        self, requests: Sequence[GenerateRequest], ended: Callable[[Completion], None] | None = None
    ) -> list[Completion]:
        """Return the completions of `requests`, in their order; all are checked before any is started."""
        worker = self._running()
        if worker.asleep:
            raise EngineStateError("the engine sleeps; `wake` it before `generate`")
        ids = [request.request_id for request in requests]
        taken = {request_id for request_id, count in Counter(ids).items() if count > 1} | self._pending.keys()
        for request in requests:
            check_request(request, self.config, worker.vocab_size, taken)
        loop = asyncio.get_running_loop()
        futures = [self._pending.setdefault(request_id, loop.create_future()) for request_id in ids]
        if ended is not None:
            for future in futures:
                future.add_done_callback(lambda done: _tell(done, ended))
        queued = worker.call(lambda: worker.submit([*zip(requests, futures, strict=True)]), wake=False)
        loop.call_soon(worker.wake)  # what is asked for in this turn of the loop joins the batch together
        try:
            async with self._clock.over(ids):
                awaited: list[asyncio.Future[Any]] = [*futures, asyncio.wrap_future(queued)]
                return (await asyncio.gather(*awaited))[:-1]
        finally:
            left = [request_id for request_id in ids if self._pending.pop(request_id, None) is not None]
            if left:  # cancelled or late: nobody waits for these any more
                worker.call(lambda: worker.abort(left))

    async def abort(self, request_ids: Collection[str]) -> None:
        """End these requests after the current token."""
        worker = self._running()
        await self._ask(lambda: worker.abort(request_ids), "abort")

    async def pause(self, mode: PauseMode) -> None:
        """Stop after the current token (KEEP, ABORT) or when running requests have ended (WAIT)."""
        worker = self._running()
        holds: Future[None] = Future()
        try:
            await self._ask(lambda: worker.pause(mode, holds), "pause")
            await self._within(asyncio.wrap_future(holds), "pause")
        finally:
            holds.cancel()  # late or cancelled: it must not pause when nobody expects it any more

    async def resume(self) -> None:
        """Go on generating."""
        worker = self._running()
        await self._ask(worker.resume, "resume")

    async def sleep(self, level: int) -> None:
        """Move the weights to host memory (level 1; on CPU they are there already) and drop keys and values."""
        if level != 1:
            raise ConfigError(
                f"the hf adapter sleeps at level 1 only, got {level}: it cannot discard weights"
            )
        worker = self._running()
        await self._ask(lambda: worker.move_model("cpu", asleep=True), "sleep")

    async def wake(self, tags: Collection[str] | None = None) -> None:
        """Move the weights back; keys and values take memory when requests do."""
        worker = self._running()
        if tags is None or "weights" in tags:
            await self._ask(lambda: worker.move_model(self.config.device, asleep=False), "wake")

    def weight_updates(self) -> HfEngine:
        """Return itself: it takes tensors."""
        return self

    async def specs(self) -> list[WeightSpec]:
        """Return the weights' names, shapes and dtypes; with LoRA, those of A and B alone."""
        return await self._ask(self._running().specs, "specs")

    async def load(
        self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, *, recompute_kv: bool = False
    ) -> None:
        """See `TensorUpdates`; with LoRA, A and B are merged into the base weights at once."""
        worker = self._running()
        await self._ask(lambda: worker.load_weights(tensors, version, recompute_kv), "load")

    async def adopt(
        self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, *, recompute_kv: bool = False
    ) -> bool:
        """See `TensorUpdates`; on a CPU, and not with LoRA, whose sum is the engine's own."""
        worker = self._running()
        return await self._ask(lambda: worker.adopt_weights(tensors, version, recompute_kv), "adopt")

    async def health(self) -> Health:
        """Say whether the worker thread is there; answers at once, also in the middle of a token."""
        worker = self._worker
        ok = worker is not None and self._failure is None
        return Health(
            ok=ok,
            version=self.version,
            num_running=len(self._pending),
            detail=self._failure or ("" if ok else "not started"),
            tokens_made=0 if worker is None else worker.tokens_made,
            paused=worker is not None and worker.paused,
        )

    async def stop(self) -> None:
        """End the worker thread; requests still running fail with `EngineStateError`."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        ended = await asyncio.to_thread(worker.stop, _STOP_TIMEOUT_S)
        self._fail(EngineStateError("the engine was stopped"))
        if not ended:
            raise EngineStateError(
                f"the generation thread did not end within {_STOP_TIMEOUT_S} s; end the process"
            )

    def _work(self) -> Work:
        return Work(tokens_made=0, at_work={}) if self._worker is None else self._worker.work()

    def _running(self) -> Worker:
        if self._failure is not None and self._worker is not None:
            raise EngineStateError(self._failure)
        if self._worker is None:
            raise EngineStateError("the engine is not running; call `start` first")
        return self._worker

    async def _ask(self, command: Callable[[], T], what: str) -> T:
        worker = self._running()
        return await self._within(asyncio.wrap_future(worker.call(command)), what)

    async def _within(self, future: asyncio.Future[T], what: str) -> T:
        try:
            async with asyncio.timeout(self.config.request_timeout_s):
                return await future
        except TimeoutError:
            raise EngineStateError(
                f"`{what}` was not done within {self.config.request_timeout_s} s (`request_timeout_s`)"
            ) from None

    def _deliver(self, answers: list[Answer]) -> None:
        for completion, future in answers:
            if not future.done():  # else nobody waits, and another request may go by that id
                del self._pending[completion.request_id]
                future.set_result(completion)

    def _fail(self, error: BaseException) -> None:
        self._failure = f"generation ended: {error}"
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(EngineStateError(self._failure))


def _tell(done: asyncio.Future[Completion], ended: Callable[[Completion], None]) -> None:
    if not done.cancelled() and done.exception() is None:
        ended(done.result())


def _worker_class() -> type[Worker]:
    from offbeat_rollout.hf.worker import Worker

    return Worker


def _post(loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(action)
