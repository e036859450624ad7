"""How a member reaches the ranks of its replica: in this process, or inside an engine (a vLLM server, an actor).

An engine is driven by its own update calls, which return nothing: answers come as JSON by a mailbox, a small store. Each such
call waits for the engine to end a step. So a sync makes six: open the session, `begin`; pause, `flip`, close the session
under the new version, resume. Digests are compared in `flip`; a commit goes with the next request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from offbeat_ckptsync.ends.digest import label_of
from offbeat_ckptsync.errors import LoadError, TransferError, WireError
from offbeat_ckptsync.toolkit.ops import RANK_OPS, request_of, value_of
from offbeat_ckptsync.toolkit.store import Store
from offbeat_ckptsync.toolkit.threads import in_thread
from offbeat_ckptsync.toolkit.wire import Json, decode, decode_error, encode
from offbeat_ckptsync.values import Echo, Label, Sent, SyncOffer

if TYPE_CHECKING:
    from collections.abc import Generator

    from offbeat_ckptsync.ends.receiver import Receiver
    from offbeat_ckptsync.seams import Transport
    from offbeat_ckptsync.toolkit.config import SyncConfig

_ARRIVES_S = 1.0  # a rank mails its refusal before its engine's call fails; the mail may still be on its way


class Ranks(ABC):
    """The ranks of one replica; each is a `Receiver`, wherever it lives."""

    @abstractmethod
    async def ask(self, op: str, *values: object) -> list[Any]:
        """Let every rank do `op`, and return what each gives, in rank order; raise what one of them raised.

        `op` is one of `Receiver`'s methods: begin (offer), transfer (sync_id), verify (sync_id, sent), flip
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
            case "transfer":
                (sync_id,) = values
                return [await in_thread(lambda: method(self._transport, sync_id), name=f"stage {sync_id}")]
            case "begin" | "flip":
                return [await in_thread(lambda: method(*values), name=op)]
            case _:
                if op == "abort" and values[0]:
                    self._transport.abort(values[0])
                return [method(*values)]


class Mailbox:
    """Hosted beside the manager; workers write one key each per answer. Keys are deleted as they are read."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """Listen on `host`, loopback unless told otherwise."""
        self._bells: set[_Bell] = set()  # one for each who waits
        self._store = Store.serve(host, on_set=partial(_ring, self._bells))

    @property
    def address(self) -> Json:
        """Where workers find it."""
        return {"host": self._store.host, "port": self._store.port}

    async def read(
        self, key: str, *, who: str, timeout_s: float, num_ranks: int = 1, hear_all: bool = False
    ) -> list[Json]:
        """Return the answers of every rank under `key`, in rank order; an answer tells how many ranks there are.

        `num_ranks` is how many there are at least. Once a rank has failed, those who say nothing within a moment are
        left out, unless `hear_all`.

        Raises:
            TransferError: not every rank answered in time; names those that did not.
        """
        deadline = time.monotonic() + timeout_s
        answers: dict[int, Json] = {}
        has_failed = False
        with self._bell() as bell:
            while True:
                rank = 0
                while rank < num_ranks:
                    if rank not in answers and (answer := self._take(f"{key}/{rank}")) is not None:
                        answers[rank] = answer
                        num_ranks = max(num_ranks, int(cast("int", answer.get("num_ranks", 1))))
                        if "error" in answer and not has_failed:
                            has_failed = True
                            deadline = deadline if hear_all else min(deadline, time.monotonic() + _ARRIVES_S)
                    rank += 1
                silent = [str(rank) for rank in range(num_ranks) if rank not in answers]
                is_late = time.monotonic() > deadline
                if not silent or (is_late and has_failed and not hear_all):
                    return [answers[rank] for rank in sorted(answers)]
                if is_late:
                    ranks = f"rank{'s' if len(silent) > 1 else ''} {', '.join(silent)}"
                    raise TransferError(f"{ranks} of {who} did not answer within {timeout_s:g} s")
                await bell.wait(deadline)

    async def has(self, key: str, num_ranks: int = 1) -> bool:
        """Say whether an answer of any rank lies under `key`, after giving it a moment to arrive."""
        deadline = time.monotonic() + _ARRIVES_S
        with self._bell() as bell:
            while all(self._store.get(f"{key}/{rank}") is None for rank in range(num_ranks)):
                if time.monotonic() > deadline:
                    return False
                await bell.wait(deadline)
        return True

    def drop(self, key: str) -> None:
        """Throw away what lies under `key`, of all ranks."""
        for each in self._store.keys(f"{key}/") if key else ():
            self._store.delete(each)

    def _take(self, key: str) -> Json | None:
        text = self._store.get(key)
        if text is None:
            return None
        self._store.delete(key)
        data: object = json.loads(text)
        if not isinstance(data, dict):
            raise WireError(f"mailbox: expected an object, got {text!r}")
        return cast("Json", data)

    @contextlib.contextmanager
    def _bell(self) -> Generator[_Bell]:
        bell = _Bell()
        self._bells.add(bell)
        try:
            yield bell
        finally:
            self._bells.discard(bell)


class _Bell:
    """Rings when mail comes."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rung = asyncio.Event()

    async def wait(self, deadline: float) -> None:
        """Return when something was mailed since the last call, or the deadline is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
                await self._rung.wait()
        self._rung.clear()

    def ring(self) -> None:
        """Wake who waits, from any thread."""
        with contextlib.suppress(RuntimeError):  # its loop has ended
            self._loop.call_soon_threadsafe(self._rung.set)


def _ring(bells: set[_Bell]) -> None:
    for bell in bells.copy():
        bell.ring()


_IS_OPEN = "a weight update is already active"
"""What vLLM's workers say to a session that is opened twice."""

_REFUSALS = 64  # in a row, one for each worker but the first

Control = Callable[[str, dict[str, object]], Awaitable[object]]
"""Calls a remote engine: `control(op, payload)` with op "start" (payload {}), "update" (payload: the request that
every rank's `Rank.handle` is to get) or "finish" (payload {"version": int}, or {} to leave the version as it is)."""


class EngineRanks(Ranks):
    """Every rank runs a `member.rank.Rank`; answers come through `mailbox`, because engines' update calls return nothing."""

    def __init__(self, name: str, control: Control, mailbox: Mailbox, config: SyncConfig) -> None:
        """Drive the engine behind `control`, the member `name`, within the deadlines of `config`."""
        self._name = name
        self._control = control
        self._mailbox = mailbox
        self._config = config
        self._num_ranks = 1  # until one of them has said how many there are
        self._bucket_bytes = 0  # of the offer last agreed to
        self._staged_key = ""
        self._flipped: Label | None = None  # what the ranks serve since the last flip
        self._committed: Label | None = None  # stands, and the ranks are still to be told
        self._start_note = ""
        self._in_session = False
        self._num_refusals = 0  # that came, of sessions found open; each was given by every rank

    async def ask(self, op: str, *values: Any) -> list[Any]:  # noqa: ANN401 -- as `Ranks.ask`
        """See `Ranks.ask`."""
        match op:
            case "begin":
                return await self._begin(*values)
            case "transfer":
                return await self._echoes()
            case "verify":
                return []  # a part of `flip`
            case "flip":
                return await self._flip(*values)
            case "commit" if values == (self._flipped,):
                self._committed = self._flipped
                return [self._flipped] * self._num_ranks
            case _:
                if op == "distrust":
                    self._flipped = self._committed = None
                return await self._aside(op, values)

    async def _begin(self, offer: SyncOffer) -> list[None]:
        """Open the engine's update session and let every rank check the offer and start staging."""
        await self._start()
        self._mailbox.drop(self._staged_key)  # echoes of a sync that was given up
        self._bucket_bytes = offer.bucket_bytes
        self._staged_key = f"staged-{uuid.uuid4().hex}"
        given = (offer, self._config, self._name, self._staged_key)
        agreed = await self._each("begin", given, self._config.begin_timeout_s)
        await self._hear_refusals()
        return agreed

    async def _echoes(self) -> list[Echo]:
        timeout_s = self._config.transfer_timeout_s
        answers = await self._mailbox.read(
            self._staged_key, who=self._name, timeout_s=timeout_s, num_ranks=self._num_ranks
        )
        _raise_first(answers, where=f"{self._name}: transfer")
        return [decode(Echo, answer.get("echo")) for answer in answers]

    async def _flip(self, sync_id: str, sent: Sent) -> list[object]:
        """Load on every rank, then close the session under the new version."""
        self._flipped = None
        flips = await self._each("flip", (sync_id, sent), self._config.flip_timeout_s)
        self._flipped = label_of(sent, self._bucket_bytes)  # each has compared its digests with these
        self._in_session = False
        await self._call("finish", {"version": sent.version})
        return flips

    async def _aside(self, op: str, values: tuple[object, ...]) -> list[Any]:
        """Ask within an update session that is closed again, without changing the engine's own label."""
        if not self._in_session:
            await self._start()
        given = await self._each(op, values, self._config.begin_timeout_s)
        self._in_session = False
        await self._call("finish", {})
        return given

    async def _start(self) -> None:
        try:
            await self._call("start", {})
        except Exception as error:  # noqa: BLE001
            # It shows at once, because the next call fails and carries this note.
            self._start_note = f"(opening the update session said: {error})"
        else:
            self._start_note = ""
        self._in_session = True

    async def _call(self, op: str, payload: dict[str, object]) -> None:
        """Do `op`, whatever a session has left behind that a manager who died left open: it is closed, and opened anew.

        vLLM's executor reads the answers of several workers up to the first refusal, and takes what others refused for their answers
        to later calls (0.32). Such a call was done by all of them, whatever it seems to have failed of.
        """
        for _ in range(_REFUSALS):
            if await self._is_taken(op, payload) or op == "update":
                return  # an update is answered by mail
            # A refusal may be of an earlier call: the next try of `op` tells.
            await self._is_taken("finish" if op == "start" else "start", {})
        raise TransferError(f"{self._name}: its update session cannot be brought to {op}; start it anew")

    async def _is_taken(self, op: str, payload: dict[str, object]) -> bool:
        """Do `op`; False if what came was a refusal to open a session that is open, of this call or of an earlier one."""
        try:
            await self._control(op, payload)
        except Exception as error:
            if _IS_OPEN not in str(error):
                raise
            self._num_refusals += 1
            return False
        return True

    async def _hear_refusals(self) -> None:
        """Ask on until each rank's refusal was heard: a later call of the engine's own, say a pause, would fail of it."""
        for _ in range(_REFUSALS):
            if self._num_refusals % self._num_ranks == 0:
                return
            await self._each("status", (), self._config.begin_timeout_s)
        raise TransferError(f"{self._name}: its ranks' answers are out of step; start it anew")

    async def _each(self, op: str, values: tuple[object, ...], timeout_s: float) -> list[Any]:
        """Hand a request to every rank, and return what each gives."""
        reply, told = f"reply-{uuid.uuid4().hex}", self._committed
        request = {
            "op": op,
            "reply": reply,
            "mailbox": self._mailbox.address,
            **request_of(RANK_OPS, op, values),
        }
        if told is not None:
            request["committed"] = encode(told)
        failure: Exception | None = None
        try:
            await self._call("update", request)
        except Exception as error:  # noqa: BLE001 -- the mailbox tells more; raised below where it does not
            failure = error
            self._in_session = False  # the engine closes its session when an update fails
        if failure is not None and not await self._mailbox.has(reply, self._num_ranks):
            raise TransferError(f"{self._name}: {op} failed: {failure} {self._start_note}") from failure
        answers = await self._answers(op, reply, timeout_s)
        if failure is not None:
            raise TransferError(f"{self._name}: {op} failed: {failure}") from failure
        if self._committed is told:
            self._committed = None
        return [value_of(RANK_OPS, op, answer) for answer in answers]

    async def _answers(self, op: str, reply: str, timeout_s: float) -> list[Json]:
        answers = await self._mailbox.read(
            reply,
            who=self._name,
            timeout_s=timeout_s,
            num_ranks=self._num_ranks,
            hear_all=op == "flip",  # whether one that is silent has changed over decides what the others are
        )
        if op == "flip":
            _raise_torn(answers, where=f"{self._name}: {op}")
        _raise_first(answers, where=f"{self._name}: {op}")
        self._num_ranks = len(answers)
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
