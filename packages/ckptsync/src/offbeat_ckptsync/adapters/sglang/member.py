"""A sink that lets the server load, and a member: a receiver in this process with such a sink behind it.

A folder of weights that was looked at after it was written.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from offbeat_ckptsync.adapters.sglang.group import Ends, in_parts, met
from offbeat_ckptsync.adapters.sglang.server import (
    Layout,
    NotProvableError,
    Proof,
    differing,
    held_by_ranks,
)
from offbeat_ckptsync.control.members import AskCanary, LocalMember
from offbeat_ckptsync.ends.buckets import bytes_of
from offbeat_ckptsync.ends.digest import digest
from offbeat_ckptsync.ends.manifest import dtype_of, make_manifest, manifest_of
from offbeat_ckptsync.ends.receiver import Receiver
from offbeat_ckptsync.errors import DigestError, TransferError, VersionError
from offbeat_ckptsync.seams import NO_TRAFFIC, Transport, WeightSink
from offbeat_ckptsync.toolkit.threads import in_thread
from offbeat_ckptsync.transports.disk import folder_specs, folder_tensor, write_header
from offbeat_ckptsync.transports.rendezvous import gpu_uuid
from offbeat_ckptsync.values import Flip, Label, Manifest, RankId, Sent, Status, SyncOffer

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    import torch

    from offbeat_ckptsync.adapters.sglang.server import SglangServer, Started
    from offbeat_ckptsync.toolkit.config import SyncConfig

    Rest = Callable[[int, Callable[[], None]], None]


def write_verified(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write `tensors` into a new `folder` as one safetensors file; it appears only once its bytes were read back right.

    Raises:
        DigestError: what is in the file is not what was to be written; names the tensor. Nothing has appeared.
        TransferError: it cannot be written.
    """
    whole = dict(tensors)
    partial = folder.with_name(f".partial-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _write(partial / _FILE, whole)
        _compare(partial / _FILE, whole)
        partial.rename(folder)
    except OSError as error:
        raise TransferError(f"{folder} could not be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def keep_only(folder: Path | None, parent: Path) -> None:
    """Remove the weights of every version in `parent` but those in `folder`; a model that lies there is not ours."""
    for other in parent.glob("version-*"):
        if other != folder and (other / _FILE).is_file():
            shutil.rmtree(other, ignore_errors=True)


_FILE = "model.safetensors"


def _write(path: Path, whole: dict[str, torch.Tensor]) -> None:
    head, starts = write_header(manifest_of(whole.items()).specs)
    with path.open("wb") as file:
        file.write(head)
        for start, tensor in zip(starts, whole.values(), strict=True):
            file.seek(start)
            file.write(bytes_of(tensor.cpu()).numpy().data)


def _compare(path: Path, whole: dict[str, torch.Tensor]) -> None:
    from safetensors import torch as reader

    # The library's stub leaves the kind of path open.
    found = cast("dict[str, torch.Tensor]", cast("Any", reader).load_file(path))
    for name, tensor in whole.items():
        there = found.get(name)
        if there is None or (there.shape, there.dtype, digest(bytes_of(there))) != (
            tensor.shape,
            tensor.dtype,
            digest(bytes_of(tensor.cpu())),
        ):
            raise DigestError(f"{path}: {name!r} is not what was written; look at the disk, and sync again")


class PauseMode(StrEnum):
    """What SGLang does with requests in flight: computes their keys and values anew, keeps them, or ends the requests.

    A server that overlaps scheduling, SGLang's default, names one token of each by the next version if it is paused `IN_PLACE`.
    """

    RETRACT = "retract"
    IN_PLACE = "in_place"
    ABORT = "abort"


class Way(StrEnum):
    """How tensors get from this process into the server: through a file, by the calls of its session, or over a process group.

    To a server on a CPU bytes travel in the calls by `TENSORS`, and over gloo by `GROUP`; one on GPUs is told where they lie on a
    GPU (CUDA IPC), or gets them over NCCL.
    """

    FILES = "files"
    TENSORS = "tensors"
    GROUP = "group"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How the server gets its weights: through files in `folder`, the same path here and there, this member's own.

    Two versions lie there at a time, with `expected` one, and that only until it is loaded; a folder in memory (/dev/shm) is best.
    By `TENSORS` and `GROUP` nothing is written, and the bytes travel in the pause, by `TENSORS` on a CPU a third more of them.
    Without `expected`, tensors are checked against the model folder that the server names, if it can be read here. With `prove` what
    the server holds after a load is compared with what was sent; see `proof`.

    With a server on GPUs, `TENSORS` and `GROUP` send from `device`, a GPU of this process ("cuda:0"), and `gpus` are the UUIDs of the
    server's own, rank by rank ("GPU-..", as nvidia-smi -L says them): CUDA IPC wants one that both sides see, NCCL one of its own.
    """

    folder: Path
    pause_mode: PauseMode = PauseMode.RETRACT
    expected: Manifest | None = None
    by: Way = Way.FILES
    prove: bool = True
    device: str = "cpu"
    gpus: tuple[str, ...] = ()


class SglangMember(LocalMember):
    """A member of this process whose sink lets the server load. Runs where the server sees the same files."""

    def __init__(
        self,
        name: str,
        server: SglangServer,
        transport: Transport,
        config: SyncConfig,
        loading: Loading,
        *,
        canary: AskCanary | None = None,
    ) -> None:
        """Drive `server`, which serves what it was started with; bytes come by `transport`."""
        self._server = server
        self._config = config
        self._sink = ServerSink(server, config, loading)
        receiver = Receiver(RankId(member=name), self._sink, allow_cast=config.allow_cast)
        super().__init__(receiver, transport, gate=NO_TRAFFIC, canary=canary)  # `flip` pauses the server
        self._served = ""  # the weight version that the server has said back; "" before the first flip

    async def begin(self, offer: SyncOffer) -> None:
        """Make sure that the server is the one that was synced last, and check the offer."""
        await self._require_same(self._config.begin_timeout_s)
        await super().begin(offer)

    async def flip(self, sync_id: str, sent: Sent) -> Flip:
        """Pause, load, hear the version back, go on; after a torn load it stays paused."""
        flip = await super().flip(sync_id, sent)
        self._served = str(sent.version)
        sink = self._sink
        return dataclasses.replace(flip, pause_s=sink.pause_s, load_s=sink.load_s, drain_s=sink.drain_s)

    async def commit(self, label: Label) -> Label:
        """Hear the version from the server once more, then let `label` stand."""
        await self._require_same(self._config.commit_timeout_s)
        return await super().commit(label)

    async def status(self) -> Status:
        """Say what is served; nobody vouches for it where the server names another version than it was told."""
        status = await super().status()
        if await self._version_there(self._config.begin_timeout_s) == self._served or not self._served:
            return status
        return dataclasses.replace(status, label=None, committed=False)

    async def fence(self, reason: str) -> None:
        """Take back the label, and stop the server's generation until the next flip."""
        await super().fence(reason)
        limit_s = self._config.begin_timeout_s
        await in_thread(lambda: self._server.pause(PauseMode.ABORT, limit_s), name="fence")

    async def _version_there(self, limit_s: float) -> str:
        return (await in_thread(lambda: self._server.model_info(limit_s), name="model info"))[0]

    async def _require_same(self, limit_s: float) -> None:
        there = await self._version_there(limit_s)
        if self._served and there != self._served:
            raise VersionError(
                f"{self.name}: {self._server.url} serves weight version {there!r}, and {self._served!r} was put there; "
                "it was started anew or updated by others: make a new member for it and `catch_up`"
            )


class ServerSink(WeightSink):
    """Lets the server load. A `SyncError` means that it was not asked to; anything else, that its weights may be torn."""

    def __init__(
        self, server: SglangServer, config: SyncConfig, loading: Loading, rest: Rest | None = None
    ) -> None:
        """Let `server` load in the way of `loading`, within the deadlines of `config`.

        `rest(version, load)` has the server rest, calls `load`, and has it go on; it raises a `SyncError` only where it did not call
        `load`. Without it the server is paused by `loading.pause_mode`, and stays paused when `load` raises.
        """
        self._server = server
        self._config = config
        self._loading = loading
        self._rest = self._paused if rest is None else rest
        self._expected = loading.expected
        self._looked = False
        self._proof: Proof | None = None
        self._num_ranks = 1
        # Which tensors of which version are hashed and, by files, written; and what each rank must hold of them.
        self._prepared: tuple[object, list[dict[str, str]] | None] | None = None
        self._loaded: Path | None = None  # what the server names as its model folder
        self.pause_s = self.load_s = self.drain_s = 0.0

    def expected(self) -> Manifest | None:
        """Return names and shapes of the server's model folder, read once, if it can be seen from here."""
        if not self._looked:
            limit_s = self._config.begin_timeout_s
            place = Path(self._server.model_info(limit_s)[1])
            specs = folder_specs(place) if place.is_dir() else ()
            if self._expected is None and not specs:
                raise TransferError(
                    f"{self._server.url}: what tensors it takes cannot be told: its model folder {str(place)!r} cannot be read here, "
                    "and `expected` was not given; one of another shape would end it"
                )
            if self._expected is None:
                self._expected = make_manifest(specs)
            started = self._server.started(limit_s)
            require_way(self._loading, started.kind, started.num_ranks, gpu_uuid)
            self._num_ranks = started.num_ranks
            if self._loading.prove:
                self._proof = self._make_proof(started)
            self._looked = True
        return self._expected

    def _make_proof(self, started: Started) -> Proof:
        assert self._expected is not None
        model = model_settings(Path(started.folder))
        layout = Layout(
            on_gpu=started.kind == "cuda",
            num_ranks=started.num_ranks,
            num_kv_heads=int(model.get("num_key_value_heads") or model.get("num_attention_heads") or 0),
        )
        answer = self._server.checksums(self._config.begin_timeout_s)
        tied = bool(model.get("tie_word_embeddings", not model))
        try:
            held = held_by_ranks(answer, started.num_ranks)
            return Proof(held[0], [spec.name for spec in self._expected.specs], layout, tied=tied)
        except NotProvableError as error:
            raise TransferError(f"{_NOT_PROVABLE}: {error}") from error

    def prove_start(self, timeout_s: float) -> None:
        """Hold what the server loaded when it was started against that model folder, and so the rules of the proof.

        Raises:
            TransferError: what it holds cannot be proven, or is not what is in the folder.
        """
        manifest = self.expected()
        assert manifest is not None
        dtypes = {spec.name: dtype_of(spec.dtype) for spec in manifest.specs}
        folder = Path(self._server.started(timeout_s).folder)

        def tensor(name: str) -> torch.Tensor:
            return folder_tensor(folder, name).to(self._loading.device, dtypes[name])

        if self._proof is not None:
            self._require(self._proof.expected(tensor), timeout_s)

    def prepare(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Hash the tensors and, by files, write them and compare what is there: what grows with the model is no part of a flip."""
        whole = dict(tensors)
        self._prepared = None
        device = self._loading.device  # hashes are computed where they are sent from
        expected = None if self._proof is None else self._proof.expected(lambda name: whole[name].to(device))
        if self._loading.by is Way.FILES:
            keep_only(self._loaded, self._loading.folder)
            shutil.rmtree(self._folder(version), ignore_errors=True)
            write_verified(self._folder(version), whole.items())
        self._prepared = _which(whole, version), expected

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Let the server load while it rests, and look at what it holds then."""
        whole = dict(tensors)
        if self._prepared is None or self._prepared[0] != _which(whole, version):
            self.prepare(whole.items(), version)
        assert self._prepared is not None
        _, expected = self._prepared
        with self._ready(whole, str(version)) as load:
            mark = time.perf_counter()

            def load_and_look() -> None:
                mark_load = time.perf_counter()
                self.drain_s = mark_load - mark
                with _torn():
                    load()
                    self.load_s = time.perf_counter() - mark_load
                    self._look(expected, str(version))

            self._rest(version, load_and_look)
            self.pause_s = time.perf_counter() - mark
        self._prepared = None
        if self._loading.by is Way.FILES:
            self._loaded = self._folder(version) if self._loading.expected is None else None
            keep_only(self._loaded, self._loading.folder)

    def _paused(self, version: int, load: Callable[[], None]) -> None:
        try:
            self._server.pause(self._loading.pause_mode, self._config.flip_timeout_s)
        except TransferError:
            self._resume_quietly()  # it may have paused; nothing was loaded
            raise
        load()
        with _torn():
            self._server.resume(self._config.flip_timeout_s)

    def _folder(self, version: int | str) -> Path:
        return self._loading.folder / f"version-{version}"

    @contextmanager
    def _ready(self, whole: dict[str, torch.Tensor], version: str) -> Generator[Callable[[], None]]:
        """Prepare what can be while the server generates, and yield the call that has it load."""
        limit_s = self._config.flip_timeout_s
        # Requests that keep their keys and values hold the cache: SGLang cannot flush it then.
        flush = self._loading.pause_mode is not PauseMode.IN_PLACE
        match self._loading.by:
            case Way.FILES:
                folder = str(self._folder(version))
                yield lambda: self._server.load(folder, version, flush_cache=flush, timeout_s=limit_s)
            case Way.TENSORS:
                yield lambda: self._server.take(
                    in_parts(whole, self._loading.device, self._num_ranks),
                    version,
                    flush_cache=flush,
                    timeout_s=limit_s,
                )
            case Way.GROUP:
                ends = Ends(device=self._loading.device, num_ranks=self._num_ranks)
                with met(self._server, ends, f"version {version}", limit_s) as group:
                    yield lambda: group.send(whole, version, flush_cache=flush)

    def _look(self, expected: list[dict[str, str]] | None, version: str) -> None:
        """Make sure that the server says the version back and, if that can be proven, holds what it was given."""
        limit_s = self._config.flip_timeout_s
        there = self._server.model_info(limit_s)[0]
        if there != version:
            raise TransferError(f"it was given weight version {version!r} and says {there!r}")
        if expected is not None:
            self._require(expected, limit_s)

    def _require(self, expected: list[dict[str, str]], limit_s: float) -> None:
        try:
            held = held_by_ranks(self._server.checksums(limit_s), self._num_ranks)
        except NotProvableError as error:
            raise TransferError(str(error)) from error
        wrong = differing(expected, held)
        if wrong:
            raise TransferError(
                f"it does not hold what it was given: {len(wrong)} parameters, among them {wrong[:5]}"
            )

    def _resume_quietly(self) -> None:
        try:
            self._server.resume(self._config.begin_timeout_s)
        except TransferError:
            return  # the pause failed for the same reason; that error is the one to tell


def require_way(loading: Loading, kind: str, num_ranks: int, uuid_of: Callable[[int], str]) -> None:
    """Refuse a way that a server of `num_ranks` on devices of this `kind` would end by; `uuid_of` knows this process's GPUs.

    Raises:
        TransferError: naming the setting.
    """
    by, here = loading.by, loading.device
    if by is Way.FILES:
        return
    if kind != "cuda" or here == "cpu":
        if kind == here == "cpu":
            return
        raise TransferError(
            f"`by` is {by.value!r}, the server computes on {kind!r}, and `device` is {here!r}: both must be CPUs or GPUs; "
            "by `files` they need not"
        )
    if len(loading.gpus) != num_ranks:
        raise TransferError(
            f"`gpus` must name the server's {num_ranks} GPU(s), got {len(loading.gpus)}: which are its own decides whether "
            f"{by.value!r} can be"
        )
    index = int(here.partition(":")[2] or 0)
    shared = uuid_of(index) in loading.gpus
    if by is Way.GROUP and shared:
        raise TransferError(
            f"{here} is the server's, too, which NCCL refuses; send from another, or by `tensors`"
        )
    if by is Way.TENSORS and not shared:
        raise TransferError(
            f"{here} is none of the server's, which may not see it, and would end; send from one of them, or by `group`"
        )


@contextmanager
def _torn() -> Generator[None]:
    """Let what fails in here be no `SyncError`: the server's weights may be torn by then."""
    try:
        yield
    except TransferError as error:
        raise RuntimeError(f"after the server was asked to load: {error}") from error


def _which(whole: dict[str, torch.Tensor], version: int) -> object:
    return version, {name: tensor.data_ptr() for name, tensor in whole.items()}


def model_settings(folder: Path) -> dict[str, Any]:
    """Return what config.json in `folder` says of the language model; nothing where there is none."""
    path = folder / "config.json"
    said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {**said, **said.get("text_config", {})}


_NOT_PROVABLE = "what the server holds cannot be proven; `Loading(prove=False)` goes on without: then the version it says is all there is"
