"""The member: a receiver in this process, a sink behind it that lets the server load, and the few calls of a server over HTTP."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from offbeat_ckptsync.control.members import LocalMember
from offbeat_ckptsync.errors import DigestError, TransferError, VersionError
from offbeat_ckptsync.member.receiver import Receiver
from offbeat_ckptsync.plan.buckets import bytes_of
from offbeat_ckptsync.plan.digest import digest
from offbeat_ckptsync.plan.manifest import make_manifest, manifest_of
from offbeat_ckptsync.seams import WeightSink
from offbeat_ckptsync.threads import in_thread
from offbeat_ckptsync.transports.weight_files import folder_specs, write_header
from offbeat_ckptsync.values import Seat

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from offbeat_ckptsync.config import SyncConfig
    from offbeat_ckptsync.control.members import AskCanary
    from offbeat_ckptsync.seams import Transport
    from offbeat_ckptsync.values import Flip, Label, Manifest, Sent, Status, SyncOffer
    from offbeat_ckptsync.wire import Json


class PauseMode(StrEnum):
    """What SGLang does with requests in flight: computes their keys and values anew, keeps them, or ends the requests."""

    RETRACT = "retract"
    IN_PLACE = "in_place"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How the server gets its weights: through files in `folder`, the same path here and there, this member's own.

    Two versions lie there at a time; a folder in memory (/dev/shm) is best. Without `expected`, tensors are checked
    against the model folder that the server names, if it can be read here.
    """

    folder: Path
    pause_mode: PauseMode = PauseMode.RETRACT
    expected: Manifest | None = None


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
        self._sink = _ServerSink(server, config, loading)
        receiver = Receiver(Seat(member=name), self._sink, allow_cast=config.allow_cast)
        super().__init__(receiver, transport, canary=canary)
        self._served = ""  # the weight version that the server has said back; "" before the first flip

    async def begin(self, offer: SyncOffer) -> str:
        """Make sure that the server is the one that was synced last, and check the offer."""
        await self._require_same(self._config.begin_timeout_s)
        return await super().begin(offer)

    async def flip(self, sync_id: str, sent: Sent) -> Flip:
        """Write and compare the folder, pause, load, hear the version back, go on; after a torn load it stays paused."""
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


class _ServerSink(WeightSink):
    """Lets the server load. A `SyncError` means that it was not asked to; anything else, that its weights may be torn."""

    def __init__(self, server: SglangServer, config: SyncConfig, loading: Loading) -> None:
        self._server = server
        self._config = config
        self._loading = loading
        self._expected = loading.expected
        self._looked = loading.expected is not None
        self.pause_s = self.load_s = self.drain_s = 0.0

    def expected(self) -> Manifest | None:
        """Return names and shapes of the server's model folder, read once, if it can be seen from here."""
        if not self._looked:
            place = Path(self._server.model_info(self._config.begin_timeout_s)[1])
            specs = folder_specs(place) if place.is_dir() else ()
            self._expected, self._looked = make_manifest(specs) if specs else None, True
        return self._expected

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        folder = self._loading.folder / f"version-{version}"
        shutil.rmtree(folder, ignore_errors=True)
        write_verified(folder, tensors)
        mark = time.perf_counter()
        try:
            self._server.pause(self._loading.pause_mode, self._config.flip_timeout_s)
        except TransferError:
            self._resume_quietly()  # it may have paused; nothing was loaded
            raise
        self.drain_s = time.perf_counter() - mark
        try:
            self._load(folder, str(version))
        except TransferError as error:
            raise RuntimeError(f"after the server was asked to load: {error}") from error
        self.pause_s = time.perf_counter() - mark
        keep_only(folder, self._loading.folder)

    def _load(self, folder: Path, version: str) -> None:
        mark, limit_s = time.perf_counter(), self._config.flip_timeout_s
        # Requests that keep their keys and values hold the cache: SGLang cannot flush it then.
        flush = self._loading.pause_mode is not PauseMode.IN_PLACE
        self._server.load(str(folder), version, flush_cache=flush, timeout_s=limit_s)
        self.load_s = time.perf_counter() - mark
        there = self._server.model_info(limit_s)[0]
        if there != version:
            raise TransferError(f"it was given weight version {version!r} and says {there!r}")
        self._server.resume(limit_s)

    def _resume_quietly(self) -> None:
        try:
            self._server.resume(self._config.begin_timeout_s)
        except TransferError:
            return  # the pause failed for the same reason; that error is the one to tell


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


def keep_only(folder: Path, parent: Path) -> None:
    """Remove every other folder of weights in `parent`."""
    for other in parent.iterdir():
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


class SglangServer:
    """One server. Every method blocks, within a deadline, and raises `TransferError` where it cannot be reached or says no."""

    def __init__(self, url: str, *, api_key: str = "") -> None:
        """Speak to the server at `url`, say "http://127.0.0.1:30000", with the admin key where it has one."""
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"`url` must begin with http:// or https://, got {url!r}")
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def model_info(self, timeout_s: float) -> tuple[str, str]:
        """Return the weight version that the server says it serves, and the folder it says they came from."""
        try:
            info = self._call("GET", "/model_info", None, timeout_s)
        except _NotThere:
            info = self._call("GET", "/get_model_info", None, timeout_s)  # its name before 0.5.6
        return str(info.get("weight_version", "")), str(info.get("model_path", ""))

    def pause(self, mode: str, timeout_s: float) -> None:
        """Stop generating; `mode` is SGLang's: "retract", "in_place" or "abort"."""
        self._call("POST", "/pause_generation", {"mode": mode}, timeout_s)

    def resume(self, timeout_s: float) -> None:
        """Go on generating."""
        self._call("POST", "/continue_generation", {}, timeout_s)

    def load(self, folder: str, version: str, *, flush_cache: bool, timeout_s: float) -> None:
        """Load the safetensors files in `folder` in place, as weight version `version`."""
        body: Json = {"model_path": folder, "weight_version": version, "flush_cache": flush_cache}
        answer = self._call("POST", "/update_weights_from_disk", body, timeout_s)
        if answer.get("success") is not True:
            raise TransferError(f"{self.url}/update_weights_from_disk: {answer.get('message', answer)}")

    def _call(self, method: str, path: str, body: Json | None, timeout_s: float) -> Json:
        data = None if body is None else json.dumps(body).encode()
        # The scheme was checked: no file: or ftp: here.
        request = urllib.request.Request(self.url + path, data, self._headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                found: object = json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            said = error.read(_SHOWN_BYTES).decode(errors="replace")
            kind = _NotThere if error.code == _NOT_FOUND else TransferError
            raise kind(f"{self.url}{path} answered {error.code}: {said}") from error
        except (OSError, ValueError) as error:
            raise TransferError(f"{self.url}{path} gave no answer within {timeout_s:g} s: {error}") from error
        if not isinstance(found, dict):
            raise TransferError(f"{self.url}{path} answered {found!r}; expected an object")
        return cast("Json", found)


class _NotThere(TransferError):
    pass


_NOT_FOUND = 404
_SHOWN_BYTES = 500
