"""One receiving rank driven by JSON messages: what runs inside an engine's worker process.

A request is `{"op": .., "reply": key, "mailbox": {host, port}, ..}` with the fields that `ops.RANK_OPS` names; its answer
goes to the mailbox under `<reply>/<rank>`, with `"num_ranks"`, and is returned too. A failure is mailed as `{"error":
{"type", "message"}}` and raised, unless the caller reads the mailbox alone.

`begin` agrees, then stages in a background thread, which mails its echo (or an error) under the key `staged`. `flip` compares
digests before it writes. A request may carry `"committed"`, a label: it stands from then on, before anything else is done. So
a commit needs no call of its own into an engine that is generating.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from typing import TYPE_CHECKING, cast

from offbeat_ckptsync.ends.receiver import Receiver
from offbeat_ckptsync.errors import SyncError, TransferError, WireError
from offbeat_ckptsync.toolkit.config import SyncConfig, make_transport
from offbeat_ckptsync.toolkit.ops import RANK_OPS, answer_blocking, failure
from offbeat_ckptsync.toolkit.store import Store
from offbeat_ckptsync.toolkit.wire import Json, decode, encode
from offbeat_ckptsync.values import Flip, Label, RankId, Sent, Status, SyncOffer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from offbeat_ckptsync.seams import Transport, WeightSink

log = logging.getLogger(__name__)


class Rank:
    """Rank `rank` of the `num_ranks` ranks of a member; `handle` is its whole interface."""

    def __init__(
        self,
        sink: WeightSink,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        prepare_thread: Callable[[], None] | None = None,
    ) -> None:
        """Serve what `sink` holds, as version 0; `prepare_thread` runs first in each staging thread (say, to choose cores)."""
        self._sink = sink
        self._rank = rank
        self._num_ranks = num_ranks
        self._prepare_thread = prepare_thread
        self._receiver: Receiver | None = None
        self._transport: Transport | None = None
        self._made_from: tuple[str, SyncConfig] | None = None
        self._mailbox: Store | None = None
        self._staging: threading.Thread | None = None

    @property
    def version(self) -> int:
        """The version being served."""
        return 0 if self._receiver is None else self._receiver.version

    def handle(self, request: Mapping[str, object], *, quiet: bool = False) -> Json:
        """Do what `request` asks and return the answer; with `quiet` a failure, too, as it was mailed.

        Raises:
            SyncError: refused or failed; the mailbox holds the same error. With `quiet` only what could not be mailed, and not
                that either where the mailbox of one of several ranks is gone: then it is logged.
        """
        reply, error = str(request.get("reply", "")), None
        try:
            if "mailbox" in request:
                self._mailbox = self._open_mailbox(request)
            answer = self._answer(request)
        except Exception as failed:  # noqa: BLE001 -- mailed and raised below
            error, answer = failed, failure(failed)
        try:
            is_told = self._mail(reply, answer)
        except TransferError as lost:
            self._mailbox, error, is_told = None, lost, False
        if error is None or (quiet and is_told):
            return answer
        is_gone = self._mailbox is None and isinstance(error, TransferError) and "mailbox" in request
        if quiet and is_gone and self._num_ranks > 1:
            log.warning("rank %d has nobody left to answer to %s: %s", self._rank, request.get("op"), error)
            return answer
        if isinstance(error, SyncError):
            raise error
        raise SyncError(f"{request.get('op')}: {error!r}") from error

    def close(self) -> None:
        """Leave all connections."""
        if self._transport is not None:
            self._transport.close()
        # A thread that mails while the interpreter ends would take the process down.
        if self._staging is not None:
            self._staging.join(_STAGING_ENDS_S)
        self._transport = self._mailbox = self._made_from = self._staging = None

    def begin(self, offer: SyncOffer, config: SyncConfig, member: str, staged: str) -> None:
        """Agree to `offer` as a rank of `member`, then stage; see `Receiver.begin`. The echo is mailed under `staged`."""
        receiver, transport = self._seated(offer, config, member)
        receiver.begin(offer)
        # A daemon: generation goes on meanwhile, and a transport that hangs must not keep the process alive.
        self._staging = threading.Thread(
            target=lambda: self._stage(receiver, transport, offer.sync_id, staged),
            name=f"stage {offer.version}",
            daemon=True,
        )
        self._staging.start()

    def flip(self, sync_id: str, sent: Sent) -> Flip:
        """See `Receiver.flip`."""
        return self._open().flip(sync_id, sent)

    def commit(self, label: Label) -> Label:
        """See `Receiver.commit`."""
        return self._open().commit(label)

    def abort(self, sync_id: str) -> int:
        """Give up a sync and return the version served; see `Receiver.abort`."""
        if self._transport is not None and sync_id:
            self._transport.abort(sync_id)
        return self.version if self._receiver is None else self._receiver.abort(sync_id)

    def status(self) -> Status:
        """Return what is served, and whether its label stands."""
        if self._receiver is not None:
            return self._receiver.status()
        return Status(version=0, label=None, committed=False, state="idle")

    def distrust(self) -> None:
        """Let no label stand; see `Receiver.distrust`."""
        if self._receiver is not None:
            self._receiver.distrust()

    def _answer(self, request: Mapping[str, object]) -> Json:
        if "committed" in request:
            label, status = decode(Label, request["committed"]), self.status()
            if (status.label, status.committed) != (label, True):  # it comes until one request has succeeded
                self.commit(label)
        return answer_blocking(self, RANK_OPS, str(request.get("op")), request)

    def _seated(self, offer: SyncOffer, config: SyncConfig, member: str) -> tuple[Receiver, Transport]:
        """Return receiver and transport; the latter is made anew where another member or other settings are meant."""
        made_from = (member, config)
        if self._receiver is None or self._transport is None or self._made_from != made_from:
            if self._transport is not None:
                self._transport.close()
            rank_id = RankId(member=member, rank=self._rank, num_ranks=self._num_ranks)
            if self._receiver is None:
                self._receiver = Receiver(rank_id, self._sink)
            self._receiver.use(rank_id, allow_cast=config.allow_cast)
            self._transport = make_transport(offer.transport, config)
            self._made_from = made_from
        return self._receiver, self._transport

    def _stage(self, receiver: Receiver, transport: Transport, sync_id: str, key: str) -> None:
        try:
            if self._prepare_thread is not None:
                self._prepare_thread()
            answer: Json = {"echo": encode(receiver.transfer(transport, sync_id))}
        except Exception as error:  # noqa: BLE001 -- mailed to the manager, which raises it
            answer = failure(error)
        with contextlib.suppress(TransferError):  # a manager that died: the next one gives up what it began
            self._mail(key, answer)

    def _open(self) -> Receiver:
        if self._receiver is None:
            raise WireError("no sync was begun here; send `begin` first")
        return self._receiver

    def _open_mailbox(self, request: Mapping[str, object]) -> Store | None:
        # Until it is open there is none: who asks is not told through the mailbox of whoever asked before.
        before, self._mailbox = self._mailbox, None
        where = request.get("mailbox")
        if where is None:
            return None
        if not isinstance(where, dict):
            raise WireError(f"mailbox: expected an object with host and port, got {where!r}")
        place = cast("dict[str, object]", where)
        host, port = str(place.get("host")), int(str(place.get("port")))
        if before is not None and (before.host, before.port) == (host, port):
            return before
        return Store.join(host, port, _MAILBOX_TIMEOUT_S)

    def _mail(self, key: str, answer: Json) -> bool:
        """Say whether there is a mailbox that was told."""
        if self._mailbox is None or not key:
            return False
        self._mailbox.set(f"{key}/{self._rank}", json.dumps({**answer, "num_ranks": self._num_ranks}))
        return True


_MAILBOX_TIMEOUT_S = 10.0
_STAGING_ENDS_S = 2.0  # of a sync that was aborted, or whose transport is closed
