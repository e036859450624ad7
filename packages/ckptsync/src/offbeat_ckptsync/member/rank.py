"""One receiving rank driven by JSON messages: what runs inside an engine's worker process.

A request is `{"op": .., "reply": key, "mailbox": {host, port}, ..}`. Its answer goes to the mailbox under `<reply>/<rank>` and is returned too:

    begin   offer, config, member, staged (key)   -> {"version": served, "held": content}
            Agrees, then stages in a background thread, which mails its echo under the key `staged`.
    verify  sync_id, sent                         -> {}
    flip    sync_id, sent                         -> {"flip": Flip}
    commit  label                                 -> {"label": Label}
    abort   sync_id                               -> {"version": served}
    status                                        -> {"status": Status}
    layout                                        -> {"layout": {"cuts": ..}}, what the rank needs
    distrust                                      -> {}

Each answer also carries `"num_ranks"`. A failure is mailed as `{"error": {"type", "message"}}` and raised.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, cast

from offbeat_ckptsync.config import SyncConfig, make_transport
from offbeat_ckptsync.errors import SyncError, WireError
from offbeat_ckptsync.member.receiver import Receiver
from offbeat_ckptsync.store import Store
from offbeat_ckptsync.values import Label, Needs, Seat, Sent, Status, SyncOffer
from offbeat_ckptsync.wire import Json, decode, encode, encode_error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from offbeat_ckptsync.seams import Transport, WeightSink


class Worker:
    """Rank `rank` of the `num_ranks` ranks of a member; `handle` is its whole interface."""

    def __init__(
        self,
        sink: WeightSink,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        version: int = 0,
        prepare_thread: Callable[[], None] | None = None,
    ) -> None:
        """Serve `version` from `sink`; `prepare_thread` runs first in each staging thread (say, to choose cores)."""
        self._sink = sink
        self._rank = rank
        self._num_ranks = num_ranks
        self._version = version
        self._prepare_thread = prepare_thread
        self._receiver: Receiver | None = None
        self._transport: Transport | None = None
        self._made_from: tuple[str, SyncConfig] | None = None
        self._mailbox: Store | None = None

    @property
    def version(self) -> int:
        """The version being served."""
        return self._version if self._receiver is None else self._receiver.version

    def handle(self, request: Mapping[str, object]) -> Json:
        """Do what `request` asks and return the answer.

        Raises:
            SyncError: refused or failed; the mailbox holds the same error.
        """
        reply = str(request.get("reply", ""))
        try:
            if "mailbox" in request:
                self._mailbox = self._open_mailbox(request)
            answer = self._answer(request)
        except SyncError as error:
            self._mail(reply, {"error": encode_error(error)})
            raise
        except Exception as error:
            self._mail(reply, {"error": encode_error(error)})
            raise SyncError(f"{request.get('op')}: {error!r}") from error
        self._mail(reply, answer)
        return answer

    def close(self) -> None:
        """Leave all connections."""
        self._version = self.version
        if self._transport is not None:
            self._transport.close()
        self._transport = self._receiver = self._mailbox = self._made_from = None

    def _answer(self, request: Mapping[str, object]) -> Json:
        match request.get("op"):
            case "begin":
                held = self._begin(request)
                return {"version": self.version, "held": held}
            case "verify":
                self._open().verify(_text(request, "sync_id"), decode(Sent, request.get("sent")))
                return {}
            case "flip":
                flip = self._open().flip(_text(request, "sync_id"), decode(Sent, request.get("sent")))
                return {"flip": encode(flip)}
            case "commit":
                return {"label": encode(self._open().commit(decode(Label, request.get("label"))))}
            case "abort":
                return {"version": self._abort(_text(request, "sync_id"))}
            case "status":
                return {"status": encode(self._status())}
            case "layout":
                return {"layout": encode(Needs(cuts=self._sink.layout()))}
            case "distrust":
                if self._receiver is not None:
                    self._receiver.distrust()
                return {}
            case other:
                raise WireError(f"unknown op {other!r}; expected one of {', '.join(_OPS)}")

    def _begin(self, request: Mapping[str, object]) -> str:
        offer = decode(SyncOffer, request.get("offer"))
        config = decode(SyncConfig, request.get("config"))
        made_from = (_text(request, "member"), config)
        if self._receiver is None or self._transport is None or self._made_from != made_from:
            self._version = self.version
            if self._transport is not None:
                self._transport.close()
            seat = Seat(member=made_from[0], rank=self._rank, num_ranks=self._num_ranks)
            self._receiver = Receiver(seat, self._sink, version=self._version, allow_cast=config.allow_cast)
            self._transport = make_transport(offer.transport, config)
            self._made_from = made_from
        receiver, transport, key = self._receiver, self._transport, _text(request, "staged")
        held = receiver.begin(offer)
        # A daemon: generation goes on meanwhile, and a transport that hangs must not keep the process alive.
        threading.Thread(
            target=lambda: self._stage(receiver, transport, offer.sync_id, key),
            name=f"stage {offer.version}",
            daemon=True,
        ).start()
        return held

    def _stage(self, receiver: Receiver, transport: Transport, sync_id: str, key: str) -> None:
        try:
            if self._prepare_thread is not None:
                self._prepare_thread()
            answer: Json = {"echo": encode(receiver.transfer(transport, sync_id))}
        except Exception as error:  # noqa: BLE001 -- mailed to the manager, which raises it
            answer = {"error": encode_error(error)}
        self._mail(key, answer)

    def _abort(self, sync_id: str) -> int:
        if self._transport is not None and sync_id:
            self._transport.abort(sync_id)
        return self.version if self._receiver is None else self._receiver.abort(sync_id)

    def _status(self) -> Status:
        if self._receiver is not None:
            return self._receiver.status()
        return Status(version=self._version, label=None, committed=False, state="idle")

    def _open(self) -> Receiver:
        if self._receiver is None:
            raise WireError("no sync was begun here; send `begin` first")
        return self._receiver

    def _open_mailbox(self, request: Mapping[str, object]) -> Store | None:
        where = request.get("mailbox")
        if where is None:
            return None
        if not isinstance(where, dict):
            raise WireError(f"mailbox: expected an object with host and port, got {where!r}")
        place = cast("dict[str, object]", where)
        host, port = str(place.get("host")), int(str(place.get("port")))
        if self._mailbox is not None and (self._mailbox.host, self._mailbox.port) == (host, port):
            return self._mailbox
        return Store.join(host, port, _MAILBOX_TIMEOUT_S)

    def _mail(self, key: str, answer: Json) -> None:
        if self._mailbox is not None and key:
            self._mailbox.set(f"{key}/{self._rank}", json.dumps({**answer, "num_ranks": self._num_ranks}))


_MAILBOX_TIMEOUT_S = 10.0
_OPS = ("begin", "verify", "flip", "commit", "abort", "status", "layout", "distrust")


def _text(request: Mapping[str, object], name: str) -> str:
    value = request.get(name)
    if not isinstance(value, str):
        raise WireError(f"{request.get('op')}: field {name!r} must be a string, got {value!r}")
    return value
