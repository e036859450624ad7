"""Generation replicas: the process around a rollout engine and its end of the weight sync, and how the driver starts and speaks to one.

Machines that do not have the model's folder get its files from the driver's, piece by piece.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import ray

from offbeat_ckptsync.control.carried import Operations
from offbeat_ckptsync.values import Registration
from offbeat_rollout import Completion, RolloutError
from offbeat_rollout.toolkit.registry import adapter_class, adapter_environment
from offbeat_rollout.toolkit.slots import Replica
from offbeat_trainer.algorithms.learner import carried
from offbeat_trainer.cluster.placement import own_host, this_node
from offbeat_trainer.cluster.ray_runtime import CPUS_PER_PROCESS
from offbeat_trainer.cluster.waits import answer, redirect_output
from offbeat_trainer.cluster.weights import SharedGate, make_member
from offbeat_trainer.errors import PlanRefused, together

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence

    from offbeat_ckptsync import SyncConfig
    from offbeat_ckptsync.toolkit.wire import Json
    from offbeat_rollout import GenerateRequest, RolloutEngine
    from offbeat_trainer.cluster.placement import ClusterSpec, PlacementGroups, RolloutSpec
    from offbeat_trainer.watch.watchdog import Timeline


PIECE_BYTES = 16 << 20


class Supplies:
    """Brings `folder` to a machine once, however many replicas run there."""

    def __init__(self, folder: str, timeout_s: float) -> None:
        """Each piece has `timeout_s`."""
        self._folder = Path(folder)
        self._timeout_s = timeout_s
        self._one_at_a_time: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def bring(self, name: str, handle: Any, node: str) -> None:  # noqa: ANN401
        """Let replica `name`, on machine `node`, find the folder under the path that it has here; moves nothing if it does."""
        async with self._one_at_a_time[node]:
            if not await self._ask(name, handle.lacks_model.remote(), "look for the model"):
                return
            pieces = _pieces(self._folder)
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                await self._ask(name, handle.take_piece.remote(*piece), f"take {piece[0]} of the model")
            await self._ask(name, handle.take_piece.remote("", None), "put the model in place")

    async def _ask(self, name: str, call: Any, what: str) -> Any:  # noqa: ANN401
        return await answer(call, owner=name, what=what, timeout_s=self._timeout_s)


def take_piece(folder: Path, name: str, piece: bytes | None) -> None:
    """Append `piece` to file `name` of what will be `folder`; without a name it begins, and with None it is put in place.

    What somebody else has put in its place stays. What a process of this id left, which was killed as it took pieces, goes.

    Raises:
        PlanRefused: it cannot be written here.
    """
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        if piece is None:
            if folder.exists():
                shutil.rmtree(beside)
            else:
                beside.rename(folder)
            return
        if not name:
            shutil.rmtree(beside, ignore_errors=True)
            return
        target = beside / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("ab") as file:
            file.write(piece)
    except OSError as error:
        raise PlanRefused(
            f"the model in {folder} is not on this machine and could not be brought here ({error}): put it there, or use a "
            "folder that all machines share"
        ) from error


def _pieces(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the beginning, then (relative name, bytes) of every file, in order; a file without bytes has one piece."""
    yield "", b""
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        with path.open("rb") as file:
            piece = file.read(PIECE_BYTES)
            yield str(path.relative_to(folder)), piece
            while piece := file.read(PIECE_BYTES):
                yield str(path.relative_to(folder)), piece


LINGER_S = 0.1
"""How long a completion waits for others to travel with: a message costs as much time as hundreds of tokens."""

Ended: TypeAlias = tuple[int, Completion | RolloutError]
"""The place of a batch in its message, and a completion of it or what ended it."""


class ReplicaWorker:
    """Serves completions and takes weights. Its methods are coroutines of one event loop; both go on side by side."""

    def __init__(
        self, name: str, spec: RolloutSpec, sync: SyncConfig, log_path: str, *, shared: bool = False
    ) -> None:
        redirect_output(log_path)
        self._name = name
        self._sync = replace(sync, host=own_host())  # it hands its copy on to joiners
        self._model_path = spec.rollout.model_path
        self._recompute_kv = spec.recompute_kv
        self._engine: RolloutEngine = adapter_class(spec.adapter_name)(spec.rollout)
        self._gate = SharedGate(self._engine) if shared else None

    def node(self) -> str:
        """Return the address of this replica's machine."""
        return this_node()

    def lacks_model(self) -> bool:
        """Say whether the model's folder is not on this machine."""
        return not Path(self._model_path).exists()

    def take_piece(self, name: str, piece: bytes | None) -> None:
        """Append to file `name` of the model's folder, which appears, whole, after the last one; see `supplies`."""
        take_piece(Path(self._model_path), name, piece)

    async def start(self) -> Registration:
        """Load the model; then the replica can generate and take weights, and says so: this is how it joins."""
        await self._engine.start()
        member = await make_member(
            self._name, self._engine, self._sync, recompute_kv=self._recompute_kv, shared=self._gate
        )
        self._operations = Operations(self._name, member=member)
        return Registration(name=self._name, role=self._operations.role, host=this_node())

    async def rest(self) -> None:
        """Leave the devices to the trainer until the next sync; see `SharedGate.rest`."""
        assert self._gate is not None, "only a replica that shares its devices rests"
        await self._gate.rest()

    async def completions(self, batches: Sequence[Sequence[GenerateRequest]]) -> AsyncGenerator[list[Ended]]:
        """Yield what ends of each of `batches`, with its place; what ends close to each other travels together.

        A batch whose requests the engine refuses, or gives up, ends with that error and leaves the others alone.
        See `RolloutEngine.generate_many`.
        """
        there: list[Ended] = []
        some = asyncio.Event()

        def ended(place: int, result: Completion | RolloutError) -> None:
            there.append((place, result))
            some.set()

        async def generate(place: int, requests: Sequence[GenerateRequest]) -> None:
            try:
                await self._engine.generate_many(requests, partial(ended, place))
            except RolloutError as error:
                ended(place, error)

        work = {f"batch {place}": generate(place, requests) for place, requests in enumerate(batches)}
        call = asyncio.create_task(together(work), name="generate batches")
        call.add_done_callback(lambda _: some.set())
        try:
            while there or not call.done():
                if not there:
                    await some.wait()  # the engine has deadlines, and the pool looks whether it moves
                await asyncio.wait((call,), timeout=LINGER_S)
                ready = there.copy()
                there.clear()
                some.clear()
                if ready:
                    yield ready
            await call
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    async def do(self, method: str, *given: Any) -> Any:  # noqa: ANN401 - as the method has them
        """Do `method` of the engine; see `RolloutEngine`."""
        return await getattr(self._engine, method)(*given)

    async def sync_op(self, op: str, request: Json) -> Json:
        """Do an operation of a weight sync and return its outcome; see `offbeat_ckptsync.toolkit.ops`."""
        return await self._operations(op, request)


_DONE = {"abort": "abort requests", "health": "say how it is"}
MAX_CALLS = 1024  # of one replica at once; a call carries a whole batch, so this is never the limit


class ReplicaStarter:
    """Starts processes for the replicas of a run: a replacement takes the bundle of the one it follows."""

    def __init__(self, spec: ClusterSpec, placement: PlacementGroups) -> None:
        """Start nothing yet."""
        self._spec = spec
        self._placement = placement
        self.names = [f"replica {index}" for index in range(spec.rollout.num_replicas)]

    def launch(self, name: str) -> Any:  # noqa: ANN401
        """Return the handle of a new process for replica `name`, which has still to load its model."""
        spec, index = self._spec, self.names.index(name)
        rollout, bundle = spec.rollout, self._placement.replica(index)
        environment = rollout.environments[index] if rollout.environments else {}
        if rollout.shares_cores:
            threads = self._placement.replica_threads(index)
            rollout = replace(rollout, rollout=replace(rollout.rollout, cpu_threads=threads))
            environment = adapter_environment(rollout.adapter_name, rollout.rollout)
        return (
            ray.remote(ReplicaWorker)
            .options(
                num_cpus=CPUS_PER_PROCESS,
                num_gpus=bundle.num_gpus,
                max_restarts=0,
                max_concurrency=MAX_CALLS,
                scheduling_strategy=bundle.strategy,
                runtime_env={"env_vars": {**environment, **bundle.environment}},
            )
            .remote(
                name,
                rollout,
                spec.train.sync,
                f"{spec.log_dir}/replica{index}.log",
                shared=self._placement.shared,
            )
        )


class _Batch:
    """The requests of one call, and who waits for their completions."""

    def __init__(self, requests: Sequence[GenerateRequest], ended: Callable[[Completion], None]) -> None:
        self.requests = requests
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended = ended
        self._num_left = len(requests)

    def take(self, result: Completion | RolloutError) -> None:
        """Hand a completion on; the last one, or an error, ends the call. Nothing is handed on once nobody waits."""
        if isinstance(result, RolloutError):
            self.end(result)
        elif not self.done.done():
            self._ended(result)
            self._num_left -= 1
            if not self._num_left:
                self.end()

    def end(self, error: Exception | None = None) -> None:
        """Let the call return, or raise `error`; harmless once it has."""
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class RemoteReplica:
    """Satisfies `Replica`: forwards to the process of one replica. A replacement's `handle` takes the old one's place."""

    abort = carried(Replica.abort)
    health = carried(Replica.health)

    def __init__(self, name: str, handle: Any, timeout_s: float, timeline: Timeline) -> None:  # noqa: ANN401
        self.handle = handle
        self._timeline = timeline
        self._name = name
        self._timeout_s = timeout_s
        self._calls = count()
        self._outgoing: list[_Batch] = []
        self._sending: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        """The replica's name."""
        return self._name

    async def generate_many(
        self, requests: Sequence[GenerateRequest], ended: Callable[[Completion], None]
    ) -> None:
        """Send `requests`, in one message with all that other calls send in this turn of the event loop.

        How long it may take is the pool's to say, by progress.
        """
        batch = _Batch(requests, ended)
        self._outgoing.append(batch)
        if len(self._outgoing) == 1:
            sending = asyncio.create_task(self._send(), name=f"complete at {self._name}")
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)
        await batch.done

    async def _send(self) -> None:
        """Send what waits and hand out what comes back; the call is drawn on the replica's track."""
        batches, self._outgoing = self._outgoing, []
        sent = [batch.requests for batch in batches]
        try:
            calls = self.handle.completions.options(num_returns="streaming").remote(sent)
            with self._timeline.overlapping(
                self._name, "complete", f"{self._name}/{next(self._calls)}", requests=sum(map(len, sent))
            ):
                while True:
                    some = await answer(
                        _next(calls), owner=self._name, what="complete a batch", timeout_s=None
                    )
                    if some is None:
                        break
                    for place, result in some:
                        batches[place].take(result)
            for batch in batches:
                batch.end()
        except Exception as error:  # noqa: BLE001 - raised by each of the calls that wait
            for batch in batches:
                batch.end(error)

    async def carry(self, method: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - see `Carrier`
        """Have the engine over there do `method`."""
        assert not kwargs
        return await self._answer(self.handle.do.remote(method, *args), _DONE[method])

    async def rest(self) -> None:
        """Let it stop generating and give its device memory back, until the next sync."""
        await self._answer(self.handle.rest.remote(), "rest")

    async def _answer(self, call: Awaitable[Any], what: str) -> Any:  # noqa: ANN401
        return await answer(call, owner=self._name, what=what, timeout_s=self._timeout_s)


async def _next(calls: AsyncIterator[Awaitable[list[Ended]]]) -> list[Ended] | None:
    """Return what comes next of a streaming call, or None at its end."""
    try:
        reference = await anext(calls)
    except StopAsyncIteration:
        return None
    return await reference
