"""How a member reaches the ranks of its replica."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from offbeat_ckptsync.threads import in_thread

if TYPE_CHECKING:
    from offbeat_ckptsync.member.receiver import Receiver
    from offbeat_ckptsync.seams import Transport


class Ranks(ABC):
    """The ranks of one replica; each is a `Receiver`, wherever it lives."""

    @abstractmethod
    async def ask(self, op: str, *values: object) -> list[Any]:
        """Let every rank do `op`, and return what each gives, in rank order; raise what one of them raised.

        `op` is one of `Receiver`'s methods: layout, begin (offer), transfer (sync_id), verify (sync_id, sent), flip
        (sync_id, sent), commit (label), abort (sync_id), status, distrust. What ranks do by themselves in another step
        may come back as an empty list.
        """


class LocalRank(Ranks):
    """The one rank of a replica in this process; what may take long runs in a thread of its own."""

    def __init__(self, receiver: Receiver, transport: Transport) -> None:
        """Reach `receiver`, whose bytes come by `transport`."""
        self._receiver = receiver
        self._transport = transport

    async def ask(self, op: str, *values: Any) -> list[Any]:  # noqa: ANN401 -- as `Ranks.ask`
        """See `Ranks.ask`."""
        method = getattr(self._receiver, op)
        match op:
            case "layout" if self._receiver.seat.num_ranks > 1:
                return []  # it cannot speak for the others
            case "transfer":
                (sync_id,) = values
                return [await in_thread(lambda: method(self._transport, sync_id), name=f"stage {sync_id}")]
            case "begin" | "flip":
                return [await in_thread(lambda: method(*values), name=op)]
            case _:
                if op == "abort" and values[0]:
                    self._transport.abort(values[0])
                return [method(*values)]
