"""The training pool as the driver sees it: the same call on every rank, one answer back.

One training rank: the process around the roles.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

import ray
import torch
from torch.distributed import TCPStore

from offbeat_ckptsync.ends.sender import Sender
from offbeat_ckptsync.toolkit.ops import SENDER_OPS, answer_blocking, failure
from offbeat_engine import World, engine_class
from offbeat_trainer.algorithms.learner import CarriedPolicy, Learner
from offbeat_trainer.algorithms.roles import POLICY, Role
from offbeat_trainer.cluster.placement import (
    LOOPBACK,
    cores_of_machines,
    even_shares,
    meeting_host,
    this_node,
)
from offbeat_trainer.cluster.ray_runtime import CPUS_PER_PROCESS
from offbeat_trainer.cluster.waits import (
    CUDA_ENVIRONMENT,
    LOADING_ENVIRONMENT,
    answer,
    answers,
    guarded,
    keep_freed_memory,
    moves,
    redirect_output,
)
from offbeat_trainer.cluster.weights import EngineWeights
from offbeat_trainer.errors import DeadlineExceeded, PlanRefused, WorkerGone, together

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence

    from offbeat_ckptsync.toolkit.wire import Json
    from offbeat_engine import Engine, EngineConfig
    from offbeat_trainer.cluster.placement import ClusterSpec, PlacementGroups, TrainSpec
    from offbeat_trainer.watch.watchdog import Watchdog


log = logging.getLogger(__name__)


class TrainWorker:
    """Holds the engines of one rank. Methods run one at a time, in the order the driver calls them on all ranks."""

    def __init__(self, spec: TrainSpec, rank: int, log_path: str) -> None:
        redirect_output(log_path)
        self._spec = spec
        self._rank = rank
        self._learner: Learner | None = None
        self._sender: Sender | None = None
        self._host = LOOPBACK

    def node(self) -> str:
        """Return the address of this rank's machine."""
        return this_node()

    def sees(self, path: str) -> bool:
        """Say whether a file of the driver's is there for this rank, too."""
        return Path(path).exists()

    def address(self, host: str) -> str:
        """Open the store by which the ranks meet, and keep it; return its `host:port`.

        Raises:
            PlanRefused: `host` is not this machine's.
        """
        try:
            # By itself torch's store listens on every interface, and asks nobody who they are.
            listener = socket.create_server((host, 0))
        except OSError as error:
            raise PlanRefused(
                f"cluster.rendezvous_host={host} is no address of training rank 0's machine, {this_node()} ({error}): leave "
                "it empty, or let it be one"
            ) from error
        # It holds its port from here on: `join` finds it in this process, and nobody else can take it in between.
        port, descriptor = int(listener.getsockname()[1]), listener.detach()
        self._meeting = TCPStore(
            host, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=descriptor
        )
        return f"{host}:{port}"

    def join(self, store_address: str, threads: Sequence[int]) -> None:
        """Meet the other ranks. Called in the thread that computes, whose number of threads, by rank, is set here."""
        torch.set_num_threads(threads[self._rank])
        self._world = World.join(
            rank=self._rank,
            size=self._spec.num_ranks,
            store_address=store_address,
            device=self._spec.device,
            timeout_s=self._spec.collective_timeout_s,
        )

    def here(self) -> None:
        """Answer, from another thread than the one that computes."""

    def moves(self) -> bool:
        """Say, from another thread, whether this rank's work moves; see `process.moves`."""
        return moves()

    def device(self) -> str:
        """Return the id of this rank's GPU as CUDA_VISIBLE_DEVICES would name it; "" on CPU."""
        return ",".join(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))

    def build(self, engines: Mapping[str, EngineConfig | None]) -> None:
        """Build the engines, in place of those of an earlier call; see `TrainGroup.build`."""
        if self._learner is not None:
            self._learner.close()
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        roles = self._spec.algorithm.roles()
        built = {
            name: self._new_engine(roles[name].engine, config)
            for name, config in engines.items()
            if config is not None
        }
        self._learner = Learner(
            self._spec.algorithm,
            {
                name: Role(built[name]) if name in built else Role(built[POLICY], base=True)
                for name in engines
            },
            checkpoints=self._spec.checkpoint_dir,
            keep=self._spec.keep_checkpoints,
        )
        if self._spec.device == "cpu":
            keep_freed_memory()

    def _new_engine(self, name: str, config: EngineConfig) -> Engine:
        engine = engine_class(name or self._spec.engine_name)(config, self._world)
        engine.init_model()
        return engine

    @property
    def learner(self) -> Learner:
        """What `build` built."""
        assert self._learner is not None, "`build` comes first"
        return self._learner

    def do(self, method: str, options: Mapping[str, Any], *given: Any) -> Any:  # noqa: ANN401 - as the method has them
        """Do `method` of the learner; see `Policy`."""
        return getattr(self.learner, method)(*given, **options)

    def meet_at(self, host: str) -> None:
        """Let the members of coming syncs meet this rank at `host`."""
        if self._sender is not None and host != self._host:
            self._sender.close()  # members are elsewhere now: a replacement may start on another machine
            self._sender = None
        self._host = host

    def sync_op(self, op: str, request: Json) -> Json:
        """Do an operation of a weight sync as a rank of its source and return the outcome; see `offbeat_ckptsync.toolkit.ops.SENDER_OPS`.

        `abort_send` comes also beside a `send`.
        """
        try:
            return {"ok": answer_blocking(self._sending(), SENDER_OPS, op, request)}
        except Exception as error:
            log.exception("a weight sync failed in %r", op)
            return failure(error)

    def _sending(self) -> Sender:
        if self._sender is None:
            self._sender = Sender(
                EngineWeights(self.learner.policy), replace(self._spec.sync, host=self._host)
            )
        return self._sender


_Result = TypeVar("_Result")
_DONE = {
    "update": "train on a batch",
    "supervise": "train on a supervised batch",
    "accumulate": "compute the gradient of a batch",
    "take_step": "make an optimizer step",
    "logprobs": "compute the log-probs of a batch",
    "evaluate": "look at held-out rows",
    "save": "save the checkpoint of step {}",
    "load": "load a checkpoint",
    "export": "export the model",
}
_CHANGES = {
    "update": True,
    "supervise": True,
    "accumulate": False,
    "take_step": True,
    "logprobs": False,
    "evaluate": False,
}
"""What computes, alone on the devices, and whether it changes weights."""
RANKS = "the training ranks"


class TrainGroup(CarriedPolicy):
    """The policy of all ranks: every method runs on each; a rank that dies or is late is named in the error."""

    def __init__(
        self,
        spec: ClusterSpec,
        placement: PlacementGroups,
        *,
        standing: asyncio.Lock,
        make_room: Callable[[], Awaitable[None]] | None = None,
        watchdog: Watchdog,
    ) -> None:
        """Train in `placement`; nothing is started yet.

        `standing` is held while the weights change, and by whoever needs them to stand still. `make_room` is called under it
        before every update. `watchdog` ends work of the ranks in which nothing moves.
        """
        self._watchdog = watchdog
        self._spec = spec
        self._placement = placement
        self._make_room = make_room
        self._names = [f"training rank {rank}" for rank in range(spec.train.num_ranks)]
        self.standing = standing
        self.updates = 0

    async def start(self) -> None:
        """Reserve devices, start the ranks and let them meet."""
        spec = self._spec
        environment = CUDA_ENVIRONMENT if spec.train.device == "cuda" else LOADING_ENVIRONMENT
        await self._placement.reserve("train")
        bundles = [self._placement.rank(rank) for rank in range(spec.train.num_ranks)]
        # Threads of their own: what is copied out leaves, a sync can be given up, and a rank says that it is there, while it computes.
        groups = {"control": 1, "send": 1, "watch": 1}
        actor_class: Any = cast("Any", ray.remote)(concurrency_groups=groups)(TrainWorker)
        self._workers: list[Any] = [
            actor_class.options(
                num_cpus=CPUS_PER_PROCESS,
                num_gpus=bundle.num_gpus,
                max_restarts=0,
                scheduling_strategy=bundle.strategy,
                runtime_env={"env_vars": environment},
            ).remote(spec.train, rank, f"{spec.log_dir}/train_rank{rank}.log")
            for rank, bundle in enumerate(bundles)
        ]
        timeout_s = spec.cluster.start_timeout_s
        self._nodes = await self.call("node", what="say where it is", timeout_s=timeout_s)
        await self._require_run_folder()
        address = await answer(
            self._workers[0].address.remote(self.host_for(dict(zip(self._names, self._nodes, strict=True)))),
            owner=self._names[0],
            what="find a free port",
            timeout_s=timeout_s,
        )
        await self.call("join", address, self._threads(), what="meet the other ranks", timeout_s=timeout_s)
        self._placement.ranks_hold(
            await self.call("device", what="name its device", timeout_s=timeout_s), self._nodes
        )

    def _threads(self) -> list[int]:
        train = self._spec.train
        if train.threads_per_rank:
            return [train.threads_per_rank] * train.num_ranks
        cores = cores_of_machines()
        return even_shares(self._nodes, cores, taken=-(-train.taken_cores // len(cores)))

    def host_for(self, others: Mapping[str, str]) -> str:
        """Return the address at which processes on these machines, by name, meet rank 0.

        Raises:
            PlanRefused: the settings say loopback, and one of them is elsewhere.
        """
        return meeting_host(self._spec.cluster.rendezvous_host, self._nodes[0], others)

    async def _require_run_folder(self) -> None:
        """Ranks write checkpoints where the driver looks for them: a rank that does not see the driver's folder is refused."""
        with _seen_in(Path(self._spec.log_dir)) as seen:
            seen_by = await self.call(
                "sees",
                seen.name,
                what="look into the run folder",
                timeout_s=self._spec.cluster.start_timeout_s,
            )
        for name, node, sees in zip(self._names, self._nodes, seen_by, strict=True):
            if not sees:
                raise PlanRefused(
                    f"{name} runs on {node} and does not see the run folder of the driver's machine, {this_node()}: checkpoints "
                    "go there. Let run_dir be a folder that both share"
                )

    async def build(self, engines: Mapping[str, EngineConfig | None]) -> None:
        """Build the engines of the roles on all ranks, in place of earlier ones; see `algorithms.roles.role_engines`."""
        timeout_s = self._spec.cluster.start_timeout_s
        await self.call("build", engines, what="build the model", timeout_s=timeout_s)

    async def carry(self, method: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - see `Carrier`
        """See `CarriedPolicy.carry`; for as long as a rank moves.

        To write a large model, or to train on a long batch, takes what it takes.

        Raises:
            DeadlineExceeded: nothing moved on any rank for the watchdog's `timeout_s`.
        """
        what, computes = _DONE[method], method in _CHANGES
        async with self._devices_alone(changes=_CHANGES[method]) if computes else nullcontext():
            # A batch travels once, not once a rank; in a thread, because a large one takes seconds.
            passed = (
                [await asyncio.to_thread(cast("Any", ray.put), one) for one in args] if computes else args
            )
            what = what.format(*args)
            with self._watchdog.waiting("the driver", RANKS, what):
                work = self.call("do", method, kwargs, *passed, what=what, timeout_s=math.inf)
                return (await guarded(work, self._follow(), name=what))[0]

    async def _follow(self) -> None:
        """Tell the watchdog now and then that a rank moves; end where one is lost, which whoever waits for it says."""
        period_s = min(self._spec.cluster.health_period_s, self._watchdog.timeout_s / 4)
        while True:
            await asyncio.sleep(period_s)
            for name, worker in zip(self._names, self._workers, strict=True):
                call = worker.moves.options(concurrency_group="watch").remote()
                timeout_s = self._spec.cluster.health_timeout_s
                try:
                    moves = await answer(call, owner=name, what="say whether it moves", timeout_s=timeout_s)
                except DeadlineExceeded:
                    continue
                except WorkerGone:
                    return
                if moves:
                    self._watchdog.progress(RANKS, f"{name} moved")
                    break

    @asynccontextmanager
    async def _devices_alone(self, *, changes: bool = True) -> AsyncGenerator[None]:
        """Compute in the block, which `changes` weights or not: nobody syncs meanwhile, and who shares the devices has made room."""
        async with self.standing:
            if self._make_room is not None:
                await self._make_room()
            self.updates += changes
            yield

    async def watched(self, run: Coroutine[Any, Any, _Result]) -> _Result:
        """Return what `run` returns; end it as soon as a rank is found dead, though nothing was asked of it.

        Raises:
            WorkerGone: a rank died; found within `cluster.health_period_s`, and at once if it was at work.
            Exception: what `run` raises.
        """
        return await guarded(run, self._watch(), name="the run")

    async def _watch(self) -> None:
        while True:
            await together(
                {
                    f"watch {name}": self._look_at(name, worker)
                    for name, worker in zip(self._names, self._workers, strict=True)
                }
            )
            await asyncio.sleep(self._spec.cluster.health_period_s)

    async def _look_at(self, name: str, worker: Any) -> None:  # noqa: ANN401
        call = worker.here.options(concurrency_group="watch").remote()
        timeout_s = self._spec.cluster.health_timeout_s
        try:
            await answer(call, owner=name, what="be there for the next call", timeout_s=timeout_s)
        except DeadlineExceeded:  # whoever waits for its work has a deadline for that
            log.warning("%s has not answered for %g s; it is slow or it hangs", name, timeout_s)

    async def call(self, method: str, *args: object, what: str, timeout_s: float | None = None) -> list[Any]:
        """Call `method` on every rank and return the answers in rank order; see `each`."""
        every = dict.fromkeys(range(self.num_ranks), args)
        return [*(await self.each(method, every, what=what, timeout_s=timeout_s)).values()]

    async def each(
        self,
        method: str,
        arguments: Mapping[int, tuple[object, ...]],
        *,
        what: str,
        timeout_s: float | None = None,
        group: str | None = None,
        on_called: Callable[[], None] | None = None,
    ) -> dict[int, Any]:
        """Call `method` on some ranks, each with arguments of its own, and return the answers by rank.

        By default within `trainer.step_timeout_s`. `group` "control" is beside whatever these ranks are computing.
        `on_called` is called once the calls are made: later ones come after them.
        """
        calls = [
            getattr(self._workers[rank], method).options(concurrency_group=group).remote(*own)
            for rank, own in arguments.items()
        ]
        if on_called is not None:
            on_called()
        given = await answers(
            calls,
            owners=[self._names[rank] for rank in arguments],
            what=what,
            timeout_s=self._spec.step_timeout_s if timeout_s is None else timeout_s,
        )
        return dict(zip(arguments, given, strict=True))

    @property
    def num_ranks(self) -> int:
        """How many ranks train."""
        return self._spec.train.num_ranks

    def stop(self) -> None:
        """End the ranks; safe to call twice, and before `start` ended."""
        for worker in getattr(self, "_workers", []):
            ray.kill(worker)
        self._workers = []


def _seen_in(folder: Path) -> IO[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    return NamedTemporaryFile(dir=folder, prefix=".seen-")
