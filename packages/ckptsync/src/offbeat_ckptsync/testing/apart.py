"""Receiving ranks in processes of their own, as members that a manager drives through pipes: JSON, answers in any order."""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing as mp
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import torch

from offbeat_ckptsync.config import SyncConfig, make_transport
from offbeat_ckptsync.errors import SyncError, TransferError
from offbeat_ckptsync.member.receiver import Receiver
from offbeat_ckptsync.member.sinks import DictSink
from offbeat_ckptsync.plan.buckets import bytes_of
from offbeat_ckptsync.plan.digest import digest
from offbeat_ckptsync.testing.fakes import Fault, FaultyTransport
from offbeat_ckptsync.threads import use_device
from offbeat_ckptsync.transports.relay import RelayTransport
from offbeat_ckptsync.values import Echo, Flip, Label, Manifest, Seat, Sent, SyncOffer
from offbeat_ckptsync.wire import decode, decode_error, encode, encode_error

if TYPE_CHECKING:
    from concurrent.futures import Future
    from multiprocessing.connection import Connection

    from offbeat_ckptsync.seams import Transport
    from offbeat_ckptsync.values import Bucket

START_S = 600.0
"""For a process to come up; generous, because only a defect uses it up."""


def prints_of(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return dtype, shape and a digest of the bits of each tensor."""
    return {
        name: f"{tensor.dtype} {tuple(tensor.shape)} {digest(bytes_of(tensor.cpu()))}"
        for name, tensor in weights.items()
    }


class RankApart:
    """A member of one rank in a process of its own, on its own GPU where `gpu` names one.

    `machine` is what a `relay` takes for the name of its machine.
    """

    def __init__(self, name: str, config: SyncConfig, *, machine: str = "", gpu: str = "") -> None:
        """Start it and wait until it is there."""
        context = mp.get_context("forkserver")  # which has loaded torch, once for all of them
        context.set_forkserver_preload(["offbeat_ckptsync.testing.apart"])
        self._name = name
        self._pipe, far = context.Pipe()
        settings = json.dumps({"config": encode(config), "name": name, "machine": machine, "gpu": gpu})
        self.process = context.Process(target=_be_a_rank, args=(far, settings), daemon=True)
        self.process.start()
        far.close()
        self._waiting: dict[int, Future[Any]] = {}
        self._ids = itertools.count()
        if not self._pipe.poll(START_S):
            raise TransferError(f"{name} did not start within {START_S:g} s")
        self._pipe.recv_bytes()
        threading.Thread(target=self._read, name=f"answers of {name}", daemon=True).start()

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    async def begin(self, offer: SyncOffer) -> str:
        """See `Member.begin`."""
        return str(await self.ask("begin", encode(offer)))

    async def transfer(self, offer: SyncOffer) -> list[Echo]:
        """See `Member.transfer`."""
        return [decode(Echo, await self.ask("transfer", offer.sync_id))]

    async def verify(self, offer: SyncOffer, sent: Sent) -> None:
        """See `Member.verify`."""
        await self.ask("verify", offer.sync_id, encode(sent))

    async def flip(self, offer: SyncOffer, sent: Sent) -> Flip:
        """See `Member.flip`."""
        return decode(Flip, await self.ask("flip", offer.sync_id, encode(sent)))

    async def commit(self, label: Label) -> Label:
        """See `Member.commit`."""
        return decode(Label, await self.ask("commit", encode(label)))

    async def abort(self, sync_id: str) -> int:
        """See `Member.abort`."""
        return int(await self.ask("abort", sync_id))

    async def serving(self) -> tuple[int, dict[str, str]]:
        """Return the version served, and `prints_of` its weights."""
        version, prints = await self.ask("serving")
        return version, prints

    async def expect(self, manifest: Manifest) -> None:
        """Take these tensors only, from now on, and serve version 0."""
        await self.ask("expect", encode(manifest))

    async def arm(self, kind: str, bucket: int) -> None:
        """Plant a fault where `bucket` arrives next: one of `Fault`, or "kill"."""
        await self.ask("arm", kind, bucket)

    async def ask(self, op: str, *values: object) -> Any:  # noqa: ANN401 -- JSON
        """Ask, and return what is answered; raises what the rank raised, or `TransferError` where it died."""
        from concurrent.futures import Future

        number, answer = next(self._ids), Future[Any]()
        self._waiting[number] = answer
        try:
            self._pipe.send_bytes(json.dumps([number, op, *values]).encode())
        except OSError as error:
            raise TransferError(f"{self._name} is dead: {error}") from error
        return await asyncio.wrap_future(answer)

    def close(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.join(60)

    def _read(self) -> None:
        try:
            while True:
                number, answer, error = json.loads(self._pipe.recv_bytes())
                waiting = self._waiting.pop(number)
                if waiting.cancelled():
                    continue
                if error is None:
                    waiting.set_result(answer)
                else:
                    waiting.set_exception(decode_error(error, where=self._name))
        except (EOFError, OSError):
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(TransferError(f"{self._name} died"))


class _Harm(Fault):
    def strike(self, bucket: Bucket, payload: torch.Tensor) -> None:
        if self.kind == "kill" and bucket.index == self.bucket and self.left:
            os.kill(os.getpid(), signal.SIGKILL)
        super().strike(bucket, payload)


def _be_a_rank(pipe: Connection, settings: str) -> None:
    given = json.loads(settings)
    torch.set_num_threads(1)
    use_device(given["gpu"] or "cpu")
    config = decode(SyncConfig, given["config"])
    transport: Transport = (
        RelayTransport(machine=given["machine"], device=config.device)
        if given["machine"]
        else make_transport(config.transport, config)
    )
    rank = _Rank(given["name"], transport)
    pipe.send_bytes(b"ready")
    said = threading.Lock()

    def answer(number: int, op: str, values: list[Any]) -> None:
        result = failure = None
        try:
            result = getattr(rank, op)(*values)
        except SyncError as error:
            failure = encode_error(error)
        with said:
            pipe.send_bytes(json.dumps([number, result, failure]).encode())

    while True:
        try:
            number, op, *values = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        # Each in a thread of its own: an abort comes while a transfer runs.
        threading.Thread(target=answer, args=(number, op, values), daemon=True).start()


class _Rank:
    """What the commands do."""

    def __init__(self, name: str, transport: Transport) -> None:
        self._seat = Seat(member=name)
        self._fault = _Harm("corrupt", 0, times=0)
        self._bare = transport
        self._transport = transport
        self._sink = DictSink()
        self._receiver = Receiver(self._seat, self._sink)

    def expect(self, manifest: Any) -> None:  # noqa: ANN401 -- JSON
        self._sink = DictSink(decode(Manifest, manifest))
        self._receiver = Receiver(self._seat, self._sink)

    def arm(self, kind: str, bucket: int) -> None:
        self._fault = _Harm(kind, bucket)
        self._transport = FaultyTransport(self._bare, on_receive=self._fault)

    def begin(self, offer: Any) -> str:  # noqa: ANN401 -- JSON
        return self._receiver.begin(decode(SyncOffer, offer))

    def transfer(self, sync_id: str) -> Any:  # noqa: ANN401 -- JSON
        transport, self._transport = self._transport, self._bare
        return encode(self._receiver.transfer(transport, sync_id))

    def verify(self, sync_id: str, sent: Any) -> None:  # noqa: ANN401 -- JSON
        self._receiver.verify(sync_id, decode(Sent, sent))

    def flip(self, sync_id: str, sent: Any) -> Any:  # noqa: ANN401 -- JSON
        return encode(self._receiver.flip(sync_id, decode(Sent, sent)))

    def commit(self, label: Any) -> Any:  # noqa: ANN401 -- JSON
        return encode(self._receiver.commit(decode(Label, label)))

    def abort(self, sync_id: str) -> int:
        if sync_id:
            self._bare.abort(sync_id)
        return self._receiver.abort(sync_id)

    def serving(self) -> list[Any]:
        return [self._receiver.version, prints_of(self._sink.weights)]
