"""The operations of a sync as a table: what each takes and what it gives. What carries them carries JSON objects.

Who asks says `request_of` and reads `value_of`; who is asked says `answer`, or `answer_blocking`, with the object whose
methods they are. Between the two lies an *outcome*, {"ok": answer} or {"error": {"type", "message"}}, so that any line
carries a failure as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from offbeat_ckptsync.errors import WireError
from offbeat_ckptsync.toolkit.config import SyncConfig
from offbeat_ckptsync.toolkit.wire import Json, decode_as, decode_error, encode_error, plain
from offbeat_ckptsync.values import Echo, Flip, Label, Sent, Status, SyncOffer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    Call = Callable[[str, Json], Awaitable[Json]]
    """Carries an operation's name and request to the other side, and brings its outcome back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation: fields and types of its request, in the order of the method's arguments, and of its answer."""

    takes: dict[str, object] = field(default_factory=dict[str, object])
    gives: tuple[str, object] | None = None
    method: str = ""  # where it is not called as the operation


MEMBER_OPS = {
    "begin": Op(takes={"offer": SyncOffer}),
    "transfer": Op(takes={"sync_id": str}, gives=("echoes", list[Echo])),
    "verify": Op(takes={"sync_id": str, "sent": Sent}),
    "flip": Op(takes={"sync_id": str, "sent": Sent}, gives=("flip", Flip)),
    "commit": Op(takes={"label": Label}, gives=("label", Label)),
    "abort": Op(takes={"sync_id": str}, gives=("version", int)),
    "status": Op(gives=("status", Status)),
    "fence": Op(takes={"reason": str}),
    "canary": Op(gives=("values", list[float])),
}
"""Methods of `Member`."""

SOURCE_OPS = {
    "offer": Op(takes={"version": int, "members": list[str]}, gives=("offer", SyncOffer)),
    "send": Op(takes={"offer": SyncOffer}, gives=("sent", Sent)),
    "abort_send": Op(takes={"sync_id": str}, method="abort"),
    "reference": Op(gives=("values", list[float])),
}
"""Methods of `Source`."""

SENDER_OPS = {
    **{name: SOURCE_OPS[name] for name in ("offer", "abort_send")},
    "open": Op(
        takes={"sync_id": str, "members": list[str]}, gives=("endpoint", dict[str, str | int | float])
    ),
    "gather": Op(takes={"offer": SyncOffer, "senders": list[int]}),
    "send": Op(takes={"offer": SyncOffer, "senders": list[int]}, gives=("sent", Sent)),
    "walk": Op(takes={"senders": list[int]}),
}
"""Methods of `Sender`: what each rank of a source does."""

RANK_OPS = {
    "begin": Op(takes={"offer": SyncOffer, "config": SyncConfig, "member": str, "staged": str}),
    "flip": Op(takes={"sync_id": str, "sent": Sent}, gives=("flip", Flip)),
    "commit": Op(takes={"label": Label}, gives=("label", Label)),
    "abort": Op(takes={"sync_id": str}, gives=("version", int)),
    "status": Op(gives=("status", Status)),
    "distrust": Op(),
}
"""Methods of `ends.rank.Rank`."""

Table = dict[str, Op]


def request_of(table: Table, op: str, values: Sequence[object]) -> Json:
    """Return the request of `op` with these values, in the order in which it takes them."""
    return {name: plain(value) for name, value in zip(table[op].takes, values, strict=True)}


def value_of(table: Table, op: str, answer: Mapping[str, object]) -> Any:  # noqa: ANN401 -- as the table says
    """Return the value in an answer to `op`, or None where it gives none; raises `WireError` where it is not of its type."""
    gives = table[op].gives
    return None if gives is None else decode_as(gives[1], answer.get(gives[0]), f"{op}.{gives[0]}")


async def answer(target: object, table: Table, op: str, request: Mapping[str, object]) -> Json:
    """Let `target` do `op` by its coroutine method, and return the answer."""
    method, arguments = _call(target, table, op, request)
    return _answer(table[op], await method(*arguments))


def answer_blocking(target: object, table: Table, op: str, request: Mapping[str, object]) -> Json:
    """Let `target` do `op` by its plain method, and return the answer."""
    method, arguments = _call(target, table, op, request)
    return _answer(table[op], method(*arguments))


def failure(error: BaseException) -> Json:
    """Return an exception as an outcome."""
    return {"error": encode_error(error)}


def answer_in(outcome: Mapping[str, object], *, where: str) -> Json:
    """Return the answer in an outcome, or raise the failure in it, its message beginning with `where`."""
    if "error" in outcome:
        raise decode_error(outcome["error"], where=where)
    return cast("Json", outcome.get("ok"))


def _call(target: object, table: Table, op: str, request: Mapping[str, object]) -> tuple[Any, list[object]]:
    if op not in table:
        raise WireError(f"unknown op {op!r}; expected one of {', '.join(table)}")
    arguments = [decode_as(kind, request.get(name), f"{op}.{name}") for name, kind in table[op].takes.items()]
    return getattr(target, table[op].method or op), arguments


def _answer(op: Op, value: object) -> Json:
    return {} if op.gives is None else {op.gives[0]: plain(value)}
