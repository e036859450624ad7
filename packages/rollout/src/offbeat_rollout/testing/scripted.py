"""An engine without a model: it says what a script says, and pauses, aborts and changes versions like a real one."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from offbeat_rollout.errors import EngineStateError, UpdateRefused
from offbeat_rollout.interface import RolloutEngine, TensorUpdates, check_request
from offbeat_rollout.toolkit.clock import RequestClock, Work
from offbeat_rollout.types import (
    Completion,
    Finish,
    Health,
    PauseMode,
    RolloutCapabilities,
    RolloutFeature,
    TopLogprobs,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from offbeat_rollout.config import RolloutConfig
    from offbeat_rollout.types import GenerateRequest, WeightSpec

    # The tokens of one completion, longest first choice; it is cut at `max_tokens` and at a stop token.
    Script = Callable[[GenerateRequest], Sequence[int]]


@dataclass(slots=True)
class _Running:
    request: GenerateRequest
    script: Sequence[int]
    done: asyncio.Future[Completion]
    versions: list[int] = field(default_factory=list[int])

    def end(self, finish: Finish, logprob: float) -> None:
        if not self.done.done():
            tokens = tuple(self.script[: len(self.versions)])
            completion = Completion.of(
                request_id=self.request.request_id,
                token_ids=tokens,
                logprobs=(logprob,) * len(tokens),
                policy_versions=self.versions,
                finish=finish,
                top_logprobs=self._tops(len(tokens), logprob),
            )
            self.done.set_result(completion)

    def _tops(self, count: int, logprob: float) -> TopLogprobs | None:
        """Return the first K tokens: all are as likely."""
        num_top = self.request.sampling.top_logprobs
        if not num_top:
            return None
        ids = np.tile(np.arange(num_top, dtype=np.int32), (count, 1))
        return TopLogprobs(token_ids=ids, logprobs=np.full_like(ids, logprob, np.float32))


class ScriptedRollout(RolloutEngine, TensorUpdates):
    """Says `script(request)`; by default uniform tokens drawn from the request's seed, so log-probs are -log V.

    Every `token_s` seconds each running request gets one token, stamped with the version of that moment.
    Updates are checked by their names against `specs` and change the version.
    """

    def __init__(
        self,
        config: RolloutConfig,
        script: Script | None = None,
        *,
        vocab_size: int = 96,
        token_s: float = 0.001,
        specs: Sequence[WeightSpec] = (),
    ) -> None:
        super().__init__(config)
        self._script = self._uniform if script is None else script
        self._vocab_size = vocab_size
        self._token_s = token_s
        self._specs = list(specs)
        self._version = 0
        self._running: dict[str, _Running] = {}
        self._go = asyncio.Event()
        self._draining: frozenset[str] | None = None
        self._task: asyncio.Task[None] | None = None
        self._tokens_made = 0
        self._clock = RequestClock(config.request_timeout_s, self._work)

    @classmethod
    def capabilities(cls) -> RolloutCapabilities:
        """Say what this adapter does."""
        return RolloutCapabilities(
            adapter="scripted",
            devices=frozenset({"cpu"}),
            dtypes=frozenset({"float32"}),
            features=frozenset(
                {RolloutFeature.SEED, RolloutFeature.PAUSE, RolloutFeature.ABORT, RolloutFeature.TOP_LOGPROBS}
            ),
            missing={"model": "tokens come from a script"},
        )

    @property
    def version(self) -> int:
        """Version being served."""
        return self._version

    async def start(self) -> None:
        """Begin the clock."""
        if self._task is not None:
            raise EngineStateError("the engine is running already; `stop` it before another `start`")
        self._go.set()
        self._task = asyncio.create_task(self._tick(), name="scripted rollout")

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return what the script says for `request`."""
        if self._task is None:
            raise EngineStateError("the engine is not running; call `start` first")
        check_request(request, self.config, self._vocab_size, self._running)
        name = request.request_id
        running = _Running(request, self._script(request), asyncio.get_running_loop().create_future())
        self._running[name] = running
        try:
            async with self._clock.over([name]):
                return await running.done
        finally:
            self._running.pop(name, None)

    async def abort(self, request_ids: Collection[str]) -> None:
        """End these requests with what they have."""
        for name in request_ids:
            if name in self._running:
                self._running[name].end(Finish.ABORT, self._logprob)

    async def pause(self, mode: PauseMode) -> None:
        """Stop the clock; WAIT lets those that are there run to their end first."""
        if mode is PauseMode.ABORT:
            await self.abort(list(self._running))
        if mode is PauseMode.WAIT and self._go.is_set() and self._running:
            self._draining = frozenset(self._running)
            try:
                async with asyncio.timeout(self.config.request_timeout_s):
                    await asyncio.wait([running.done for running in self._running.values()])
            finally:
                self._draining = None
        self._go.clear()

    async def resume(self) -> None:
        """Let the clock run."""
        self._go.set()

    async def sleep(self, level: int) -> None:
        """Do nothing: there is no memory to release."""
        del level

    async def wake(self, tags: Collection[str] | None = None) -> None:
        """Do nothing."""
        del tags

    def weight_updates(self) -> ScriptedRollout:
        """Return itself: it takes tensors, of which it reads the names."""
        return self

    async def specs(self) -> list[WeightSpec]:
        """Return what it was made with."""
        return list(self._specs)

    async def load(
        self, tensors: Iterable[tuple[str, object]], version: int, *, recompute_kv: bool = False
    ) -> None:
        """Check the names and serve `version`."""
        del recompute_kv  # there are none
        given = {name for name, _ in tensors}
        wrong = sorted(given ^ {name for name, _, _ in self._specs})
        if wrong:
            raise UpdateRefused(f"unknown or missing: {', '.join(wrong)}; nothing was changed")
        self._version = version

    async def health(self) -> Health:
        """Say whether the clock runs."""
        ok = self._task is not None and not self._task.done()
        return Health(
            ok=ok,
            version=self._version,
            num_running=len(self._running),
            detail="" if ok else "not running",
            tokens_made=self._tokens_made,
            paused=not self._go.is_set(),
        )

    async def stop(self) -> None:
        """Stop for good; requests still running fail."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait([task], timeout=self.config.request_timeout_s)
        for running in self._running.values():
            if not running.done.done():
                running.done.set_exception(EngineStateError("the engine was stopped"))

    def _work(self) -> Work:
        made = {name: len(running.versions) for name, running in self._running.items()}
        return Work(tokens_made=self._tokens_made, at_work=made, paused=not self._go.is_set())

    @property
    def _logprob(self) -> float:
        return -math.log(self._vocab_size)

    def _uniform(self, request: GenerateRequest) -> Sequence[int]:
        sampling = request.sampling
        if sampling.temperature == 0:
            return [0] * sampling.max_tokens
        bits = np.random.Philox() if sampling.seed is None else np.random.Philox(key=sampling.seed % 2**128)
        return (np.random.Generator(bits).random(sampling.max_tokens) * self._vocab_size).astype(int).tolist()

    async def _tick(self) -> None:
        while True:
            await self._go.wait()
            await asyncio.sleep(self._token_s)
            if self._go.is_set():
                for name, running in list(self._running.items()):
                    if (self._draining is None or name in self._draining) and not running.done.done():
                        self._advance(running)

    def _advance(self, running: _Running) -> None:
        sampling = running.request.sampling
        room = self.config.max_model_len - len(running.request.prompt_ids)
        limit = min(sampling.max_tokens, room, len(running.script))
        running.versions.append(self._version)
        self._tokens_made += 1
        if running.script[len(running.versions) - 1] in sampling.stop_token_ids:
            running.end(Finish.STOP, self._logprob)
        elif len(running.versions) >= limit:
            running.end(Finish.LENGTH, self._logprob)
