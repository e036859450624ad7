"""The clock of requests: how long an engine works on each without a token, and whether it makes tokens at all."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat_rollout.errors import EngineStateError, RequestTimeout, RolloutError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection, Mapping

_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an engine is doing: tokens it has made so far, those of each request it works on (others queue), and if it is paused.

    `tokens_made` may fall where a request is forgotten; a rise is progress.
    """

    tokens_made: int
    at_work: Mapping[str, int]
    paused: bool = False


@dataclass(slots=True, eq=False)
class _Timed:
    """Requests that one call waits for: the tokens of each, and the seconds spent on it since the newest of them."""

    made: dict[str, int]
    spent_s: dict[str, float]
    limit: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    error: RolloutError | None = None

    def fail(self, error: RolloutError) -> None:
        if self.error is None:
            self.error = error
            self.limit.reschedule(asyncio.get_running_loop().time())


class RequestClock:
    """Ends a request on which its engine worked for `limit_s` without a token. Queueing and pauses do not count.

    A request that gets none while its engine makes others is itself at fault: `RequestTimeout`. One that gets tokens may take as
    long as its `max_tokens` do. An engine that has requests, is not paused, and makes no token for `limit_s` no longer generates:
    `EngineStateError`, for all of them.
    """

    def __init__(self, limit_s: float, look: Callable[[], Work]) -> None:
        """Ask `look` every second at most, while there are requests; it must not block."""
        self._limit_s = limit_s
        self._look = look
        self._period_s = min(_PERIOD_S, limit_s / 8)
        self._timed: set[_Timed] = set()
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def over(self, request_ids: Collection[str]) -> AsyncGenerator[None]:
        """Time these requests while the body waits for them.

        Raises:
            RequestTimeout: one of them got no token for too long.
            EngineStateError: nothing moves any more.
        """
        timed = _Timed(dict.fromkeys(request_ids, 0), dict.fromkeys(request_ids, 0.0))
        self._timed.add(timed)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="clock of requests")
        try:
            async with timed.limit:
                yield
        except TimeoutError:
            if timed.error is None:
                raise
            raise timed.error from None
        finally:
            self._timed.discard(timed)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        made, silent_s, mark_s = self._look().tokens_made, 0.0, loop.time()
        while self._timed:
            await asyncio.sleep(self._period_s)
            # A process that was stopped, or a loop that was blocked, is no time the engine had.
            elapsed_s = min(loop.time() - mark_s, 2 * self._period_s)
            mark_s = loop.time()
            work = self._look()
            moved, made = work.tokens_made > made, work.tokens_made
            silent_s = 0.0 if moved or work.paused else silent_s + elapsed_s
            if not work.paused:
                self._count(work.at_work, elapsed_s, moved=moved)
            if silent_s >= self._limit_s:
                for timed in self._timed:
                    timed.fail(EngineStateError(self._stalled(sum(len(one.spent_s) for one in self._timed))))

    def _count(self, at_work: Mapping[str, int], elapsed_s: float, *, moved: bool) -> None:
        for timed in self._timed:
            for name in timed.spent_s.keys() & at_work.keys():
                before, timed.made[name] = timed.made[name], at_work[name]
                timed.spent_s[name] = timed.spent_s[name] + elapsed_s if at_work[name] == before else 0.0
                # Where nothing moves, no request is to blame.
                if moved and timed.spent_s[name] >= self._limit_s:
                    timed.fail(RequestTimeout(self._late(name)))

    def _late(self, name: str) -> str:
        return (
            f"request {name!r} got no token in {self._limit_s:g} s in which others got some (`request_timeout_s`; queueing and "
            "pauses do not count) and was ended; allow more time"
        )

    def _stalled(self, num_requests: int) -> str:
        return (
            f"generation stands still: no token in {self._limit_s:g} s (`request_timeout_s`) while {num_requests} "
            "requests ran; `stop` the engine and start another"
        )
