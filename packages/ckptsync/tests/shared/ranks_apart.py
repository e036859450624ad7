# pyright: basic
"""Receiving ranks in processes of their own, as members that a manager drives through pipes."""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing as mp
import os
import signal
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest
import torch

from offbeat_ckptsync.control.carried import CarriedMember, Operations
from offbeat_ckptsync.control.members import LocalMember
from offbeat_ckptsync.ends.manifest import manifest_of
from offbeat_ckptsync.ends.receiver import Receiver
from offbeat_ckptsync.ends.sinks import DictSink
from offbeat_ckptsync.errors import TransferError
from offbeat_ckptsync.seams import NO_TRAFFIC
from offbeat_ckptsync.testing.contract import (
    BUCKET_BYTES,
    CASES,
    Case,
    check_good,
    check_refused,
    check_three_syncs,
)
from offbeat_ckptsync.testing.fakes import (
    DictSource,
    Fault,
    FaultyTransport,
    LocalSync,
    awkward_weights,
    prints_of,
)
from offbeat_ckptsync.toolkit.config import SyncConfig, make_transport
from offbeat_ckptsync.toolkit.threads import in_thread, use_device
from offbeat_ckptsync.toolkit.wire import Json, decode, encode
from offbeat_ckptsync.transports.relay import RelayTransport
from offbeat_ckptsync.values import Bucket, Manifest, RankId, Registration

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from pathlib import Path

    from offbeat_ckptsync.seams import Transport

START_S = 600.0
"""For a process to come up; generous, because only a defect uses it up."""


class RankApart(CarriedMember):
    """A member of one rank in a process of its own, on its own GPU where `gpu` names one.

    `machine` is what a `relay` takes for the name of its machine.
    """

    def __init__(self, name: str, config: SyncConfig, *, machine: str = "", gpu: str = "") -> None:
        """Start it and wait until it is there."""
        super().__init__(Registration(name=name, role="member", host="", port=0), self._carry)
        context = mp.get_context("forkserver")  # which has loaded torch, once for all of them
        context.set_forkserver_preload(["offbeat_ckptsync.testing"])
        self._pipe, far = context.Pipe()
        settings = json.dumps({"config": encode(config), "name": name, "machine": machine, "gpu": gpu})
        self.process = context.Process(target=_be_a_rank, args=(far, settings), daemon=True)
        self.process.start()
        far.close()
        self._waiting: dict[int, Future[Json]] = {}
        self._ids = itertools.count()
        if not self._pipe.poll(START_S):
            raise TransferError(f"{name} did not start within {START_S:g} s")
        self._pipe.recv_bytes()
        threading.Thread(target=self._read, name=f"answers of {name}", daemon=True).start()

    async def serving(self) -> tuple[int, dict[str, str]]:
        """Return the version served, and `prints_of` its weights."""
        answer = await self._carry("serving", {})
        return answer["version"], answer["prints"]  # type: ignore[return-value]  # pyright: ignore[reportReturnType]

    async def expect(self, manifest: Manifest) -> None:
        """Take these tensors only, from now on, and serve version 0."""
        await self._carry("expect", {"manifest": encode(manifest)})

    async def arm(self, kind: str, bucket: int) -> None:
        """Plant a fault where `bucket` arrives next: one of `Fault`, or "kill"."""
        await self._carry("arm", {"kind": kind, "bucket": bucket})

    def close(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.join(60)

    async def _carry(self, op: str, request: Json) -> Json:
        number, answer = next(self._ids), Future[Json]()
        self._waiting[number] = answer
        try:
            self._pipe.send_bytes(json.dumps([number, op, request]).encode())
        except OSError as error:
            raise TransferError(f"{self.name} is dead: {error}") from error
        return await asyncio.wrap_future(answer)

    def _read(self) -> None:
        try:
            while True:
                number, answer = json.loads(self._pipe.recv_bytes())
                waiting = self._waiting.pop(number)
                if waiting.set_running_or_notify_cancel():
                    waiting.set_result(answer)
        except (EOFError, OSError):
            for waiting in self._waiting.values():
                if waiting.set_running_or_notify_cancel():
                    waiting.set_exception(TransferError(f"{self.name} died"))


class SyncApart(LocalSync):
    """Its members are in processes of their own, each on its own of `gpus` where there are some."""

    def __init__(
        self,
        source: DictSource,
        expected: dict[str, Manifest],
        config: SyncConfig,
        make: Callable[[], Transport],
        gpus: tuple[str, ...] = (),
    ) -> None:
        """Start a rank for each name in `expected`, and a source here."""
        super().__init__(source, {}, config, make)
        self._expected = expected
        self.ranks = {
            name: RankApart(name, config, gpu=gpus[number % len(gpus)] if gpus else "")
            for number, name in enumerate(expected)
        }
        for rank in self.ranks.values():
            self.manager.add(rank)

    async def start(self) -> None:
        """Tell every rank what it expects."""
        for name, rank in self.ranks.items():
            await rank.expect(self._expected[name])

    async def serving(self) -> dict[str, tuple[int, dict[str, str]]]:
        """Return the version that each member serves, and `prints_of` its weights."""
        return {name: await rank.serving() for name, rank in self.ranks.items()}

    def close(self) -> None:
        """End everything."""
        for rank in self.ranks.values():
            rank.close()
        super().close()


def contract_apart(
    name: str,
    *,
    num_receivers: tuple[int, ...],
    gpus: tuple[str, ...] = (),
    **settings: Any,
) -> Callable[..., None]:
    """Return a test of every case of the contract, receivers in processes of their own, which are on `gpus` in turn.

    CUDA hands memory to other processes only, and NCCL takes one rank per GPU and process.
    """

    @pytest.mark.parametrize("receivers", num_receivers)
    @pytest.mark.parametrize("case", [*CASES, "faults"], ids=lambda case: getattr(case, "name", case))
    def test_contract(case: Case | str, receivers: int, tmp_path: Path) -> None:
        limits: dict[str, Any] = {"begin_timeout_s": 20.0, "transfer_timeout_s": 30.0, **settings}
        config = SyncConfig(
            transport=name, bucket_mib=BUCKET_BYTES / (1 << 20), disk_path=str(tmp_path), **limits
        )
        asyncio.run(_check_apart(case, config, receivers, gpus))

    return test_contract


async def _check_apart(
    case: Case | str, config: SyncConfig, num_receivers: int, gpus: tuple[str, ...]
) -> None:
    weights = case.make if isinstance(case, Case) else awkward_weights
    expected = {f"replica-{i}": manifest_of(weights(0).items()) for i in range(num_receivers)}
    fault = Fault("die", 2, times=0)
    faulty = lambda: FaultyTransport(make_transport(config.transport, config), on_send=fault)  # noqa: E731
    local = SyncApart(DictSource(weights(1)), expected, config, faulty, gpus)
    try:
        await local.start()
        if isinstance(case, Case):
            await check_three_syncs(local, case)
            return
        await check_good(local, 1, weights(1))
        await local.ranks["replica-0"].arm("corrupt", 1)
        local.source.weights = weights(2)
        await check_refused(local, 2, "bucket 1")
        await check_good(local, 2, weights(2))
        fault.left, local.source.weights = 1, weights(3)
        await check_refused(local, 3, "bucket")
        await check_good(local, 3, weights(3))
    finally:
        local.close()


class _Harm(Fault):
    def strike(self, bucket: Bucket, payload: torch.Tensor) -> None:
        if self.kind == "kill" and bucket.index == self.bucket and self.left:
            os.kill(os.getpid(), signal.SIGKILL)
        super().strike(bucket, payload)


def _be_a_rank(pipe: Connection, settings: str) -> None:
    given = json.loads(settings)
    torch.set_num_threads(1)
    use_device(given["gpu"] or "cpu")
    asyncio.run(_obey(pipe, _Rank(given["name"], decode(SyncConfig, given["config"]), given["machine"])))


async def _obey(pipe: Connection, rank: _Rank) -> None:
    pipe.send_bytes(b"ready")

    async def answer(number: int, op: str, request: Json) -> None:
        pipe.send_bytes(json.dumps([number, await rank.do(op, request)]).encode())

    async with asyncio.TaskGroup() as tasks:
        while True:
            number, op, request = json.loads(await in_thread(pipe.recv_bytes, name="commands"))
            # Beside one another: an abort comes while a transfer runs.
            tasks.create_task(answer(number, op, request), name=op)


class _Rank:
    """A member and what a test does to it."""

    def __init__(self, name: str, config: SyncConfig, machine: str) -> None:
        self._name = name
        self._fault = _Harm("corrupt", 0, times=0)
        bare = (
            RelayTransport(config, machine=machine) if machine else make_transport(config.transport, config)
        )
        self._transport = FaultyTransport(bare, on_receive=self._fault)
        self._serve(None)

    async def do(self, op: str, request: Json) -> Json:
        match op:
            case "serving":
                return {"version": self._receiver.version, "prints": prints_of(self._sink.weights)}
            case "expect":
                self._serve(decode(Manifest, request["manifest"]))
                return {}
            case "arm":
                self._fault.kind, self._fault.bucket, self._fault.left = (
                    str(request["kind"]), int(str(request["bucket"])), 1,
                )  # fmt: skip
                return {}
            case _:
                return await self._operations(op, request)

    def _serve(self, expected: Manifest | None) -> None:
        self._sink = DictSink(expected)
        self._receiver = Receiver(RankId(member=self._name), self._sink)
        self._operations = Operations(
            self._name, member=LocalMember(self._receiver, self._transport, gate=NO_TRAFFIC)
        )
