"""Starting vLLM and knowing which processes came of it, so that stopping leaves none behind.

The environment vLLM reads when it is imported, and in the processes it starts.

It is a value here: an entrypoint (or the actor that holds an engine) applies it before anything imports vLLM.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportMissingTypeStubs=false
# vLLM types its interfaces in part.

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
import warnings
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat_rollout.errors import ConfigError, EngineStateError
from offbeat_rollout.toolkit.folders import HeldFolder
from offbeat_rollout.vllm.plugin import ENVIRONMENT_VARIABLE, die_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from multiprocessing.process import BaseProcess

    from vllm.v1.engine.async_llm import AsyncLLM

    from offbeat_rollout.config import RolloutConfig
    from offbeat_rollout.vllm.config import VllmConfig


# Without these an engine would be slow to start, reach for the network, or come up in another form than configured.
_NEEDED = ("HF_HUB_OFFLINE", "TORCHDYNAMO_DISABLE", "VLLM_ENABLE_V1_MULTIPROCESSING")


def vllm_environment(config: RolloutConfig, cores: Sequence[int] = ()) -> dict[str, str]:
    """Return what the process that will hold a `VllmEngine` must have in its environment.

    `cores` are the CPU cores the replica should keep to (CPU only). A single worker then runs inside vLLM's engine
    process, which is a fork: vLLM is imported once, and no step crosses a process border more than once.
    """
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        ENVIRONMENT_VARIABLE: "1",
    }
    if config.device == "cpu":
        environment["OMP_NUM_THREADS"] = str(config.cpu_threads)
        # vLLM on CPU would compile one sampler kernel at the first request with log-probs, which takes 20 s.
        environment["TORCHDYNAMO_DISABLE"] = "1"
        if config.tensor_parallel_size == 1:
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        else:
            # By itself vLLM gives each worker a NUMA node of its own, and refuses where there are fewer.
            environment["VLLM_CPU_OMP_THREADS_BIND"] = _binding(config, cores) if cores else "nobind"
    return environment


def check_environment(config: RolloutConfig, environment: Mapping[str, str]) -> None:
    """Refuse an environment that lacks what this configuration needs.

    Raises:
        ConfigError: naming each variable with the value it should have.
    """
    wanted = vllm_environment(config)
    missing = [
        f"{name}={wanted[name]}"
        for name in _NEEDED
        if name in wanted and environment.get(name) != wanted[name]
    ]
    if missing:
        raise ConfigError(
            f"vllm: the environment lacks {' '.join(missing)}; set what `vllm_environment(config)` returns before the "
            "process starts (an entrypoint with os.environ.update, an actor through its runtime environment)"
        )


def _binding(config: RolloutConfig, cores: Sequence[int]) -> str:
    """Return vLLM's notation: cores of one worker joined by commas, workers by bars."""
    workers = config.tensor_parallel_size
    if len(cores) < workers:
        raise ConfigError(
            f"vllm: {len(cores)} cores for {workers} tensor-parallel workers; each needs at least one"
        )
    width = len(cores) // workers
    shares = [cores[index * width : (index + 1) * width] for index in range(workers)]
    return "|".join(",".join(str(core) for core in share) for share in shares)


_STOP_TIMEOUT_S = 20.0
_GRACE_S = 5.0  # for a process that was asked to end
_KILL_TIMEOUT_S = 5.0
_PROCESS_NAMES = "EngineCore"  # how vLLM's begin
_SOCKETS = "VLLM_RPC_BASE_PATH"
_FOLDERS = "offbeat-vllm-held-"
_ROOM_BYTES = 107 - len(f"/{_FOLDERS}abcdefgh/") - 36  # of a socket's name, unix(7): vLLM's are UUIDs

# One engine of a process comes up at a time: what is new among the children meanwhile is then its own.
_starting = threading.Lock()


class Launched:
    """One engine and its child processes. Workers below those end with their parent by vLLM's own means."""

    def __init__(self, build: Callable[[str], AsyncLLM]) -> None:
        """Prepare; `build` blocks until the engine can generate and may start processes named as vLLM's are.

        It is given a folder, which is there until `end`.
        """
        self._build = build
        fits = len(os.fsencode(tempfile.gettempdir())) <= _ROOM_BYTES
        self._folder = HeldFolder(Path(tempfile.gettempdir() if fits else "/tmp"), _FOLDERS)
        # Over the three below, which `end` and `run` change from different threads.
        self._guard = threading.Lock()
        self._engine: AsyncLLM | None = None
        self._ended = False
        self._others: frozenset[int | None] | None = None  # children that were there before; None: not begun
        self._children: list[BaseProcess] | None = None  # ours, once the engine is up

    def run(self, timeout_s: float) -> AsyncLLM:
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
            engine = self._build(str(self._folder.path))
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
            again, self._ended = self._ended, True
            engine, self._engine = self._engine, None
            children = self.children()
        if engine is not None:
            _shut_down(engine)
        _end(children, grace_s=0 if engine is None else _GRACE_S)
        if not again:
            self._folder.close()

    def _refuse_if_ended(self) -> None:
        if self._ended:
            raise EngineStateError("the engine was ended while it came up")


def build_vllm(config: VllmConfig, sockets: str) -> AsyncLLM:
    """Return a running `AsyncLLM` for `config`, which was checked; blocks for seconds. Its sockets lie in the folder `sockets`."""
    from vllm.v1.engine import utils
    from vllm.v1.engine.async_llm import AsyncLLM

    from offbeat_rollout.vllm.arguments import engine_args

    variables, usual = os.environ, utils.get_mp_context  # noqa: TID251 -- vLLM reads it here and nowhere else
    before = variables.get(_SOCKETS)
    variables[_SOCKETS] = sockets
    if config.device == "cpu" and config.tensor_parallel_size == 1:  # elsewhere vLLM decides
        utils.get_mp_context = Forking
    try:
        return AsyncLLM.from_engine_args(engine_args(config))
    finally:
        utils.get_mp_context = usual
        variables.pop(_SOCKETS)
        variables.update({} if before is None else {_SOCKETS: before})


class Forked(ForkProcess):
    """vLLM's process as a fork of this one, which has imported vLLM: an interpreter of its own would do so again, for ten seconds."""

    def start(self) -> None:
        """Fork a new thread: the child has a copy of that one alone, and one that has computed waits for OpenMP threads it had."""
        thread = threading.Thread(target=super().start, name="fork")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, since there are threads
            thread.start()
            thread.join()

    def run(self) -> None:
        """Do the work, as nobody's event loop."""
        signal.set_wakeup_fd(-1)  # that of the parent would take the child's signals for its own
        die_with_parent()  # vLLM loads its plugins once, and has in the parent
        super().run()


class Forking(ForkContext):
    """Starts processes that are forks; see `Forked`."""

    Process = Forked


def _shut_down(engine: AsyncLLM) -> None:
    with contextlib.suppress(Exception):  # a dead engine may fail at its own; its processes are ended below
        engine.shutdown(timeout=_STOP_TIMEOUT_S)


def _end(children: list[BaseProcess], grace_s: float) -> None:
    for child in children:
        child.join(grace_s)
        if child.is_alive():
            child.kill()
            child.join(_KILL_TIMEOUT_S)
