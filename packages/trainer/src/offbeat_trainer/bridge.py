"""Where the words of two packages meet: what an engine exports, and what a rollout engine takes, as weight sync."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, cast

from offbeat_ckptsync.mailbox import Mailbox
from offbeat_ckptsync.members import ControlMember, LocalMember
from offbeat_ckptsync.receiver import Receiver
from offbeat_ckptsync.sinks import specs_of
from offbeat_ckptsync.transports import make_transport
from offbeat_ckptsync.types import Seat
from offbeat_rollout import GenerateRequest, PauseMode, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from offbeat_ckptsync import Manifest, SyncConfig
    from offbeat_engine import Engine
    from offbeat_rollout import RolloutEngine


class EngineWeights:
    """Satisfies `WeightSource` with what a training engine exports."""

    def __init__(self, engine: Engine) -> None:
        """Read from `engine`; every rank holds one of these."""
        self._engine = engine

    def manifest(self) -> Manifest:
        """Return the engine's manifest in ckptsync's terms."""
        return specs_of((spec.name, spec.shape, spec.dtype) for spec in self._engine.weight_manifest())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the engine's weights. A collective."""
        return self._engine.named_weights()


async def make_member(name: str, engine: RolloutEngine, sync: SyncConfig) -> ControlMember | LocalMember:
    """Return the receiving end for a started `engine`: driven by its own update calls, or loaded in this process.

    An engine whose capabilities list "load_weights" takes tensors here; any other runs the receiver in its workers.
    """
    canary = EngineCanary(engine) if sync.canary else None
    if "load_weights" not in engine.capabilities().features:
        return ControlMember(
            name, engine.control, mailbox=Mailbox(), config=sync, gate=EngineGate(engine), canary=canary
        )
    answer = await engine.control("weight_specs", {})
    specs = cast("list[tuple[str, tuple[int, ...], str]]", answer["specs"])
    sink = EngineSink(engine, specs_of(specs), asyncio.get_running_loop(), sync.flip_timeout_s)
    receiver = Receiver(Seat(member=name), sink, allow_cast=sync.allow_cast)
    return LocalMember(receiver, make_transport(sync.transport, sync), canary=canary)


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
        return [answer.logprobs[0] for answer in await self._engine.generate_many(requests)]


class EngineGate:
    """Holds generation still while weights change; requests in flight go on afterwards where they were."""

    def __init__(self, engine: RolloutEngine) -> None:
        """Close and open `engine`."""
        self._engine = engine

    async def pause(self) -> None:
        """Freeze running requests."""
        await self._engine.pause(PauseMode.KEEP)

    async def resume(self) -> None:
        """Go on."""
        await self._engine.resume()


class EngineSink:
    """Satisfies `WeightSink` with an engine that loads tensors between two tokens of its own accord."""

    def __init__(
        self, engine: RolloutEngine, manifest: Manifest, loop: asyncio.AbstractEventLoop, timeout_s: float
    ) -> None:
        """Load into `engine`, whose coroutines run in `loop`, within `timeout_s`."""
        self._engine = engine
        self._manifest = manifest
        self._loop = loop
        self._timeout_s = timeout_s

    def expected(self) -> Manifest:
        """Return what the engine holds."""
        return self._manifest

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Hand the tensors to the engine, from a thread that is not its event loop's."""
        load = self._engine.control("load_weights", {"tensors": tensors, "version": version})
        asyncio.run_coroutine_threadsafe(load, self._loop).result(self._timeout_s)
