"""Weight sync between engines: what a training engine exports is its source, what a rollout engine takes its member.

`LocalPublisher` syncs in one process, without Ray: one training rank (`algorithms.learner.LocalPolicy`), one replica, for reading
and for tests. Engine, replica, manager and transport are the ones a cluster uses.
"""

from __future__ import annotations

import asyncio
import uuid
from functools import partial
from typing import TYPE_CHECKING, cast

from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.control.members import ControlMember, ReplicaMember, local_member
from offbeat_ckptsync.control.ranks import Mailbox
from offbeat_ckptsync.ends.receiver import Receiver
from offbeat_ckptsync.ends.sender import LocalSource, Sender
from offbeat_ckptsync.ends.sinks import specs_of
from offbeat_ckptsync.errors import ManifestError, TransferError
from offbeat_ckptsync.seams import CACHE, GenerationGate, WeightSink, WeightSource
from offbeat_ckptsync.toolkit.threads import in_thread
from offbeat_ckptsync.values import RankId
from offbeat_rollout import (
    GenerateRequest,
    PauseMode,
    RolloutFeature,
    SamplingParams,
    ServerUpdates,
    TensorUpdates,
    UpdateRefused,
    WorkerUpdates,
)
from offbeat_trainer.errors import PlanRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator

    import torch

    from offbeat_ckptsync import Manifest, SyncConfig, SyncReport
    from offbeat_ckptsync.control.ranks import Control
    from offbeat_engine import Engine
    from offbeat_rollout import RolloutConfig, RolloutEngine


async def canary_logprobs(engine: RolloutEngine) -> list[float]:
    """Return the log-prob, in nats, of the likeliest next token after each of four fixed prompts.

    One token each: the largest log-prob changes as little as the arithmetic does, while a longer greedy answer may take
    another turn at a near tie. Prompts of four tokens fill no block of a prefix cache, so none is answered from
    keys and values of the version before. `engine` must have room for four requests within the deadline of the commit.
    """
    requests = [
        GenerateRequest(
            request_id=f"canary-{uuid.uuid4().hex}",
            prompt_ids=tuple(range(first, first + 4)),
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
        )
        for first in (1, 5, 9, 13)
    ]
    return [float(answer.logprobs[0]) for answer in await engine.generate_many(requests)]


class TokenCount(GenerationGate):
    """Closes nothing, for an engine that takes weights between two tokens by itself; tells its tokens."""

    def __init__(self, engine: RolloutEngine) -> None:
        """Stand at `engine`."""
        self._engine = engine

    async def tokens(self) -> int | None:
        """Return what the engine has made, while it is asked for some."""
        health = await self._engine.health()
        return health.tokens_made if health.num_running else None


class EngineGate(TokenCount):
    """Holds generation still while weights change; requests in flight go on afterwards where they were."""

    async def pause(self) -> None:
        """Freeze running requests."""
        await self._engine.pause(PauseMode.KEEP)

    async def resume(self) -> None:
        """Go on."""
        await self._engine.resume()


class SharedGate(EngineGate):
    """The gate of an engine on the trainer's devices: closed from the end of generation to the end of the next sync.

    Where the engine can give memory of its device back (`RolloutCapabilities.sleep_devices`), it does so while it rests;
    the weights wait in host memory. Elsewhere, on a CPU above all, closing is all there is to do.
    """

    shares_device = True

    def __init__(self, engine: RolloutEngine) -> None:
        """Close and open `engine`."""
        super().__init__(engine)
        self._sleeps = engine.config.device in engine.capabilities().sleep_devices
        self._is_closed = False
        self._is_asleep = False

    async def rest(self) -> None:
        """Stop generating and sleep; requests under way are frozen, or end as aborted where the engine sleeps."""
        await self.pause()
        await self.sleep()

    async def pause(self) -> None:
        """Freeze running requests; harmless while closed."""
        if not self._is_closed:
            await super().pause()
            self._is_closed = True

    async def resume(self) -> None:
        """Go on."""
        await super().resume()
        self._is_closed = False

    async def sleep(self) -> None:
        """See `GenerationGate`; harmless while asleep."""
        if self._sleeps and not self._is_asleep:
            await self._engine.pause(PauseMode.ABORT)  # what holds keys and values cannot sleep
            self._is_asleep = True
            await self._engine.sleep(1)

    async def wake(self, tags: list[str]) -> None:
        """See `GenerationGate`."""
        if self._sleeps:
            await self._engine.wake(tags)
            self._is_asleep = self._is_asleep and CACHE not in tags


async def make_member(
    name: str,
    engine: RolloutEngine,
    sync: SyncConfig,
    *,
    recompute_kv: bool = False,
    shared: SharedGate | None = None,
) -> ReplicaMember:
    """Return the receiving end for a started `engine`: driven by its own update calls, or loaded in this process.

    An engine of `TensorUpdates` takes tensors here; one of `WorkerUpdates` runs the receiver in its workers; the server of one of
    `ServerUpdates` is brought them by ckptsync's adapter, which first looks whether it holds its model folder.
    With `recompute_kv`, what is under way at a flip goes on from keys and values of the new weights. With `shared`, the
    gate of an engine on the trainer's devices, the engine rests for the whole sync.

    Raises:
        PlanRefused: the engine cannot compute keys and values again, or what its server holds cannot be proven.
    """
    if recompute_kv and RolloutFeature.RECOMPUTE_KV not in engine.capabilities().features:
        raise PlanRefused(
            f"{engine.capabilities().adapter} cannot compute keys and values again; use mode.partial=keep, or "
            "mode.partial=abort"
        )
    canary = partial(canary_logprobs, engine) if sync.canary else None
    match engine.weight_updates():
        case TensorUpdates() | ServerUpdates() as updates:
            if isinstance(updates, TensorUpdates):
                sink = EngineSink(
                    updates,
                    specs_of(await updates.specs()),
                    asyncio.get_running_loop(),
                    timeout_s=sync.flip_timeout_s,
                    recompute_kv=recompute_kv,
                )
            else:
                sink = await _server_sink(updates, engine, sync, recompute_kv=recompute_kv)
            receiver = Receiver(RankId(member=name), sink, allow_cast=sync.allow_cast)
            return local_member(
                receiver, sync, gate=TokenCount(engine) if shared is None else shared, canary=canary
            )
        case WorkerUpdates() as updates:
            control = _control(updates, recompute_kv=recompute_kv)
            gate = EngineGate(engine) if shared is None else shared
            return ControlMember(name, control, mailbox=Mailbox(), config=sync, gate=gate, canary=canary)


async def _server_sink(
    updates: ServerUpdates, engine: RolloutEngine, sync: SyncConfig, *, recompute_kv: bool
) -> WeightSink:
    from offbeat_ckptsync.adapters.sglang import Loading, PauseMode, ServerSink, SglangServer, Way

    loop, way = asyncio.get_running_loop(), Way(updates.way)

    def rest(version: int, load: Callable[[], None]) -> None:
        resting = updates.load(
            lambda: in_thread(load, name=f"version {version}"), version, recompute_kv=recompute_kv
        )
        loading = asyncio.run_coroutine_threadsafe(resting, loop)
        try:
            loading.result(sync.flip_timeout_s)
        except UpdateRefused as error:
            raise TransferError(str(error)) from error
        except TimeoutError:
            loading.cancel()  # the engine is torn then, and says so
            raise

    device, gpus = _ends(way, engine.config)
    loading = Loading(
        folder=updates.folder,
        pause_mode=PauseMode.RETRACT if recompute_kv else PauseMode.IN_PLACE,
        expected=specs_of(await updates.specs()),
        by=way,
        device=device,
        gpus=gpus,
    )
    sink = ServerSink(SglangServer(updates.url, api_key=updates.key), sync, loading, rest)
    is_new = engine.version == 0  # else its model folder is not what it serves
    try:
        await in_thread(
            lambda: sink.prove_start(sync.transfer_timeout_s) if is_new else sink.expected(),
            name="prove the server",
        )
    except TransferError as error:
        raise PlanRefused(
            f"weights for {updates.url} could not be proven: {error}. Use rollout=vllm"
        ) from error
    return sink


def _ends(way: str, config: RolloutConfig) -> tuple[str, tuple[str, ...]]:
    """Return the device that tensors leave from, and the server's GPUs, which are this process's first; never run on any.

    By `tensors` that is the server's first; by `group` the first that it does not have, as NCCL wants.
    """
    if way == "files" or config.device == "cpu":
        return "cpu", ()
    import torch

    from offbeat_ckptsync.transports.rendezvous import gpu_uuid

    num_ranks = config.tensor_parallel_size
    sender, num_here = num_ranks if way == "group" else 0, torch.cuda.device_count()
    if sender >= num_here:
        raise PlanRefused(
            f"`updates_by` is {str(way)!r}, which sends from a GPU beside the server's {num_ranks}, and this process sees {num_here}; "
            "use `tensors` or `files`"
        )
    return f"cuda:{sender}", tuple(gpu_uuid(index) for index in range(num_ranks))


def _control(updates: WorkerUpdates, *, recompute_kv: bool) -> Control:
    """Return `updates` as ckptsync calls them; with `recompute_kv` a new version drops the keys and values under way."""

    async def control(op: str, payload: dict[str, object]) -> None:
        match op:
            case "start":
                await updates.begin()
            case "update":
                await updates.update(payload)
            case "finish":
                await updates.finish(cast("int | None", payload.get("version")), recompute_kv=recompute_kv)
            case _:
                raise AssertionError(f"ckptsync has no operation {op!r}")

    return control


class EngineSink(WeightSink):
    """An engine that loads tensors between two tokens of its own accord."""

    def __init__(
        self,
        updates: TensorUpdates,
        manifest: Manifest,
        loop: asyncio.AbstractEventLoop,
        *,
        timeout_s: float,
        recompute_kv: bool = False,
    ) -> None:
        """Load by `updates`, whose coroutines run in `loop`, within `timeout_s`; see `make_member` for the rest."""
        self._recompute_kv = recompute_kv
        self._updates = updates
        self._manifest = manifest
        self._loop = loop
        self._timeout_s = timeout_s

    def expected(self) -> Manifest:
        """Return what the engine holds."""
        return self._manifest

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Hand the tensors to the engine, from a thread that is not its event loop's."""
        self._wait(self._updates.load(tensors, version, recompute_kv=self._recompute_kv))

    adopts_private = False  # else no copy would stay for joiners

    def adopt(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> bool:
        """Let the engine serve shared memory where it can; from a thread that is not its event loop's."""
        return self._wait(self._updates.adopt(tensors, version, recompute_kv=self._recompute_kv))

    def _wait(self, update: Coroutine[object, object, bool | None]) -> bool:
        try:
            return bool(asyncio.run_coroutine_threadsafe(update, self._loop).result(self._timeout_s))
        except UpdateRefused as error:  # nothing was written: the old weights are whole
            raise ManifestError(error.why) from error


class EngineWeights(WeightSource):
    """What a training engine exports."""

    # So an engine promises of `named_weights`, and nothing is trained while weights are sent.
    tensors_stay = True

    def __init__(self, engine: Engine) -> None:
        """Read from `engine`; every rank holds one of these."""
        self._engine = engine

    def manifest(self) -> Manifest:
        """Return the engine's manifest in ckptsync's terms."""
        return specs_of((spec.name, spec.shape, spec.dtype) for spec in self._engine.weight_manifest())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the engine's weights. A collective."""
        return self._engine.named_weights()

    def tensors_on(self, senders: Collection[int]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield the engine's weights to those ranks alone. A collective."""
        return self._engine.named_weights_on(senders)


class LocalPublisher:
    """Satisfies the trainer's `Publisher` between an engine and one replica of this process."""

    def __init__(self, manager: CheckpointEngineManager) -> None:
        """Publish through `manager`."""
        self._manager = manager

    @classmethod
    async def between(cls, engine: Engine, replica: RolloutEngine, sync: SyncConfig) -> LocalPublisher:
        """Connect `engine` to a started `replica`."""
        source = LocalSource(Sender(EngineWeights(engine), sync))
        manager = CheckpointEngineManager(source, sync)
        manager.add(await make_member("replica 0", replica, sync))
        return cls(manager)

    async def publish(self, version: int, gathered: Callable[[], None] | None = None) -> SyncReport:
        """See `Publisher.publish`."""
        return await self._manager.sync(version, gathered=gathered)
