"""The receiving side of a sync, for one rank: a written state machine around staging, verifying and loading."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from offbeat_ckptsync.ends.buckets import buckets_of, met_by, tensor_views
from offbeat_ckptsync.ends.digest import check_echo, label_of, told
from offbeat_ckptsync.ends.manifest import check_digest, require_match
from offbeat_ckptsync.ends.staging import Given, Staged, StagingPool, give, stage
from offbeat_ckptsync.errors import LoadError, PhaseError, SyncError, TransferError, VersionError
from offbeat_ckptsync.values import Bucket, Echo, Flip, Label, Manifest, RankId, Sent, Status, SyncOffer

if TYPE_CHECKING:
    import torch

    from offbeat_ckptsync.seams import Transport, WeightSink

    _Copy = tuple[Manifest, list[tuple[str, torch.Tensor]]]


class State(StrEnum):
    """Where a receiver stands."""

    IDLE = "idle"  # serves a version, no sync open
    AGREED = "agreed"  # said yes to an offer
    STAGING = "staging"  # bytes arrive beside the live weights
    STAGED = "staged"  # all bytes are here and digested
    VERIFIED = "verified"  # and they are what was sent
    FLIPPING = "flipping"  # live weights are being written
    FLIPPED = "flipped"  # the new version is served, its label does not stand yet
    BROKEN = "broken"  # a load failed half-way; serve nothing


class Step(StrEnum):
    """What moves a receiver on."""

    BEGIN = "begin"
    TRANSFER = "transfer"
    ARRIVED = "arrived"
    VERIFY = "verify"
    FLIP = "flip"
    REFUSE = "refuse"
    LOADED = "loaded"
    COMMIT = "commit"
    BREAK = "break"
    ABORT = "abort"


TRANSITIONS: dict[tuple[State, Step], State] = {
    (State.IDLE, Step.BEGIN): State.AGREED,
    (State.AGREED, Step.TRANSFER): State.STAGING,
    (State.STAGING, Step.ARRIVED): State.STAGED,
    (State.STAGED, Step.VERIFY): State.VERIFIED,
    (State.VERIFIED, Step.VERIFY): State.VERIFIED,
    (State.VERIFIED, Step.FLIP): State.FLIPPING,
    (State.FLIPPING, Step.REFUSE): State.VERIFIED,  # the sink said no before it wrote anything
    (State.FLIPPING, Step.LOADED): State.FLIPPED,
    (State.FLIPPED, Step.COMMIT): State.IDLE,
    (State.IDLE, Step.COMMIT): State.IDLE,  # said once more, or by the manager after the one that died
    (State.FLIPPING, Step.BREAK): State.BROKEN,
    (State.IDLE, Step.ABORT): State.IDLE,
    (State.AGREED, Step.ABORT): State.IDLE,
    (State.STAGING, Step.ABORT): State.IDLE,
    (State.STAGED, Step.ABORT): State.IDLE,
    (State.VERIFIED, Step.ABORT): State.IDLE,
    (State.FLIPPING, Step.ABORT): State.FLIPPING,  # too late: the load ends or breaks by itself
    (State.FLIPPED, Step.ABORT): State.IDLE,  # too late: the new version is served, uncommitted
    (State.BROKEN, Step.ABORT): State.BROKEN,
}
"""The whole state machine; a pair that is not here is refused with `PhaseError`."""


@dataclass(slots=True)
class _Session:
    offer: SyncOffer
    buckets: tuple[Bucket, ...]
    staged: Staged | None = None
    echo: Echo | None = None


class Receiver:
    """One rank that takes weights: `begin`, `transfer`, `verify`, `flip`, or `abort` at any moment.

    `transfer` blocks and may run in another thread than the rest; live weights are touched only inside `flip`.
    """

    def __init__(
        self, rank_id: RankId, sink: WeightSink, *, version: int = 0, allow_cast: bool = False
    ) -> None:
        """Serve `version` (what `sink` holds now) as `rank_id`; `allow_cast` accepts other floating dtypes."""
        self.rank_id = rank_id
        self._sink = sink
        self._version = version
        self._allow_cast = allow_cast
        self._label: Label | None = None  # of the content that is live, once one was loaded here
        self._committed = False
        self._state = State.IDLE
        self._session: _Session | None = None
        self._pool = StagingPool()
        self._lock = threading.RLock()

    @property
    def version(self) -> int:
        """The version being served."""
        return self._version

    @property
    def state(self) -> State:
        """Where this receiver stands."""
        return self._state

    def status(self) -> Status:
        """Return what is served, and whether its label stands."""
        with self._lock:
            whole = self._state not in (State.FLIPPING, State.BROKEN)  # else half of it is another version's
            return Status(
                version=self._version,
                label=self._label if whole else None,
                committed=self._committed and whole,
                state=str(self._state),
            )

    def use(self, rank_id: RankId, *, allow_cast: bool) -> None:
        """Take part as `rank_id` and by other settings from now on; what is served stays as it is, torn weights too."""
        with self._lock:
            self.rank_id, self._allow_cast = rank_id, allow_cast

    def begin(self, offer: SyncOffer) -> None:
        """Agree to `offer`; one that is still open is given up first.

        Raises:
            VersionError: `offer.version` is not above the served one (or below it, with `offer.reload`).
            ManifestError: the offered tensors do not fit the sink; names each that differs.
            TransferError: others have senders of their own, and this rank has none.
            PhaseError: this receiver is broken or flipping.
        """
        with self._lock:
            if self._session is not None:
                self.abort(self._session.offer.sync_id)
            if offer.version < self._version + (0 if offer.reload else 1):
                raise VersionError(
                    f"{self.rank_id} serves version {self._version} and was offered {offer.version}; versions must "
                    "rise, publish the next one"
                )
            met_by(offer, self.rank_id)
            check_digest(offer.manifest)
            expected = self._sink.expected()
            if expected is not None:
                require_match(expected, offer.manifest, who=str(self.rank_id), allow_cast=self._allow_cast)
            session = _Session(offer, buckets_of(offer))
            self._move(Step.BEGIN)
            self._session = session

    def transfer(self, transport: Transport, sync_id: str = "") -> Echo:
        """Stage every bucket beside the live weights and return the digests of what arrived. Blocks.

        `sync_id` is the sync that is meant, where the caller knows it.

        Raises:
            TransferError: the bytes did not arrive; names the bucket. The sync stays open until `abort`.
            PhaseError: no sync was agreed to, or it was aborted meanwhile.
        """
        with self._lock:
            session = self._open(sync_id)
            self._move(Step.TRANSFER)
            spare = self._pool.take()
        mark = time.perf_counter()
        try:
            staged = stage(transport, session.offer, self.rank_id, session.buckets, spare)
        except SyncError:
            raise
        except Exception as error:
            raise TransferError(f"{self.rank_id}: version {session.offer.version}: {error!r}") from error
        echo = Echo(
            member=self.rank_id.member,
            rank=self.rank_id.rank,
            version=session.offer.version,
            manifest_digest=session.offer.manifest.digest,
            bucket_digests=staged.digests,
            transfer_s=time.perf_counter() - mark,
            digest_s=staged.digest_s,
            num_bytes=staged.num_bytes,
            wire_bytes=staged.wire_bytes,
            num_ranks=self.rank_id.num_ranks,
        )
        self._prepare(session, staged)
        with self._lock:
            if self._session is not session:
                self._pool.put_back(staged.close())  # nobody else holds it: its own thread is here
                raise PhaseError(f"{self.rank_id}: sync {session.offer.sync_id} was aborted while it came")
            self._move(Step.ARRIVED)
            session.staged, session.echo = staged, echo
        return echo

    def _prepare(self, session: _Session, staged: Staged) -> None:
        offer = session.offer
        try:
            self._sink.prepare(tensor_views(offer.manifest, staged.buckets, staged.memory), offer.version)
        except BaseException as error:
            with self._lock:
                self._pool.put_back(staged.close())
            if isinstance(error, SyncError) or not isinstance(error, Exception):
                raise
            raise TransferError(f"{self.rank_id}: preparing version {offer.version}: {error!r}") from error

    def verify(self, sync_id: str, sent: Sent) -> None:
        """Make sure that what is staged is what `sent` says; harmless to repeat.

        Raises:
            VersionError, DigestError: it is not; names the bucket and its tensors. Nothing was changed.
            PhaseError: nothing is staged for this sync.
        """
        with self._lock:
            session = self._open(sync_id)
            if session.echo is None:
                raise PhaseError(f"{self.rank_id} is {self._state} and has nothing staged to verify")
            check_echo(session.echo, sent, session.offer.manifest, session.buckets)
            self._check_label(sent, session)
            self._move(Step.VERIFY)

    def flip(self, sync_id: str, sent: Sent) -> Flip:
        """Verify again (cheap: stored digests are compared), load, and serve the new version.

        Raises:
            VersionError, DigestError, PhaseError: as `verify`; the old version is still served.
            SyncError: the sink refused before it wrote anything; the old version is still served.
            LoadError: the sink failed half-way; this receiver is broken.
        """
        with self._lock:
            self.verify(sync_id, sent)
            session = self._open(sync_id)
            staged = session.staged
            assert staged is not None
            self._move(Step.FLIP)
        mark = time.perf_counter()
        try:
            views = list(tensor_views(session.offer.manifest, staged.buckets, staged.memory))
            given = give(self._sink, staged, views, sent.version)
        except SyncError:
            with self._lock:
                self._move(Step.REFUSE)
            raise
        except BaseException as error:
            with self._lock:
                self._move(Step.BREAK)
                self._session = session.staged = None
                self._pool.put_back(staged.close())
            raise LoadError(
                f"{self.rank_id}: loading version {sent.version} failed half-way: {error!r}; its weights are torn, "
                "take it out of service and start it anew"
            ) from error
        load_s = time.perf_counter() - mark
        with self._lock:
            self._move(Step.LOADED)
            self._version = sent.version
            self._label, self._committed = label_of(sent, session.offer.bucket_bytes), False
            kept, session.staged = staged.close(), None
            self._pool.keep(kept, session.offer.manifest, session.buckets)
            if given is not Given.COPIED:
                self._pool.forget()
            if given is Given.ADOPTED:
                self._pool.serve(session.offer.manifest, views)
        return Flip(member=self.rank_id.member, version=sent.version, pause_s=load_s, load_s=load_s)

    def commit(self, label: Label) -> Label:
        """Let `label` stand for what is served, and return it; harmless to repeat.

        Raises:
            VersionError: what is served is not what `label` says; nothing was changed.
            PhaseError: a sync is open that did not flip yet.
        """
        with self._lock:
            if self._label != label:
                raise VersionError(
                    f"{self.rank_id} serves {told(self._label, self._version)} and was asked to commit "
                    f"{told(label, label.version)}"
                )
            self._move(Step.COMMIT)
            self._committed, self._session = True, None
            return label

    def distrust(self) -> None:
        """Let no label stand and no sync go on: what is served was found wrong. The same version may be offered again."""
        with self._lock:
            if self._state is not State.BROKEN:
                self.abort("")  # whoever is told this gets no word of the sync any more
            self._label, self._committed = None, False
            self._pool.forget()

    def copy(self) -> _Copy:
        """Return what is served as it was staged; where it is served from there, writes of the replica show: see digests.

        Raises:
            TransferError: there is no such copy, or its label does not stand.
        """
        with self._lock:
            if not self._committed or (copy := self._pool.read()) is None:
                raise TransferError(f"{self.rank_id} keeps no copy of a committed version")
            return copy

    def abort(self, sync_id: str) -> int:
        """Give up `sync_id` (any open one when empty) and return the version served.

        Raises:
            LoadError: this receiver is broken and serves no version.
        """
        with self._lock:
            if self._state is State.BROKEN:
                raise LoadError(f"{self.rank_id} is broken and serves no version; start it anew")
            session = self._session
            if session is not None and sync_id in ("", session.offer.sync_id):
                self._move(Step.ABORT)
                if self._state is State.IDLE:
                    self._session = None
                    if session.staged is not None:
                        self._pool.put_back(session.staged.close())
            return self._version

    def _check_label(self, sent: Sent, session: _Session) -> None:
        """A version that is served may come once more, with the same content only."""
        label = label_of(sent, session.offer.bucket_bytes)
        if self._label is not None and self._label.version == label.version and self._label != label:
            raise VersionError(
                f"{self.rank_id} serves {told(self._label, self._version)} and was sent {told(label, label.version)}; "
                "publish it under the next version"
            )

    def _open(self, sync_id: str = "") -> _Session:
        if self._session is None or sync_id not in ("", self._session.offer.sync_id):
            raise PhaseError(f"{self.rank_id} has no open sync {sync_id or '(any)'}; it is {self._state}")
        return self._session

    def _move(self, step: Step) -> None:
        after = TRANSITIONS.get((self._state, step))
        if after is None:
            raise PhaseError(f"{self.rank_id} is {self._state}: {step} is not possible here")
        self._state = after
