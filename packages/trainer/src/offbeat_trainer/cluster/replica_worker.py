"""One generation replica: the process around a rollout engine and its end of the weight sync."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from offbeat_ckptsync.control.carried import Operations
from offbeat_ckptsync.values import Registration
from offbeat_rollout import Completion, RolloutError
from offbeat_rollout.registry import adapter_class
from offbeat_trainer.cluster.placement import own_host, this_node
from offbeat_trainer.cluster.supplies import take_piece
from offbeat_trainer.cluster.waits import redirect_output
from offbeat_trainer.concurrency import together
from offbeat_trainer.weights.member import SharedGate, make_member

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from offbeat_ckptsync import SyncConfig
    from offbeat_ckptsync.wire import Json
    from offbeat_rollout import GenerateRequest, RolloutEngine
    from offbeat_trainer.cluster.spec import RolloutSpec

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
        """Do an operation of a weight sync and return its outcome; see `offbeat_ckptsync.ops`."""
        return await self._operations(op, request)
