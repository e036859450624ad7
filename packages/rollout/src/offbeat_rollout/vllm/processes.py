"""Starting vLLM and knowing which processes came of it, so that stopping leaves none behind."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportMissingTypeStubs=false
# vLLM types its interfaces in part.

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from offbeat_rollout.errors import EngineStateError

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.process import BaseProcess

    from vllm.v1.engine.async_llm import AsyncLLM

    from offbeat_rollout.vllm.config import VllmConfig

_STOP_TIMEOUT_S = 20.0
_GRACE_S = 5.0  # for a process that was asked to end
_KILL_TIMEOUT_S = 5.0
_PROCESS_NAMES = "EngineCore"  # how vLLM's begin

# One engine of a process comes up at a time: what is new among the children meanwhile is then its own.
_starting = threading.Lock()


class Stoppable(Protocol):
    """What a build leaves behind, say an `AsyncLLM`."""

    def shutdown(self, timeout: float | None = None) -> None:
        """End it, waiting at most `timeout` seconds."""
        ...


E = TypeVar("E", bound=Stoppable)


class Launched(Generic[E]):
    """One engine and its child processes. Workers below those end with their parent by vLLM's own means."""

    def __init__(self, build: Callable[[], E]) -> None:
        """Prepare; `build` blocks until the engine can generate and may start processes named as vLLM's are."""
        self._build = build
        self._guard = (
            threading.Lock()
        )  # over the three below, which `end` and `run` change from different threads
        self._engine: E | None = None
        self._ended = False
        self._others: frozenset[int | None] | None = None  # children that were there before; None: not begun
        self._children: list[BaseProcess] | None = None  # ours, once the engine is up

    def run(self, timeout_s: float) -> E:
        """Build the engine. Runs in a thread: it takes tens of seconds, of which `timeout_s` may go to waiting its turn.

        Raises:
            EngineStateError: another engine of this process was starting all that time, or `end` was called.
        """
        if not _starting.acquire(timeout=timeout_s):
            raise EngineStateError(
                f"another engine of this process was still starting after {timeout_s} s (`start_timeout_s`); "
                "start engines one after the other, or each in a process of its own"
            )
        try:
            with self._guard:
                self._refuse_if_ended()
                self._others = frozenset(child.pid for child in multiprocessing.active_children())
            engine = self._build()
            with self._guard:
                self._children = self.children()
                if not self._ended:
                    self._engine = engine
        finally:
            _starting.release()
        if self._engine is None:  # nobody waits for it any more
            _shut_down(engine)
            self._refuse_if_ended()
        return engine

    def children(self) -> list[BaseProcess]:
        """Return the processes that are this engine's, also while it comes up."""
        if self._children is not None:
            return list(self._children)
        if self._others is None:
            return []
        return [
            child
            for child in multiprocessing.active_children()
            if child.pid not in self._others and child.name.startswith(_PROCESS_NAMES)
        ]

    def end(self) -> None:
        """End the engine and its processes, up or still coming up; safe to call twice."""
        with self._guard:
            self._ended = True
            engine, self._engine = self._engine, None
            children = self.children()
        if engine is not None:
            _shut_down(engine)
        _end(children, grace_s=0 if engine is None else _GRACE_S)

    def _refuse_if_ended(self) -> None:
        if self._ended:
            raise EngineStateError("the engine was ended while it came up")


def build_vllm(config: VllmConfig) -> AsyncLLM:
    """Return a running `AsyncLLM` for `config`, which was checked; blocks for tens of seconds."""
    from vllm.v1.engine.async_llm import AsyncLLM

    from offbeat_rollout.vllm.arguments import engine_args

    return AsyncLLM.from_engine_args(engine_args(config))


def _shut_down(engine: Stoppable) -> None:
    with contextlib.suppress(
        Exception
    ):  # a dead engine may fail at its own goodbye; its processes are ended below
        engine.shutdown(timeout=_STOP_TIMEOUT_S)


def _end(children: list[BaseProcess], grace_s: float) -> None:
    for child in children:
        child.join(grace_s)
        if child.is_alive():
            child.kill()
            child.join(_KILL_TIMEOUT_S)
