"""The few calls of a server over HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from offbeat_ckptsync.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    import torch

    from offbeat_ckptsync.wire import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What a server computes on ("cpu", "cuda"), how many ranks share its model, and the folder that it first loaded."""

    kind: str
    num_ranks: int
    folder: str


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

    def started(self, timeout_s: float) -> Started:
        """Return how the server was started."""
        info = self._call("GET", "/server_info", None, timeout_s)
        return Started(
            kind=str(info.get("device", "")),
            num_ranks=int(cast("int", info.get("tp_size", 1))),
            folder=str(info.get("model_path", "")),
        )

    def pause(self, mode: str, timeout_s: float) -> None:
        """Stop generating; `mode` is SGLang's: "retract", "in_place" or "abort"."""
        self._call("POST", "/pause_generation", {"mode": mode}, timeout_s)

    def resume(self, timeout_s: float) -> None:
        """Go on generating."""
        self._call("POST", "/continue_generation", {}, timeout_s)

    def load(self, folder: str, version: str, *, flush_cache: bool, timeout_s: float) -> None:
        """Load the safetensors files in `folder` in place, as weight version `version`."""
        body: Json = {"model_path": folder, "weight_version": version, "flush_cache": flush_cache}
        self._do("/update_weights_from_disk", body, timeout_s)

    def take(self, parts: Iterable[list[str]], version: str, *, flush_cache: bool, timeout_s: float) -> None:
        """Load tensors in a session of SGLang's (0.5.21 and later); `parts` as SGLang reads them, in base64, for each rank."""
        with self.session(timeout_s):
            for part in parts:
                body: Json = {
                    "serialized_named_tensors": part,
                    "load_format": "flattened_bucket",
                    "flush_cache": flush_cache,
                    "weight_version": version,
                }
                self._do("/update_weights_from_tensor", body, timeout_s)

    @contextmanager
    def session(self, timeout_s: float) -> Generator[None]:
        """Begin an update of SGLang's, and end it where nothing was raised; what is torn stays so."""
        self._do("/begin_weight_update", {}, timeout_s)
        yield
        self._do("/end_weight_update", {}, timeout_s)

    def join(
        self, group: str, address: tuple[str, int], rank_ids: int, backend: str, timeout_s: float
    ) -> None:
        """Meet at `address`, as ranks 1 to `rank_ids`, in a process group over `backend`; returns when it has formed.

        Over NCCL that is when all know of each other: the first broadcast connects them.
        """
        body: Json = {
            "master_address": address[0],
            "master_port": address[1],
            "rank_offset": 1,
            "world_size": 1 + rank_ids,
            "group_name": group,
            "backend": backend,
        }
        self._do("/init_weights_update_group", body, timeout_s)

    def receive(
        self,
        part: list[tuple[str, torch.Tensor]],
        version: str,
        *,
        group: str,
        flush_cache: bool,
        timeout_s: float,
    ) -> None:
        """Load what rank 0 of `group` broadcasts: tensors of these names, shapes and dtypes, in this order."""
        body: Json = {
            "names": [name for name, _ in part],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in part],
            "shapes": [list(tensor.shape) for _, tensor in part],
            "group_name": group,
            "flush_cache": flush_cache,
            "weight_version": version,
        }
        self._do("/update_weights_from_distributed", body, timeout_s)

    def leave(self, group: str, timeout_s: float) -> None:
        """Let go of a process group."""
        self._do("/destroy_weights_update_group", {"group_name": group}, timeout_s)

    def checksums(self, timeout_s: float) -> Json:
        """Return what it says of the parameters that its ranks hold; `proof.held_by_ranks` reads it."""
        return self._do("/weights_checker", {"action": "checksum"}, timeout_s)

    def _do(self, path: str, body: Json, timeout_s: float) -> Json:
        answer = self._call("POST", path, body, timeout_s)
        if answer.get("success") is not True:
            raise TransferError(f"{self.url}{path}: {answer.get('message', answer)}")
        return answer

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
