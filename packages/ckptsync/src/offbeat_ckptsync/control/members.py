"""Members: a receiver in this process, or an engine elsewhere that is driven by its own control calls."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, cast

from offbeat_ckptsync.errors import LoadError, SyncError, TransferError
from offbeat_ckptsync.threads import in_thread
from offbeat_ckptsync.values import Echo, Flip, Label, Needs, Sent, Status, SyncOffer
from offbeat_ckptsync.wire import Json, decode, decode_error, encode

if TYPE_CHECKING:
    from offbeat_ckptsync.config import SyncConfig
    from offbeat_ckptsync.control.mailbox import Mailbox
    from offbeat_ckptsync.member.receiver import Receiver
    from offbeat_ckptsync.seams import Transport
    from offbeat_ckptsync.values import Layout

Control = Callable[[str, dict[str, object]], Awaitable[object]]
"""Calls a remote engine: `control(op, payload)` with op "start" (payload {}), "update" (payload: the request that
every rank's `Worker.handle` is to get) or "finish" (payload {"version": int}, or {} to leave the version as it is)."""


AskCanary = Callable[[], Awaitable[list[float]]]
"""Asks a replica the fixed question whose answer is to agree between replicas after a flip; see `canary`."""


class GenerationGate(Protocol):
    """What a member pauses around its flip.

    What happens to requests in flight and to cached keys and values is the gate's business: a sync does not touch
    keys and values computed under the old weights.
    """

    async def pause(self) -> None:
        """Stop generating; return when no forward pass runs."""
        ...

    async def resume(self) -> None:
        """Go on generating."""
        ...


class NoGate:
    """For members that nothing generates with while they flip."""

    async def pause(self) -> None:
        """Do nothing."""

    async def resume(self) -> None:
        """Do nothing."""


class LocalMember:
    """A receiver in this process, say for a Transformers replica."""

    def __init__(
        self,
        receiver: Receiver,
        transport: Transport,
        *,
        gate: GenerationGate | None = None,
        canary: AskCanary | None = None,
    ) -> None:
        """Drive `receiver`; `gate` is closed while its weights change, `canary` is asked after it."""
        self._receiver = receiver
        self._transport = transport
        self._canary = canary
        self._gate = NoGate() if gate is None else gate

    @property
    def name(self) -> str:
        """The seat's member name."""
        return self._receiver.seat.member

    async def layouts(self) -> dict[int, Layout]:
        """Say what the receiver needs."""
        return (
            {self._receiver.seat.rank: self._receiver.layout()} if self._receiver.seat.num_ranks == 1 else {}
        )

    async def begin(self, offer: SyncOffer) -> str:
        """Agree and say what is kept, or raise naming what does not fit."""
        return self._receiver.begin(offer)

    async def transfer(self, offer: SyncOffer) -> list[Echo]:
        """Stage in a thread."""
        echo = await in_thread(
            lambda: self._receiver.transfer(self._transport, offer.sync_id), name=f"stage {offer.version}"
        )
        return [echo]

    async def verify(self, offer: SyncOffer, sent: Sent) -> None:
        """Compare digests."""
        self._receiver.verify(offer.sync_id, sent)

    async def flip(self, offer: SyncOffer, sent: Sent) -> Flip:
        """Verify, pause, load, resume; after a torn load generation stays paused."""
        self._receiver.verify(offer.sync_id, sent)
        mark = time.perf_counter()
        await self._gate.pause()
        drain_s = time.perf_counter() - mark
        try:
            flip = await in_thread(
                lambda: self._receiver.flip(offer.sync_id, sent), name=f"flip {offer.version}"
            )
        except LoadError:
            raise
        except SyncError:
            await self._gate.resume()
            raise
        await self._gate.resume()
        pause_s = time.perf_counter() - mark
        return Flip(
            member=self.name, version=flip.version, pause_s=pause_s, load_s=flip.load_s, drain_s=drain_s
        )

    async def commit(self, label: Label) -> Label:
        """Let `label` stand."""
        return self._receiver.commit(label)

    async def canary(self) -> list[float]:
        """Ask the canary, where there is one."""
        return [] if self._canary is None else await self._canary()

    async def status(self) -> Status:
        """Say what is served."""
        return self._receiver.status()

    async def fence(self, reason: str) -> None:
        """Take back the label of what is served."""
        self._receiver.distrust()

    async def abort(self, sync_id: str) -> int:
        """Drop what was staged and return the version served."""
        if sync_id:
            self._transport.abort(sync_id)
        return self._receiver.abort(sync_id)


class ControlMember:
    """An engine elsewhere (a vLLM server, an actor), whose ranks each run a `Worker`.

    Answers come through `mailbox`, because engines' own update calls return nothing.
    """

    def __init__(
        self,
        name: str,
        control: Control,
        *,
        mailbox: Mailbox,
        config: SyncConfig,
        gate: GenerationGate | None = None,
        canary: AskCanary | None = None,
    ) -> None:
        """Drive the engine behind `control`; `gate` is closed only while its weights change, then `canary` is asked."""
        self._name = name
        self._control = control
        self._mailbox = mailbox
        self._config = config
        self._gate = NoGate() if gate is None else gate
        self._canary = canary
        self._layouts: dict[int, Layout] | None = None
        self._staged_key = ""
        self._verified = ""
        self._start_note = ""
        self._in_session = False

    @property
    def name(self) -> str:
        """A name for messages, unique among the members."""
        return self._name

    async def layouts(self) -> dict[int, Layout]:
        """Ask every rank what it needs; once, because it does not change while an engine lives."""
        if self._layouts is None:
            answers = await self._ask_aside("layout", {}, self._config.begin_timeout_s)
            self._layouts = {
                rank: decode(Needs, answer.get("layout")).cuts for rank, answer in enumerate(answers)
            }
        return self._layouts

    async def begin(self, offer: SyncOffer) -> str:
        """Open the engine's update session and let every rank check the offer, say what it keeps, and start staging."""
        await self._start()
        self._staged_key = f"staged-{uuid.uuid4().hex}"
        answers = await self._ask(
            "begin",
            {
                "offer": encode(offer),
                "config": encode(self._config),
                "member": self._name,
                "staged": self._staged_key,
            },
            self._config.begin_timeout_s,
        )
        held = {str(answer.get("held", "")) for answer in answers}
        return held.pop() if len(held) == 1 else ""

    async def transfer(self, offer: SyncOffer) -> list[Echo]:
        """Wait for the echo of every rank."""
        timeout_s = self._config.transfer_timeout_s
        answers = await self._mailbox.read(self._staged_key, who=self._name, timeout_s=timeout_s)
        _raise_first(answers, where=f"{self._name}: transfer")
        return [decode(Echo, answer.get("echo")) for answer in answers]

    async def verify(self, offer: SyncOffer, sent: Sent) -> None:
        """Let every rank compare digests, while generation goes on."""
        request: Json = {"sync_id": offer.sync_id, "sent": encode(sent)}
        await self._ask("verify", request, self._config.verify_timeout_s)
        self._verified = offer.sync_id

    async def flip(self, offer: SyncOffer, sent: Sent) -> Flip:
        """Verify, if that was not done; then pause, load on every rank, label the version, resume."""
        if self._verified != offer.sync_id:
            await self.verify(offer, sent)
        request: Json = {"sync_id": offer.sync_id, "sent": encode(sent)}
        mark = time.perf_counter()
        await self._gate.pause()
        drain_s = time.perf_counter() - mark
        try:
            answers = await self._ask("flip", request, self._config.flip_timeout_s)
        except LoadError:
            raise  # torn weights: generation stays paused
        except SyncError:
            await self._gate.resume()
            raise
        self._in_session = False
        await self._control("finish", {"version": sent.version})
        await self._gate.resume()
        pause_s = time.perf_counter() - mark
        flips = [decode(Flip, answer.get("flip")) for answer in answers]
        return Flip(
            member=self._name,
            version=sent.version,
            pause_s=pause_s,
            load_s=max(flip.load_s for flip in flips),
            drain_s=drain_s,
        )

    async def commit(self, label: Label) -> Label:
        """Let `label` stand on every rank."""
        answers = await self._ask_aside("commit", {"label": encode(label)}, self._config.commit_timeout_s)
        for answer in answers:
            if (stands := decode(Label, answer.get("label"))) != label:
                return stands
        return label

    async def canary(self) -> list[float]:
        """Ask the canary, where there is one."""
        return [] if self._canary is None else await self._canary()

    async def status(self) -> Status:
        """Say what the ranks serve; raises `LoadError` where they differ."""
        answers = await self._ask_aside("status", {}, self._config.begin_timeout_s)
        ranks = {decode(Status, answer.get("status")) for answer in answers}
        if len({(each.version, each.label) for each in ranks}) != 1:
            raise LoadError(f"ranks of {self._name} serve different versions {ranks}; start it anew")
        return min(ranks, key=lambda each: each.committed)

    async def fence(self, reason: str) -> None:
        """Take back the label of what the ranks serve."""
        await self._ask_aside("distrust", {}, self._config.begin_timeout_s)

    async def abort(self, sync_id: str) -> int:
        """Drop what was staged on every rank, close the engine's session, return the version served."""
        answers = await self._ask_aside("abort", {"sync_id": sync_id}, self._config.begin_timeout_s)
        versions = {int(cast("int", answer["version"])) for answer in answers}
        if len(versions) != 1:
            raise LoadError(
                f"ranks of {self._name} serve different versions {sorted(versions)}; start it anew"
            )
        return versions.pop()

    async def _ask_aside(self, op: str, request: Json, timeout_s: float) -> list[Json]:
        """Ask within an update session that is closed again, without changing the engine's own label."""
        if not self._in_session:
            await self._start()
        answers = await self._ask(op, request, timeout_s)
        self._in_session = False
        await self._control("finish", {})
        return answers

    async def _start(self) -> None:
        try:
            await self._control("start", {})
        except Exception as error:  # noqa: BLE001
            # A session left open by a manager that died refuses to open again, on all ranks or on some: either way
            # it is open now. Any other cause shows at once, because the next call fails and carries this note.
            self._start_note = f"(opening the update session said: {error})"
        else:
            self._start_note = ""
        self._in_session = True

    async def _ask(self, op: str, request: Json, timeout_s: float) -> list[Json]:
        reply = f"reply-{uuid.uuid4().hex}"
        failure: Exception | None = None
        try:
            await self._control(
                "update", {"op": op, "reply": reply, "mailbox": self._mailbox.address, **request}
            )
        except Exception as error:  # noqa: BLE001 -- the mailbox tells more; raised below where it does not
            failure = error
            self._in_session = False  # the engine closes its session when an update fails
        if failure is not None and not await self._mailbox.has(f"{reply}/0"):
            raise TransferError(f"{self._name}: {op} failed: {failure} {self._start_note}") from failure
        answers = await self._mailbox.read(reply, who=self._name, timeout_s=timeout_s)
        if op == "flip":
            _raise_torn(answers, where=f"{self._name}: {op}")
        _raise_first(answers, where=f"{self._name}: {op}")
        if failure is not None:
            raise TransferError(f"{self._name}: {op} failed: {failure}") from failure
        return answers


def _raise_first(answers: list[Json], *, where: str) -> None:
    for answer in answers:
        if "error" in answer:
            raise decode_error(answer["error"], where=where)


def _raise_torn(answers: list[Json], *, where: str) -> None:
    """Raise `LoadError` if some ranks changed over and others did not: no refusal of one makes the member whole."""
    errors = {
        rank: decode_error(answer["error"], where=f"rank {rank}")
        for rank, answer in enumerate(answers)
        if "error" in answer
    }
    torn = [error for error in errors.values() if isinstance(error, LoadError)]
    if torn or 0 < len(errors) < len(answers):
        told = "; ".join(map(str, torn or errors.values()))
        raise LoadError(f"{where}: {told}; its ranks no longer serve the same weights, start it anew")
