"""Tensors over a process group of this process, its rank 0, and an SGLang server's ranks (`init_weights_update_group`).

Gloo from host memory, NCCL from a GPU of this process, which must be none of the server's; NCCL was never run. Whoever waits here
waits in threads of others, to a deadline, and gives the group up for what the server says. A sender that is lost is found out on
the server's side by torch alone: gloo's sockets close at once, NCCL's watchdog there ends the server after torch's ten minutes.

Tensors as SGLang's session takes them: one buffer of bytes, and where in it each tensor lies (`load_format` flattened_bucket).

To a server on a CPU the bytes travel: no server depends on the memory of a process that may die. One on GPUs is told where they
lie by CUDA's IPC handles, as torch makes them, with the GPU's UUID in the place of its number, as SGLang does between
processes that count their GPUs apart (`patch_torch.py`, 0.5.23; read, and never run).
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportPrivateUsage=false
# torch types its multiprocessing and its distributed bindings in part.

from __future__ import annotations

import base64
import io
import pickle
import socket
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch

from offbeat_ckptsync.errors import TransferError
from offbeat_ckptsync.toolkit.threads import begun, use_device
from offbeat_ckptsync.transports.broadcast import nccl_group

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping
    from concurrent.futures import Future

    from torch.distributed import TCPStore

    from offbeat_ckptsync.adapters.sglang.server import SglangServer


PART_BYTES = 64 << 20
_ALIGN = 16
_DEVICE = 6  # the place of the device in the arguments of `rebuild_cuda_tensor`

Part = list[tuple[str, torch.Tensor]]


def parts_of(whole: Mapping[str, torch.Tensor]) -> Iterator[Part]:
    """Yield `whole` in parts of about 64 MiB, which is what the server holds beside its weights while it loads."""
    part: Part = []
    num_bytes = 0
    for name, tensor in whole.items():
        part.append((name, tensor.detach()))
        num_bytes += tensor.nbytes
        if num_bytes >= PART_BYTES:
            yield part
            part, num_bytes = [], 0
    if part:
        yield part


def in_parts(whole: Mapping[str, torch.Tensor], device: str, num_ranks: int) -> Iterator[list[str]]:
    """Yield bodies of `parts_of(whole)` on `device`, one for each rank of the server; ask for the next once the answer is there.

    Until then the buffer that a body tells of lives here. What of a GPU's the server holds on to longer, torch keeps for it.
    """
    for part in parts_of(whole):
        content = _flattened(part, device)
        if device == "cpu":
            yield [_body(content)] * num_ranks
        else:
            torch.cuda.synchronize(device)  # other processes know nothing of this stream
            yield [_body(content) for _ in range(num_ranks)]  # torch counts the users of each handle
            del content
            torch.cuda.ipc_collect()


def _flattened(part: Part, device: str) -> dict[str, object]:
    """Return a part as SGLang's `FlattenedTensorBucket` has it; its metadata are read by their attributes."""
    metadata: list[SimpleNamespace] = []
    end = 0
    for name, tensor in part:
        start = -(-end // _ALIGN) * _ALIGN
        end = start + tensor.nbytes
        about = {"name": name, "shape": tensor.shape, "dtype": tensor.dtype}
        metadata.append(SimpleNamespace(**about, start_idx=start, end_idx=end, numel=tensor.nbytes))
    buffer = torch.empty(end, dtype=torch.uint8, device=device)
    for (_, tensor), at in zip(part, metadata, strict=True):
        buffer[at.start_idx : at.end_idx].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return {"flattened_tensor": buffer, "metadata": metadata}


def _body(content: dict[str, object]) -> str:
    """Only SGLang's side reads pickles, and through a list of what it allows."""
    written = io.BytesIO()
    _Handles(written).dump(content)
    return base64.b64encode(written.getvalue()).decode()


class _Handles(pickle.Pickler):
    """Writes where the tensors of a GPU lie in place of what they hold."""

    def reducer_override(self, obj: Any) -> Any:  # noqa: ANN401 -- pickle's own signature
        if not (isinstance(obj, torch.Tensor) and obj.is_cuda):
            return NotImplemented
        from torch.multiprocessing.reductions import reduce_tensor

        rebuild, about = cast("tuple[object, tuple[Any, ...]]", reduce_tensor(obj))
        gpu = str(torch.cuda.get_device_properties(about[_DEVICE]).uuid)
        return rebuild, (*about[:_DEVICE], gpu, *about[_DEVICE + 1 :])


_HOST = "127.0.0.1"  # the member lives on the server's machine
_LOOK_S = 0.0005
_begun = partial(begun, name="SGLang's group")


class ServerGroup:
    """A group with a server, which is made by `met`."""

    def __init__(self, server: SglangServer, ends: Ends, name: str, made: Any, timeout_s: float) -> None:  # noqa: ANN401 torch's groups have no type in common
        self._server = server
        self._device = ends.device
        self._name = name
        self._made = made
        self._timeout_s = timeout_s

    def send(self, whole: Mapping[str, torch.Tensor], version: str, *, flush_cache: bool) -> None:
        """Let the server load `whole` as weight `version`, in a session of its own.

        Raises:
            TransferError: it says no, or is gone, or the deadline is over.
        """
        with self._server.session(self._timeout_s):
            for part in parts_of(whole):
                receive = partial(self._server.receive, part, version, group=self._name)
                told = _begun(partial(receive, flush_cache=flush_cache, timeout_s=self._timeout_s))
                self._broadcast([tensor for _, tensor in part], told)
                told.result()

    def _broadcast(self, tensors: list[torch.Tensor], told: Future[None]) -> None:
        try:
            # NCCL connects in the first call, which looks at no clock.
            started = _begun(partial(self._start, tensors))
            _until(started.done, told, self._timeout_s)
            works, _kept = started.result()
            _until(lambda: all(work.is_completed() for work in works), told, self._timeout_s)
            for work in works:
                work.wait()  # raises what went wrong
        except RuntimeError as error:
            raise TransferError(f"{self._server.url}: its process group broke: {error}") from error

    def _start(self, tensors: list[torch.Tensor]) -> tuple[list[Any], list[torch.Tensor]]:
        from torch.distributed.distributed_c10d import BroadcastOptions

        use_device(self._device)
        options: Any = BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=self._timeout_s)
        sent = [tensor.to(self._device).contiguous() for tensor in tensors]
        return [self._made.broadcast([tensor], options) for tensor in sent], sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Who meets in a group: this process with a torch `device`, "cpu" or "cuda:1" say, and the server's `num_ranks`."""

    device: str = "cpu"
    num_ranks: int = 1

    @property
    def backend(self) -> str:
        """By what bytes go."""
        return "gloo" if self.device == "cpu" else "nccl"


@contextmanager
def met(server: SglangServer, ends: Ends, name: str, timeout_s: float) -> Generator[ServerGroup]:
    """Make a group with the server, within `timeout_s`, and leave it in the end.

    Raises:
        TransferError: it does not form.
    """
    from torch.distributed import TCPStore

    limit = timedelta(seconds=timeout_s)
    try:
        listener = socket.create_server((_HOST, 0))  # by itself the store listens on every interface
        address = (_HOST, int(listener.getsockname()[1]))
        store = TCPStore(
            *address,
            1 + ends.num_ranks,
            is_master=True,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        told = _begun(partial(server.join, name, address, ends.num_ranks, ends.backend, timeout_s))
        # It waits for the other ranks as long as the limit allows, also for one that says no or has ended.
        forming = _begun(partial(_form, store, name, ends, timeout_s))
        _until(forming.done, told, timeout_s)
        made = forming.result()
        told.result()
    except RuntimeError as error:
        raise TransferError(
            f"{server.url}: the group of {1 + ends.num_ranks} did not form: {error}"
        ) from error
    try:
        yield ServerGroup(server, ends, name, made, timeout_s)
    finally:
        left = _begun(made.abort)
        with suppress(TransferError):  # a server that is gone is found out by who asks what it serves
            server.leave(name, timeout_s)
        with suppress(TimeoutError):  # what hangs in NCCL holds nobody up
            left.result(timeout_s)


def _form(store: TCPStore, name: str, ends: Ends, timeout_s: float) -> Any:  # noqa: ANN401 as above
    from torch.distributed import PrefixStore, ProcessGroupGloo

    world = 1 + ends.num_ranks
    # The prefixes are those that torch gives a group of this name there.
    kind = "cpu" if ends.device == "cpu" else "cuda"
    own = PrefixStore(f"{kind}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    if kind == "cuda":
        return nccl_group(own, 0, world, ends.device, timeout_s)
    options: Any = ProcessGroupGloo._Options()  # noqa: SLF001 -- torch gives no public way
    options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001 -- as above
    options._devices = [ProcessGroupGloo.create_device(hostname=_HOST)]  # noqa: SLF001 -- as above
    return ProcessGroupGloo(own, 0, world, options)


def _until(done: Callable[[], bool], told: Future[None], timeout_s: float) -> None:
    """Wait for `done`; raises what the server says where it says no, and `TransferError` when the time is over."""
    deadline = time.monotonic() + timeout_s
    while not done():
        if told.done():
            told.result()
        if time.monotonic() > deadline:
            raise TransferError(f"the server did not take all tensors within {timeout_s:g} s")
        time.sleep(_LOOK_S)
