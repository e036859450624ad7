"""Ray as a carrier of a sync's operations: to the process of a replica, or to the training ranks, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from offbeat_ckptsync.control.carried import CarriedSource
from offbeat_trainer.cluster.waits import answer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from offbeat_ckptsync.ops import Call
    from offbeat_ckptsync.wire import Json
    from offbeat_trainer.cluster.train_group import TrainGroup
    from offbeat_trainer.timeline import Timeline


def to_replica(name: str, handle: Any, timeline: Callable[[], Timeline] | None = None) -> Call:  # noqa: ANN401
    """Return the way to the replica `name` in the process `handle`, which has `sync_op`; pauses are drawn on its track.

    Its waits end with the process; their deadlines are the manager's, which name the phase.
    """

    async def call(op: str, request: Json) -> Json:
        what = f"do {op!r} of a weight sync"
        outcome: Json = await answer(
            handle.sync_op.remote(op, request), owner=name, what=what, timeout_s=None
        )
        if op == "flip" and "ok" in outcome and timeline is not None:
            flip = cast("dict[str, dict[str, Any]]", outcome["ok"])["flip"]
            timeline().past(name, "paused", flip["pause_s"], version=flip["version"])
        return outcome

    return call


class TrainSource(CarriedSource):
    """The training ranks as a source: rank 0 sends while the others walk along, because gathering is a collective."""

    def __init__(self, group: TrainGroup, nodes: Mapping[str, str]) -> None:
        """Send what `group` trains to members on the machines `nodes`, by name, which may change between syncs."""
        self._group = group
        self._nodes = nodes
        super().__init__(lambda: self._carry)

    async def reference(self) -> list[float]:
        """Have no answer of its own: nobody generates there."""
        return []

    async def _carry(self, op: str, request: Json) -> Json:
        what = f"do {op!r} of a weight sync"
        if op == "offer":
            members = cast("list[str]", request["members"])
            host = self._group.host_for({name: self._nodes[name] for name in members})
            await self._group.control("meet_at", host, what="let members meet it")
        if op == "send":
            return (await self._group.call("sync_op", op, request, what=what))[0]
        return await self._group.control("sync_op", op, request, what=what)
