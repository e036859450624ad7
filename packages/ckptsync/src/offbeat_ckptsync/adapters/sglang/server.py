"""The few calls of a server over HTTP.

What SGLang holds, against what it was given: the checksums of its `/weights_checker`, computed here from the tensors sent.

A server answers an update with success whatever names were in it. Its checker (`weight_checker.py`, 0.5.23) hashes each parameter
where it lies, on every rank: on a CPU SHA-256 of the bytes, the first eight of them; on a GPU `gpu_hash`. A parameter is a tensor
of the checkpoint or several of them one after the other (`_FUSED`, and `_STACKED`, expert after expert); of ranks that share the model
each holds its part, as Megatron-LM cuts (arXiv 1909.08053); embeddings are filled up with rows of zeros. A server of which that cannot be told is refused.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from offbeat_ckptsync.ends.buckets import bytes_of
from offbeat_ckptsync.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence

    from offbeat_ckptsync.toolkit.wire import Json


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
        """Return what it says of the parameters that its ranks hold; `held_by_ranks` reads it."""
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


_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_STACKED = (
    ("w13_weight", ("gate_proj", "up_proj")),
    ("w13_weight", ("w1", "w3")),
    ("w2_weight", ("down_proj",)),
    ("w2_weight", ("w2",)),
)
_BY_ROWS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "gate_proj",
    "up_proj",
    "w1",
    "w3",
)  # each rank computes some of their outputs
_BY_COLUMNS = ("o_proj", "down_proj", "w2")  # each rank reads some of their inputs
_ROUTER = "gate"
_OF_KEYS = ("k_proj", "v_proj")
_PADDED = ("embed_tokens.weight", "lm_head.weight")
_HEAD = "lm_head.weight"
_ROWS = 64


class NotProvableError(ValueError):
    """What a server holds cannot be told from what it is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a server holds its model: on GPUs or not, shared by `num_ranks`, with `num_kv_heads` heads of keys in each layer.

    The number of heads matters where ranks share the model; 0 means that it is not known.
    """

    on_gpu: bool = False
    num_ranks: int = 1
    num_kv_heads: int = 0


class Proof:
    """The tensors that each parameter of one server is made of."""

    def __init__(
        self, held: Collection[str], given: Collection[str], layout: Layout, *, tied: bool = True
    ) -> None:
        """Find what each of the parameters `held` by a rank is made of, among the names of tensors that are `given`.

        A server that has no head of its own serves the embedding for it, where the two may be `tied`.

        Raises:
            NotProvableError: there is a parameter, or a tensor, that belongs to nothing, or ranks share what cannot be told.
        """
        self._layout = layout
        self._sources = {name: _source(name, given) for name in held}
        used = {one for made_of in self._sources.values() for one in made_of}
        unknown = sorted(name for name, made_of in self._sources.items() if not made_of)
        left = sorted(name for name in given if name not in used and not (tied and name == _HEAD))
        if unknown or left:
            raise NotProvableError(
                f"parameters {unknown[:5]} are made of no tensors known here, tensors {left[:5]} are in no parameter"
            )
        if layout.num_ranks > 1:
            self._require_shares(used)

    def _require_shares(self, used: Collection[str]) -> None:
        strange = sorted(name for name in used if not _divides(name) and not _is_whole(name))
        if strange:
            raise NotProvableError(
                f"how {self._layout.num_ranks} ranks share {strange[:5]} is not known here"
            )
        heads, ranks = self._layout.num_kv_heads, self._layout.num_ranks
        if not heads or max(heads, ranks) % min(heads, ranks):
            raise NotProvableError(f"{ranks} ranks cannot be told to share {heads} heads of keys and values")

    def expected(self, tensor: Callable[[str], torch.Tensor]) -> list[dict[str, str]]:
        """Return what each rank must say once the server holds `tensor(name)` for every name; hashed where that lies."""
        found: list[dict[str, str]] = [{} for _ in range(self._layout.num_ranks)]
        for name, made_of in self._sources.items():
            tensors = [tensor(one).detach() for one in made_of]
            for rank, of_rank in enumerate(found):
                parts = [
                    _part(one, whole, rank, self._layout) for one, whole in zip(made_of, tensors, strict=True)
                ]
                of_rank[name] = _checksum(parts, on_gpu=self._layout.on_gpu)
        return found


def held_by_ranks(answer: Mapping[str, Any], num_ranks: int) -> list[dict[str, str]]:
    """Return the checksums in what `/weights_checker` said, rank by rank.

    Raises:
        NotProvableError: it is not of `num_ranks` ranks that share one model, or they hold parameters of other names.
    """
    ranks: list[Any] = answer.get("ranks") or []
    by_rank: dict[int, dict[str, str]] = {}
    for said in ranks:
        places: list[dict[str, int]] = said.get("parallelism_info") or [{}]
        about = places[0]
        if about.get("pp_size", 1) == about.get("dp_size", 1) == 1:
            by_rank[about.get("tp_rank", 0)] = said["checksums"]
    found = [by_rank[rank] for rank in sorted(by_rank)]
    if len(ranks) != num_ranks or len(found) != num_ranks or len({frozenset(one) for one in found}) != 1:
        raise NotProvableError(
            f"/weights_checker gave no checksums of {num_ranks} rank(s) that share one model: {str(answer)[:500]}"
        )
    return found


def differing(expected: Sequence[Mapping[str, str]], held: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the parameters that are not what they should be, or not there at all, on any rank, sorted."""
    return sorted(
        {
            name
            for wanted, found in zip(expected, held, strict=True)
            for name in wanted.keys() | found.keys()
            if wanted.get(name) != found.get(name)
        }
    )


def _source(name: str, given: Collection[str]) -> tuple[str, ...]:
    if name in given:
        return (name,)
    for fused, parts in _FUSED.items():
        made_of = tuple(name.replace(f".{fused}.", f".{part}.") for part in parts)
        if made_of[0] != name and all(one in given for one in made_of):
            return made_of
    for stacked, parts in _STACKED:
        if name.endswith(f".experts.{stacked}"):
            made_of = _of_experts(name.removesuffix(stacked), parts, given)
            if made_of:
                return made_of
    return ()


def _of_experts(prefix: str, parts: Sequence[str], given: Collection[str]) -> tuple[str, ...]:
    """Return the tensors of all experts below `prefix`, of each those called `parts`."""
    found: list[str] = []
    for expert in itertools.count():
        each = [f"{prefix}{expert}.{part}.weight" for part in parts]
        if not all(one in given for one in each):
            return tuple(found)
        found += each
    raise AssertionError("numbers do not end")


def _module(name: str) -> str:
    return name.rpartition(".")[0].rpartition(".")[2]


def _divides(name: str) -> bool:
    """Whether each rank holds its own part of a tensor, or all the whole."""
    module = _module(name)
    return (
        name.endswith(_PADDED) or module in _BY_ROWS or (module in _BY_COLUMNS and name.endswith(".weight"))
    )


def _is_whole(name: str) -> bool:
    """Whether all ranks hold the whole of a tensor."""
    module = _module(name)
    return "norm" in name or module == _ROUTER or (module in _BY_COLUMNS and name.endswith(".bias"))


def _part(name: str, whole: torch.Tensor, rank: int, layout: Layout) -> torch.Tensor:
    """Return what `rank` holds of a tensor."""
    ranks, size = layout.num_ranks, len(whole) if whole.dim() else 1
    if name.endswith(_PADDED):
        step = _ROWS if -(-size // _ROWS) * _ROWS % ranks == 0 else _ROWS * ranks
        share = -(-size // step) * step // ranks
        mine = whole[rank * share : (rank + 1) * share]
        return torch.cat([mine, mine.new_zeros(share - len(mine), *mine.shape[1:])])
    if ranks == 1 or not _divides(name):
        return whole
    if _module(name) in _BY_COLUMNS:
        return whole.chunk(ranks, dim=1)[rank]
    if _module(name) in _OF_KEYS and layout.num_kv_heads < ranks:  # several ranks have the same head
        return whole.chunk(layout.num_kv_heads)[rank * layout.num_kv_heads // ranks]
    return whole.chunk(ranks)[rank]


def _checksum(parts: Sequence[torch.Tensor], *, on_gpu: bool) -> str:
    if on_gpu:
        return f"{gpu_hash(torch.cat([bytes_of(part) for part in parts])):016x}"
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(bytes_of(part).cpu().numpy().data)
    return hasher.digest()[:8].hex()


_MASK32, _MASK64 = (1 << 32) - 1, (1 << 64) - 1
_TILE = 8192  # words
_SPAN = 128 * _TILE  # words that are looked at together: what is computed of them fits a cache
_SEEDS = (0x243F6A88, ((0x243F6A88 * 0x9E3779B1) ^ 0xDEADBEEF) & _MASK32)
_PLACES = ((0x27D4EB2D, 15), (0x165667B1, 13))


def gpu_hash(data: torch.Tensor) -> int:
    """Return the 64-bit hash that SGLang's GPUs compute of `data` [bytes], uint8, on any device (`gpu_tensor_hash.py`, 0.5.23).

    Tiles of 8,192 words of 32 bits: each word is mixed with its place, by the finalizer of MurmurHash3, twice; what comes of a
    tile is summed and mixed with the length; the tiles' 64 bits are summed, and mixed as in splitmix64.
    """
    words = torch.nn.functional.pad(data, (0, -len(data) % 4)).view(torch.int32)
    if not len(words):
        return 0
    total = 0
    for first in range(0, len(words), _SPAN):
        span = words[first : first + _SPAN]
        place = torch.arange(first, first + len(span), device=data.device).to(torch.int32)
        for (factor, turn), seed, shift in zip(_PLACES, _SEEDS, (32, 0), strict=True):
            at = (place * _int32(factor) + _int32(seed)) ^ (place << turn | _shifted(place, 32 - turn))
            mixed = torch.nn.functional.pad(_mixed(span ^ at), (0, -len(span) % _TILE))
            tiles = mixed.view(-1, _TILE).sum(1, dtype=torch.int32) ^ _int32(4 * len(words))
            total += int((_mixed(tiles).to(torch.int64) & _MASK32).sum()) << shift
    x = total & _MASK64
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK64
    return x ^ x >> 31


def _int32(word: int) -> int:
    """Return the low 32 bits of `word` as torch's int32 has them, whose sums and products wrap."""
    return ((word & _MASK32) ^ 1 << 31) - (1 << 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift 32-bit words to the right, zeros coming in."""
    return (x >> bits) & ((1 << 32 - bits) - 1)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's finalizer of 32 bits (Appleby, smhasher)."""
    x = (x ^ _shifted(x, 16)) * _int32(0x85EBCA6B)
    x = (x ^ _shifted(x, 13)) * _int32(0xC2B2AE35)
    return x ^ _shifted(x, 16)
