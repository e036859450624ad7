"""Members and sources elsewhere, over anything that carries JSON objects (a socket, Ray), and what answers over there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offbeat_ckptsync.errors import WireError
from offbeat_ckptsync.seams import Member, Source
from offbeat_ckptsync.toolkit.ops import (
    MEMBER_OPS,
    SOURCE_OPS,
    answer,
    answer_in,
    failure,
    request_of,
    value_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from offbeat_ckptsync.toolkit.ops import Call, Table
    from offbeat_ckptsync.toolkit.wire import Json
    from offbeat_ckptsync.values import Registration


class Operations:
    """Does the operations of a member, of a source, or of both; a member that keeps copies is a source of those."""

    def __init__(self, name: str, *, member: Member | None = None, source: Source | None = None) -> None:
        """Answer as `name`, which messages and the registration hold."""
        self.name = name
        self._member = member
        self._source = member.peer() if source is None and member is not None else source

    @property
    def role(self) -> str:
        """What it is, in the words of a `Registration`."""
        sides = (("member", self._member), ("source", self._source))
        return "+".join(role for role, side in sides if side is not None)

    async def __call__(self, op: str, request: Mapping[str, object]) -> Json:
        """Do `op` and return its outcome; what fails is one, too."""
        try:
            table, side = (SOURCE_OPS, self._source) if op in SOURCE_OPS else (MEMBER_OPS, self._member)
            if side is None:
                raise WireError(f"{self.name} is {self.role or 'nothing'} and does no {op!r}")
            return {"ok": await answer(side, table, op, request)}
        except Exception as error:  # noqa: BLE001 -- told to who asked
            return failure(error)


def _carried(table: Table, op: str) -> Any:  # noqa: ANN401 -- a method as the seam declares it
    async def method(self: CarriedMember | CarriedSource, *values: object) -> object:
        outcome = await self.call(op, request_of(table, op, values))
        return value_of(table, op, answer_in(outcome, where=op))

    method.__doc__ = f"See `{'Source' if table is SOURCE_OPS else 'Member'}.{table[op].method or op}`."
    return method


class CarriedMember(Member):
    """A member elsewhere: what it is asked is carried there, and raises what the carrier or the member raises."""

    def __init__(self, registration: Registration, call: Call) -> None:
        """Ask by `call` whoever registered so; the manager sets the deadlines."""
        self.registration = registration
        self.call = call

    @property
    def name(self) -> str:
        """The name it registered under."""
        return self.registration.name

    begin = _carried(MEMBER_OPS, "begin")
    transfer = _carried(MEMBER_OPS, "transfer")
    verify = _carried(MEMBER_OPS, "verify")
    flip = _carried(MEMBER_OPS, "flip")
    commit = _carried(MEMBER_OPS, "commit")
    abort = _carried(MEMBER_OPS, "abort")
    status = _carried(MEMBER_OPS, "status")
    fence = _carried(MEMBER_OPS, "fence")
    canary = _carried(MEMBER_OPS, "canary")

    def peer(self) -> Source | None:
        """Return it as a source, where it registered as one."""
        return CarriedSource(lambda: self.call) if "source" in self.registration.role else None


class CarriedSource(Source):
    """A source elsewhere; who it is may change between syncs (a trainer that was started anew)."""

    def __init__(self, find: Callable[[], Call]) -> None:
        """Ask by the call that `find` returns; it raises `TransferError` where there is none."""
        self._find = find

    @property
    def call(self) -> Call:
        """How it is asked now."""
        return self._find()

    offer = _carried(SOURCE_OPS, "offer")
    send = _carried(SOURCE_OPS, "send")
    abort = _carried(SOURCE_OPS, "abort_send")
    reference = _carried(SOURCE_OPS, "reference")
