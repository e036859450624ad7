"""What a rollout engine takes, as a member of weight sync."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from offbeat_ckptsync.control.members import ControlMember, ReplicaMember, local_member
from offbeat_ckptsync.control.ranks import Mailbox
from offbeat_ckptsync.errors import TransferError
from offbeat_ckptsync.member.receiver import Receiver
from offbeat_ckptsync.member.sinks import specs_of
from offbeat_ckptsync.seams import WeightSink
from offbeat_ckptsync.values import Seat
from offbeat_rollout import RolloutFeature
from offbeat_rollout.interface import TensorUpdates, WorkerUpdates
from offbeat_trainer.errors import PlanRefused
from offbeat_trainer.weights.canary import EngineCanary
from offbeat_trainer.weights.gates import EngineGate, SharedGate, TokenCount

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from offbeat_ckptsync import Manifest, SyncConfig
    from offbeat_ckptsync.control.ranks import Control
    from offbeat_rollout import RolloutEngine


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
        prepare_timeout_s=sync.transfer_timeout_s,
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


class EngineSink(WeightSink):
    """An engine that loads tensors between two tokens of its own accord."""

    def __init__(
        self,
        updates: TensorUpdates,
        manifest: Manifest,
        loop: asyncio.AbstractEventLoop,
        *,
        timeout_s: float,
        prepare_timeout_s: float,
        recompute_kv: bool = False,
    ) -> None:
        """Load by `updates`, whose coroutines run in `loop`, within `timeout_s`; see `make_member` for the rest."""
        self._prepare_timeout_s = prepare_timeout_s
        self._recompute_kv = recompute_kv
        self._updates = updates
        self._manifest = manifest
        self._loop = loop
        self._timeout_s = timeout_s

    def expected(self) -> Manifest:
        """Return what the engine holds."""
        return self._manifest

    def prepare(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Let the engine hash them, say: what grows with the model is no part of the flip."""
        limit_s = self._prepare_timeout_s
        prepared = asyncio.run_coroutine_threadsafe(self._updates.prepare(tensors, version), self._loop)
        try:
            prepared.result(limit_s)
        except TimeoutError as error:
            prepared.cancel()
            raise TransferError(
                f"preparing version {version} took longer than {limit_s:g} s; raise `sync.transfer_timeout_s`"
            ) from error

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Hand the tensors to the engine, from a thread that is not its event loop's."""
        load = self._updates.load(tensors, version, recompute_kv=self._recompute_kv)
        asyncio.run_coroutine_threadsafe(load, self._loop).result(self._timeout_s)

    adopts_private = False  # else no copy would stay for joiners

    def adopt(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> bool:
        """Let the engine serve shared memory where it can; from a thread that is not its event loop's."""
        adopt = self._updates.adopt(tensors, version, recompute_kv=self._recompute_kv)
        return asyncio.run_coroutine_threadsafe(adopt, self._loop).result(self._timeout_s)
