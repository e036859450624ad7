"""The training pool as the driver sees it: the same call on every rank, one answer back."""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

import ray

from offbeat_trainer.cluster.placement import cores_of_machines, even_shares, meeting_host, this_node
from offbeat_trainer.cluster.session import CPUS_PER_PROCESS
from offbeat_trainer.cluster.train_worker import TrainWorker
from offbeat_trainer.cluster.waits import CUDA_ENVIRONMENT, LOADING_ENVIRONMENT, answer, answers, guarded
from offbeat_trainer.concurrency import together
from offbeat_trainer.errors import DeadlineExceeded, PlanRefused, WorkerGone
from offbeat_trainer.learner import CarriedPolicy

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping

    from offbeat_engine import EngineConfig
    from offbeat_trainer.cluster.placement import PlacementGroups
    from offbeat_trainer.cluster.spec import ClusterSpec
    from offbeat_trainer.watch.watchdog import Watchdog

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_DONE = {
    "update": "train on a batch",
    "supervise": "train on a supervised batch",
    "evaluate": "look at held-out rows",
    "save": "save the checkpoint of step {}",
    "load": "load a checkpoint",
    "export": "export the model",
}
_COMPUTED = ("update", "supervise", "evaluate")
"""What computes on a batch, alone on the devices."""
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
        """Build the engines of the roles on all ranks, in place of earlier ones; see `roles.role_engines`."""
        timeout_s = self._spec.cluster.start_timeout_s
        await self.call("build", engines, what="build the model", timeout_s=timeout_s)

    async def carry(self, method: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - see `Carrier`
        """See `CarriedPolicy.carry`."""
        what, computes = _DONE[method], method in _COMPUTED
        async with self._devices_alone(changes=method != "evaluate") if computes else nullcontext():
            # A batch travels once, not once a rank; in a thread, because a large one takes seconds.
            given = [await asyncio.to_thread(cast("Any", ray.put), one) for one in args] if computes else args
            return (await self._while_it_moves("do", method, kwargs, *given, what=what.format(*args)))[0]

    async def _while_it_moves(self, method: str, *args: object, what: str) -> list[Any]:
        """As `call`, for as long as a rank moves: to write a large model, or to train on a long batch, takes what it takes.

        Raises:
            DeadlineExceeded: nothing moved on any rank for the watchdog's `timeout_s`.
        """
        every = dict.fromkeys(range(self.num_ranks), args)
        with self._watchdog.waiting("the driver", RANKS, what):
            work = self.each(method, every, what=what, timeout_s=math.inf)
            return [*(await guarded(work, self._follow(), name=what)).values()]

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
        told: Callable[[], None] | None = None,
    ) -> dict[int, Any]:
        """Call `method` on some ranks, each with arguments of its own, and return the answers by rank.

        By default within `trainer.step_timeout_s`. `told` is called once the calls are made: later ones come after them.
        """
        calls = [
            getattr(self._workers[rank], method).options(concurrency_group=group).remote(*own)
            for rank, own in arguments.items()
        ]
        if told is not None:
            told()
        given = await answers(
            calls,
            owners=[self._names[rank] for rank in arguments],
            what=what,
            timeout_s=self._spec.step_timeout_s if timeout_s is None else timeout_s,
        )
        return dict(zip(arguments, given, strict=True))

    async def control(
        self, method: str, arguments: Mapping[int, tuple[object, ...]], *, what: str
    ) -> dict[int, Any]:
        """Call `method` as `each` does, beside whatever these ranks are computing."""
        return await self.each(method, arguments, what=what, group="control")

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
