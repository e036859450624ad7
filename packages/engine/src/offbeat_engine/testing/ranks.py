"""Real ranks for tests: processes that share a gloo group, with a deadline and errors carried back."""

from __future__ import annotations

import importlib
import importlib.util
import io
import multiprocessing as mp
import os
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import timedelta
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from offbeat_engine.errors import EngineError
from offbeat_engine.toolkit.world import World

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from types import TracebackType

# What a rank would import before its first step, in this order; what is not installed is passed over.
PRELOADED = [
    "offbeat_engine.fsdp2",
    "offbeat_engine.testing.probes",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "accelerate",
    "peft",
]

MAX_THREADS = 100


class RanksError(EngineError, RuntimeError):
    """A rank raised, died or did not answer in time; the message holds its traceback."""


class RankPool:
    """`num_ranks` fresh processes in one gloo group; use as a context manager and call `run` as often as needed.

    Each process computes with one thread. After an error (`failed`) the group is in an unknown state: make another pool.
    """

    def __init__(self, num_ranks: int, timeout_s: float = 600.0, device: str = "cpu") -> None:
        """Start the processes; `timeout_s` bounds the start, every `run` (which may be changed later) and every collective.

        With `device` "cuda" rank r computes on GPU r and the group is NCCL's.
        """
        self.num_ranks = num_ranks
        self.failed = False
        self.timeout_s = timeout_s
        # The store takes any free port; ranks learn which one from here.
        self._store = dist.TCPStore(
            "127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
        context = _context(device)
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            world = World(rank=rank, size=num_ranks, local_rank=rank, device=device, timeout_s=timeout_s)
            process = context.Process(
                target=_serve,
                args=(world, self._store.port, timeout_s, theirs),
                name=f"rank-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, fn: Callable[..., Any], *args: object) -> list[Any]:
        """Call `fn(world, *args)` on every rank and return the results in rank order.

        `fn` is a module-level function. Its module, and those of the arguments' types and of the types in
        dataclasses among them, may be test files that cannot be imported by name.

        Raises:
            RanksError: naming every rank that raised or did not answer before the deadline.
        """
        payload = (_homes(fn, args), _pack((fn, args)))
        for pipe in self._pipes:
            pipe.send(payload)
        deadline = time.monotonic() + self.timeout_s
        answers = [self._answer(rank, deadline) for rank in range(self.num_ranks)]
        self.failed = any(text is not None for text, _ in answers)
        failures = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text is not None]
        if failures:
            raise RanksError("\n".join(failures))
        return [result for _, result in answers]

    @property
    def is_spent(self) -> bool:
        """Whether the processes are out of step, or hold so many gloo groups that these take the machine's time.

        A group has three threads, one of which wakes every ten milliseconds; Megatron makes some twenty groups a layout.
        """
        return self.failed or any(_num_threads(process.pid) > MAX_THREADS for process in self._processes)

    def _answer(self, rank: int, deadline: float) -> tuple[str | None, Any]:
        try:
            if not self._pipes[rank].poll(max(0.0, deadline - time.monotonic())):
                return f"no answer within {self.timeout_s:g} s; it may wait for a rank that raised", None
            return _unpack(self._pipes[rank].recv_bytes())
        except EOFError:
            self._processes[rank].join(1.0)
            return f"died with exit code {self._processes[rank].exitcode}", None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """As `stop`."""
        self.stop()

    def release(self) -> None:
        """Ask the processes to leave, and do not wait for it."""
        for pipe in self._pipes:
            pipe.close()

    def stop(self) -> None:
        """Ask the processes to leave, and end those that do not within five seconds; safe to call twice."""
        self.release()
        # After a failure some wait for others in vain.
        deadline = time.monotonic() + (0.5 if self.failed else 5.0)
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(5.0)


def _num_threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:  # it has ended, or this is no Linux
        return 0


def run_ranks(fn: Callable[..., Any], num_ranks: int, *args: object, timeout_s: float = 600.0) -> list[Any]:
    """Start `num_ranks` processes, call `fn(world, *args)` on each, and return the results in rank order."""
    with RankPool(num_ranks, timeout_s) as pool:
        return pool.run(fn, *args)


def _context(device: str) -> Any:
    """Return how ranks are started: forked off a process that has loaded the libraries, where that is safe.

    A fresh interpreter takes seconds to import them, a fork milliseconds. That process computes nothing and starts no
    thread, so a fork of it is as good as new; but it may have looked for GPUs, and CUDA does not survive a fork.
    """
    if device == "cuda":
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _homes(fn: Callable[..., Any], args: tuple[object, ...]) -> dict[str, str | None]:
    """Return module names and files of everything a rank must import to unpickle `fn` and `args`."""
    things: list[object] = [fn, *args]
    for arg in args:
        if is_dataclass(arg) and not isinstance(arg, type):
            things += [getattr(arg, entry.name) for entry in fields(arg)]
    owners = [thing if isinstance(thing, type | FunctionType) else type(thing) for thing in things]
    modules = {owner.__module__: sys.modules.get(owner.__module__) for owner in owners}
    return {name: getattr(module, "__file__", None) for name, module in modules.items()}


def _serve(world: World, port: int, timeout_s: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False, timeout=timeout)
    if world.device == "cuda":
        # `deterministic` asks for it before the first product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # noqa: TID251
        torch.cuda.set_device(world.local_rank)
    backend = "nccl" if world.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    while True:
        try:
            homes, packed = pipe.recv()
        except EOFError:
            break
        # Plain bytes: multiprocessing's own way shares tensors by file descriptor, one each, and those run out.
        pipe.send_bytes(_call(world, homes, packed))
    world.leave()


def _call(world: World, homes: dict[str, str | None], packed: bytes) -> bytes:
    try:
        for module, path in homes.items():
            _make_importable(module, path)
        fn, args = _unpack(packed)
        return _pack((None, fn(world, *args)))
    except Exception:  # noqa: BLE001 whatever the test's function raised is its answer
        return _pack((traceback.format_exc(), None))


def _pack(thing: object) -> bytes:
    """Return `thing` pickled; torch's own way writes all its tensors at once, pickle's opens a file for each."""
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def _unpack(packed: bytes) -> Any:
    return torch.load(io.BytesIO(packed), weights_only=False)


def _make_importable(module: str, path: str | None) -> None:
    """Load the file of `module` under its name where no import would find it (a test file, say)."""
    if module in sys.modules or path is None:
        return
    with suppress(ImportError):  # an installed module is imported as everyone does it, with its package
        importlib.import_module(module)
        return
    spec = importlib.util.spec_from_file_location(module, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    parent = module.rpartition(".")[0]
    while parent:  # pickle imports the first part of a dotted name, so the parents must exist too
        sys.modules.setdefault(parent, ModuleType(parent))
        parent = parent.rpartition(".")[0]
    sys.modules[module] = loaded
    spec.loader.exec_module(loaded)
