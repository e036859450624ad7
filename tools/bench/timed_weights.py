"""What is synced in a measurement: tensors of a transformer's proportions, and the processes that take them."""

from __future__ import annotations

import json
import multiprocessing as mp
from typing import TYPE_CHECKING

import torch
import xxhash

from offbeat_ckptsync.ends.buckets import bytes_of
from offbeat_ckptsync.ends.rank import Rank
from offbeat_ckptsync.ends.sinks import AdoptingModuleSink, ModuleSink
from offbeat_ckptsync.errors import SyncError, TransferError
from offbeat_ckptsync.toolkit.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerContext

_WIDTH = 256  # elements in a row
_SHARES = (16, 4, 4, 16, 44, 44, 44, 1)
"""Rows of a layer's matrices and norm, in proportion: q, k, v, o, gate, up, down, norm of a model of Llama's shape."""

_START_S = 180.0


class Weights(torch.nn.Module):
    """`num_tensors` parameters of together about `num_bytes`, bfloat16, on `device`."""

    def __init__(self, num_bytes: int, num_tensors: int, device: str = "cpu") -> None:
        """Make them, with random bits."""
        super().__init__()
        shares = [_SHARES[i % len(_SHARES)] for i in range(num_tensors)]
        rows_of_share = num_bytes / (2 * _WIDTH * sum(shares))
        for index, share in enumerate(shares):
            rows = max(1, round(share * rows_of_share))
            bits = torch.randint(-(1 << 15), 1 << 15, (rows, _WIDTH), dtype=torch.int16, device=device)
            self.register_parameter(
                f"t{index}", torch.nn.Parameter(bits.view(torch.bfloat16), requires_grad=False)
            )

    def change(self) -> None:
        """Change every element, as a training step may."""
        for parameter in self.parameters():
            parameter.view(torch.int16).add_(1)

    def fingerprint(self) -> str:
        """Return a digest of all bytes."""
        hasher = xxhash.xxh3_128()
        for parameter in self.parameters():
            hasher.update(bytes_of(parameter).cpu().numpy().data)
        return hasher.hexdigest()


def loaded_context() -> ForkServerContext:
    """Return the way to start processes that have torch loaded: forks of one that did nothing else, seconds of a core earlier."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["offbeat_ckptsync.testing"])
    return context


class Replica:
    """A process with a module that takes weights in place; what `ControlMember` drives."""

    def __init__(
        self,
        num_bytes: int,
        num_tensors: int,
        num_threads: int,
        *,
        adopts: bool = False,
        device: str = "cpu",
        prepare: Callable[[], None] | None = None,
    ) -> None:
        """Start it; it calls `prepare`, a function of a module, and loads with `num_threads` threads.

        With `adopts` it serves weights from where they lie, where it may.
        """
        context = loaded_context()
        self._pipe, far = context.Pipe()
        self._process = context.Process(
            target=_serve,
            args=(far, (num_bytes, num_tensors, device), num_threads, adopts, prepare),
            daemon=True,
        )
        self._process.start()

    def wait_ready(self) -> None:
        """Return when it runs; raises `TransferError` when it does not within three minutes."""
        if not self._pipe.poll(_START_S) or self._pipe.recv_bytes() != b"ready":
            raise TransferError(f"a receiving process did not start within {_START_S:g} s")

    async def control(self, op: str, payload: dict[str, object]) -> None:
        """Hand an update request to the process, as an engine's control calls do."""
        if op == "update":
            failure = await self._ask(json.dumps(payload).encode())
            if failure:
                raise TransferError(failure)

    async def fingerprint(self) -> str:
        """Return the digest of what it serves."""
        return await self._ask(b"fingerprint")

    def close(self) -> None:
        """End the process."""
        if self._process.is_alive():
            self._pipe.send_bytes(b"end")
        self._process.join(10)
        self._pipe.close()

    async def _ask(self, message: bytes) -> str:
        self._pipe.send_bytes(message)
        return (await in_thread(self._pipe.recv_bytes, name="ask")).decode()


def _serve(
    pipe: Connection,
    size: tuple[int, int, str],
    num_threads: int,
    adopts: bool,
    prepare: Callable[[], None] | None,
) -> None:
    if prepare is not None:
        prepare()
    torch.set_num_threads(num_threads)
    weights = Weights(*size)
    rank = Rank(AdoptingModuleSink(weights) if adopts else ModuleSink(weights))
    pipe.send_bytes(b"ready")
    while (request := pipe.recv_bytes()) != b"end":
        if request == b"fingerprint":
            pipe.send_bytes(weights.fingerprint().encode())
            continue
        try:
            rank.handle(json.loads(request))
        except SyncError as error:
            pipe.send_bytes(str(error).encode())
        else:
            pipe.send_bytes(b"")
    rank.close()
