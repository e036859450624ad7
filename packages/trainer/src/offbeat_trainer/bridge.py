"""Where the words of two packages meet: what an engine exports, and what a rollout engine takes, as weight sync."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, cast

from offbeat_ckptsync.control.members import ControlMember, ReplicaMember, local_member
from offbeat_ckptsync.control.ranks import Mailbox
from offbeat_ckptsync.member.receiver import Receiver
from offbeat_ckptsync.member.sinks import specs_of
from offbeat_ckptsync.seams import CACHE, GenerationGate, WeightSink, WeightSource
from offbeat_ckptsync.values import Seat
from offbeat_rollout import GenerateRequest, PauseMode, RolloutFeature, SamplingParams
from offbeat_rollout.interface import TensorUpdates, WorkerUpdates
from offbeat_trainer.errors import PlanRefused

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from offbeat_ckptsync import Manifest, SyncConfig
    from offbeat_ckptsync.control.ranks import Control
    from offbeat_engine import Engine
    from offbeat_rollout import RolloutEngine


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


async def make_member(
    name: str,
    engine: RolloutEngine,
    sync: SyncConfig,
    *,
    recompute_kv: bool = False,
    shared: SharedGate | None = None,
) -> ReplicaMember:
    """Return the receiving end for a started `engine`: driven by its own update calls, or loaded in this process.

    An engine of `TensorUpdates` takes tensors here; one of `WorkerUpdates` runs the receiver in its workers.
    With `recompute_kv`, what is under way at a flip goes on from keys and values of the new weights. With `shared`, the
    gate of an engine on the trainer's devices, the engine rests for the whole sync.

    Raises:
        PlanRefused: the engine cannot compute keys and values again.
    """
    if recompute_kv and RolloutFeature.RECOMPUTE_KV not in engine.capabilities().features:
        raise PlanRefused(
            f"{engine.capabilities().adapter} cannot compute keys and values again; use mode.recompute_kv=false, or "
            "mode.partial=abort"
        )
    canary = EngineCanary(engine) if sync.canary else None
    match engine.weight_updates():
        case TensorUpdates() as updates:
            receiver = await _receiver(name, updates, sync, recompute_kv=recompute_kv)
            return local_member(
                receiver, sync, gate=TokenCount(engine) if shared is None else shared, canary=canary
            )
        case WorkerUpdates() as updates:
            control = _control(updates, recompute_kv=recompute_kv)
            gate = EngineGate(engine) if shared is None else shared
            return ControlMember(name, control, mailbox=Mailbox(), config=sync, gate=gate, canary=canary)


async def _receiver(name: str, updates: TensorUpdates, sync: SyncConfig, *, recompute_kv: bool) -> Receiver:
    sink = EngineSink(
        updates,
        specs_of(await updates.specs()),
        asyncio.get_running_loop(),
        timeout_s=sync.flip_timeout_s,
        recompute_kv=recompute_kv,
    )
    return Receiver(Seat(member=name), sink, allow_cast=sync.allow_cast)


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


class EngineCanary:
    """Asks an engine for the log-prob of the likeliest next token after four fixed prompts.

    One token each: the largest log-prob changes as little as the arithmetic does, while a longer greedy answer may take
    another turn at a near tie. Prompts of four tokens fill no block of a prefix cache, so none is answered from
    keys and values of the version before.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        """Ask `engine`, which must have room for four requests within the deadline of the commit."""
        self._engine = engine

    async def __call__(self) -> list[float]:
        """Return four log-probs, in nats."""
        requests = [
            GenerateRequest(
                request_id=f"canary-{uuid.uuid4().hex}",
                prompt_ids=tuple(range(first, first + 4)),
                sampling=SamplingParams(max_tokens=1, temperature=0.0),
            )
            for first in (1, 5, 9, 13)
        ]
        return [float(answer.logprobs[0]) for answer in await self._engine.generate_many(requests)]


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
        load = self._updates.load(tensors, version, recompute_kv=self._recompute_kv)
        asyncio.run_coroutine_threadsafe(load, self._loop).result(self._timeout_s)

    adopts_private = False  # else no copy would stay for joiners and deltas

    def adopt(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> bool:
        """Let the engine serve shared memory where it can; from a thread that is not its event loop's."""
        adopt = self._updates.adopt(tensors, version, recompute_kv=self._recompute_kv)
        return asyncio.run_coroutine_threadsafe(adopt, self._loop).result(self._timeout_s)
