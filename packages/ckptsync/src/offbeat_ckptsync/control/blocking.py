"""Weight sync for programs without an event loop: `Syncer` in a training loop, `serve` beside a server.

Both run manager, membership and agent in the event loop of a thread of their own, so that they work in a plain script, in a
notebook and beside an event loop of the caller's. Under torchrun every rank makes a `Syncer` and makes the same calls: rank 0
is the one that replicas know, and the others take part in gathering when it says so.
"""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import distributed

from offbeat_ckptsync.control.agent import Agent
from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.control.members import LocalMember, StagedCopy
from offbeat_ckptsync.control.membership import Membership
from offbeat_ckptsync.ends.receiver import Receiver
from offbeat_ckptsync.ends.sender import LocalSource, Sender
from offbeat_ckptsync.ends.sinks import ModuleSink, ModuleSource
from offbeat_ckptsync.errors import SyncError, TransferError
from offbeat_ckptsync.toolkit.config import SyncConfig, make_transport
from offbeat_ckptsync.values import RankId

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Self

    from torch.distributed import ProcessGroup

    from offbeat_ckptsync.seams import GenerationGate, WeightSink, WeightSource
    from offbeat_ckptsync.values import Sent, SyncOffer, SyncReport

T = TypeVar("T")
Call = Callable[[], object]
_CLOSE_S = 30.0
_LOOK_S = 0.01


class Syncer:
    """The side that trains: `sync(version)` brings every replica to the weights of now, and returns when it serves them.

    Replicas come, go and die as they like; one that comes late is brought to what the others serve. Use it as a context
    manager, or call `close`.
    """

    def __init__(
        self,
        source: WeightSource | torch.nn.Module,
        secret: str,
        config: SyncConfig | None = None,
        *,
        port: int = 0,
    ) -> None:
        """Send what `source` holds to those who know `secret`; by default the transport is "auto".

        Replicas find it at `address`: port `port`, 0 means any, of `SyncConfig.host`. Where torch.distributed has several ranks
        this is a collective.

        Raises:
            ValueError: `secret` is empty.
            TransferError: the port is taken, or `SyncConfig.host` is no address of this machine.
        """
        self._ranks = _Ranks()
        if isinstance(source, torch.nn.Module):
            source = ModuleSource(source)
        config = _with_secret(config, secret)
        self._sender = Sender(source, config)
        self._loop: _Loop | None = None
        address = ""
        if self._ranks.is_first:
            self._source = _Announced(self._sender)
            self._membership = Membership.serve(secret, config, port=port)
            self._manager = CheckpointEngineManager(self._source, config, on_fence=self._membership.fenced)
            self._loop = _Loop("offbeat-ckptsync: syncer")
            self._loop.run(self._start())
            address = "{}:{}".format(*self._membership.address)
        self.address: str = cast("str", self._ranks.broadcast(address))
        """What replicas are told: "host:port"."""

    @property
    def replicas(self) -> list[str]:
        """The names of those that get weights now; on rank 0, elsewhere none."""
        return [] if self._loop is None else self._manager.members

    def wait_for(self, names: list[str], *, timeout_s: float = 60.0) -> None:
        """Wait until the replicas `names` are there, those that come late also until they serve what the others do.

        Raises:
            TransferError: not all came within `timeout_s`; names who is missing, and why where that is known.
        """
        self._run(lambda: self._membership.wait_for(names, timeout_s))

    def sync(self, version: int) -> SyncReport:
        """Bring every replica to the weights of now as `version`, above the last one.

        The weights must not change meanwhile. Each phase has its deadline in `SyncConfig`.

        Raises:
            VersionError: `version` is not above the last one.
            SyncFailed: not one replica changed over; all serve what they served, and the next sync may succeed.
        """
        return self._run(lambda: self._manager.sync(version))

    def close(self) -> None:
        """Hang up on the replicas, which go on serving what they have."""
        if self._loop is not None:
            self._loop.close(self._membership.close())
        self._sender.close()

    def __enter__(self) -> Self:
        """Return this one."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    async def _start(self) -> None:
        await self._membership.start()
        self._membership.attach(self._manager)

    def _run(self, work: Callable[[], Coroutine[object, object, T]]) -> T:
        """Return on every rank what `work` gives on rank 0; whenever rank 0 sends, the others walk."""
        if self._loop is None:
            return cast("T", self._ranks.follow(self._sender.walk))
        calls = self._source.calls = queue.SimpleQueue[Call | None]()
        future = self._loop.begin(work())
        future.add_done_callback(lambda _: calls.put(None))
        try:
            while (go := calls.get()) is not None:
                self._ranks.broadcast(_WALK)
                go()
            result = future.result()
        except BaseException as error:
            future.cancel()
            self._ranks.broadcast(_Failed(f"{type(error).__name__}: {error}"))
            raise
        self._ranks.broadcast(result)
        return result


class Replica:
    """The side that generates, as `serve` returns it. Use it as a context manager, or call `close`."""

    def __init__(
        self, sink: WeightSink, name: str, secret: str, config: SyncConfig, gate: GenerationGate
    ) -> None:
        """Made by `serve`."""
        self._receiver = Receiver(RankId(member=name), sink, allow_cast=config.allow_cast)
        self._transport = make_transport(config.transport, config)
        self._copies = Sender(StagedCopy(self._receiver), config)
        member = LocalMember(self._receiver, self._transport, gate=gate, copies=LocalSource(self._copies))
        self._agent = Agent(name, secret, member=member)
        self._loop = _Loop(f"offbeat-ckptsync: {name}")

    def join(self, host: str, port: int, *, timeout_s: float) -> None:
        """Register at a syncer; see `serve`."""
        self._loop.run(self._agent.join(host, port, timeout_s=timeout_s))

    @property
    def version(self) -> int:
        """The version that is served; 0 before the first sync."""
        return self._receiver.version

    def wait_for(self, version: int, *, timeout_s: float = 60.0) -> None:
        """Wait until `version` or a later one is served.

        Raises:
            TransferError: it was not within `timeout_s`.
        """
        until = time.monotonic() + timeout_s
        while not ((status := self._receiver.status()).committed and status.version >= version):
            if time.monotonic() > until:
                raise TransferError(
                    f"{self._receiver.rank_id} was to serve version {version} within {timeout_s:g} s and serves "
                    f"{self.version}; is `Syncer.sync` called, and this replica among `Syncer.replicas`?"
                )
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Leave: the others' syncs do not wait for this replica any more."""
        self._loop.close(self._agent.leave())
        self._transport.close()
        self._copies.close()

    def __enter__(self) -> Self:
        """Return this one."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


def serve(  # noqa: PLR0913 -- what a replica is; the last two have defaults
    sink: WeightSink | torch.nn.Module,
    secret: str,
    address: str,
    *,
    name: str,
    gate: GenerationGate,
    config: SyncConfig | None = None,
    timeout_s: float = 60.0,
) -> Replica:
    """Take weights into `sink` as the replica `name`, from the `Syncer` at `address`; returns once that knows of it.

    `gate` keeps requests from weights that change: `LockGate`, or `NO_TRAFFIC` where nothing serves beside the flip.
    `config` is the syncer's.

    Raises:
        ValueError: `secret` is empty, or `address` is none.
        TransferError: no syncer answered within `timeout_s`; is the secret the same?
    """
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        raise ValueError(f"`address` is what `Syncer.address` says, host:port, got {address!r}")
    if isinstance(sink, torch.nn.Module):
        sink = ModuleSink(sink)
    replica = Replica(sink, name, secret, _with_secret(config, secret), gate)
    try:
        replica.join(host, int(port), timeout_s=timeout_s)
    except BaseException:
        replica.close()
        raise
    return replica


def _with_secret(config: SyncConfig | None, secret: str) -> SyncConfig:
    if not secret:
        raise ValueError(
            "`secret` is empty: anybody could join; share a random one, say of `secrets.token_hex(16)`"
        )
    config = SyncConfig(transport="auto") if config is None else config
    return dataclasses.replace(config, secret=config.secret or secret)


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._started: Future[asyncio.AbstractEventLoop] = Future()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name=name, daemon=True)
        self._thread.start()
        self._loop = self._started.result()

    async def _main(self) -> None:
        self._started.set_result(asyncio.get_running_loop())
        await self._over.wait()

    def begin(self, work: Coroutine[object, object, T]) -> Future[T]:
        """Do `work` in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[object, object, T]) -> T:
        """Return what `work` gives; who is interrupted meanwhile interrupts it."""
        future = self.begin(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self, last: Coroutine[object, object, None]) -> None:
        """Do `last`, then end; harmless a second time."""
        if not self._thread.is_alive():
            last.close()
            return
        try:
            self.begin(last).result(_CLOSE_S)
        finally:
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join(_CLOSE_S)


@dataclasses.dataclass(frozen=True, slots=True)
class _Failed:
    """What rank 0 says of a call that failed there."""

    message: str


_WALK = "walk"


class _Ranks:
    """The ranks of the trainer. Rank 0 says what it does, over a group of their own."""

    def __init__(self) -> None:
        many = (
            distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
        )
        self._group = cast("ProcessGroup", distributed.new_group(backend="gloo")) if many else None
        self.is_first = not many or distributed.get_rank() == 0

    def broadcast(self, word: object) -> object:
        """Return on every rank the `word` of rank 0. A collective."""
        words = [word]
        if self._group is not None:
            distributed.broadcast_object_list(words, src=0, group=self._group)
        return words[0]

    def follow(self, walk: Callable[[], None]) -> object:
        """Walk as often as rank 0 says, and return what it got; raises `SyncError` where it failed."""
        while (word := self.broadcast(None)) == _WALK:
            walk()
        if isinstance(word, _Failed):
            raise SyncError(f"on rank 0: {word.message}")
        return word


class _Announced(LocalSource):
    """Says before it gathers, where that needs the other ranks, that they are to walk."""

    calls: queue.SimpleQueue[Call | None]  # of the sync that runs: each is called once the others know

    async def send(self, offer: SyncOffer) -> Sent:
        """See `Source.send`."""
        if self.collective:
            loop, going = asyncio.get_running_loop(), asyncio.Event()
            self.calls.put(lambda: loop.call_soon_threadsafe(going.set))
            await going.wait()
        return await super().send(offer)
