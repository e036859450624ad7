"""Where the two sides of a sync meet: a store of the source's, at which every receiving rank says a word and hears one.

Words are signed (docs/sync-protocol.md, section 7). One with another proof counts as not there: who reaches the port without the
secret can disturb a sync, and takes no part in it.

Where the ranks of a sync are, and which transport suits that.
"""

# nvidia-ml-py has no types, torch's CUDA interface some.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingImports=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import threading
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from offbeat_ckptsync.errors import TransferError
from offbeat_ckptsync.toolkit.store import Store, is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from offbeat_ckptsync.toolkit.config import SyncConfig
    from offbeat_ckptsync.values import RankId, SyncOffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one process is. Plain, so that it crosses a wire."""

    host: str  # of this boot of this machine
    hostname: str  # for messages
    user: int
    network: int  # network namespace: loopback is one
    mounts: int = 0  # mount namespace: the sockets of `line` lie in a folder
    gpu: str = ""  # UUID of its GPU, or empty
    free_bytes: int = 0  # of that GPU's memory, now

    @property
    def loopback(self) -> str:
        """What those have in common who reach each other over loopback."""
        return f"{self.host}/{self.network}"


class Link(StrEnum):
    """How two GPUs of one machine reach each other's memory."""

    SAME = "the same GPU"
    NVLINK = "NVLink"
    PCIE = "PCIe peer-to-peer"
    NONE = "no peer-to-peer link"
    UNASKED = (
        "a link that nobody can be asked about, as nvidia-ml-py is not installed (offbeat-ckptsync[nvml])"
    )
    UNKNOWN = "a link that NVML does not know"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A transport, the device type that payloads are on, and the reason in one sentence."""

    transport: str
    device: str
    why: str


def here(device: str) -> Place:
    """Return the place of this process, with its GPU where `device` is a CUDA device with an index."""
    gpu, free_bytes = "", 0
    if device != "cpu":
        index = torch.device(device).index
        gpu, free_bytes = gpu_uuid(index), torch.cuda.mem_get_info(index)[0]
    return Place(
        host=_read("/proc/sys/kernel/random/boot_id") or socket.gethostname(),
        hostname=socket.gethostname(),
        user=os.getuid(),
        network=_inode("/proc/self/ns/net"),
        mounts=_inode("/proc/self/ns/mnt"),
        gpu=gpu,
        free_bytes=free_bytes,
    )


def machine_of(place: Place) -> str:
    """Return what ranks have in common that can share memory."""
    return f"{place.host}/{place.hostname}/{place.user}/{place.network}/{place.mounts}"


def choose(
    source: Place,
    receivers: Mapping[str, Place],
    *,
    device: str,
    num_bytes: int = 0,
    link: Callable[[str, str], Link] | None = None,
) -> Choice:
    """Pick how `num_bytes` reach ranks at these places, by their names; pure but for `link` (two GPU UUIDs; NVML's word).

    One machine, user and network namespace: `shm`, but on GPUs `cuda_ipc` where every pair shares a GPU or has a
    peer-to-peer link, or `broadcast` where NCCL can, as long as everything fits beside what is served. Across machines
    `broadcast`, or `relay` where one of them has several ranks (the source's own counts): by NCCL where those that it
    reaches have GPUs of their own, which it demands, through host memory otherwise.
    """
    if not receivers:
        return Choice(transport="broadcast", device=device, why="there is nobody to send to")
    far = next(
        (f"{name} is {_apart(source, at)}" for name, at in receivers.items() if _apart(source, at)), ""
    )
    if far:
        return _across(source, receivers, device, num_bytes, far)
    if device == "cpu":
        why = f"all {len(receivers)} receiving ranks are on the source's machine, {source.hostname}"
        return Choice(transport="shm", device="cpu", why=why)
    if full := _full(receivers, num_bytes):
        return Choice(transport="shm", device="cpu", why=full)
    shared = _shared_gpu(source, receivers)
    return _by_links(source, receivers, shared, link_between if link is None else link)


def _across(source: Place, receivers: Mapping[str, Place], device: str, num_bytes: int, far: str) -> Choice:
    """Pick among the ways from machine to machine; `far` says who is elsewhere."""
    machines: dict[str, dict[str, Place]] = {}
    for name, place in receivers.items():
        machines.setdefault(machine_of(place), {})[name] = place
    heads = {name: place for ranks in machines.values() for name, place in [*ranks.items()][:1]}
    several = len(heads) < len(receivers)
    if device == "cpu":
        relays = several or machine_of(source) in machines
        return Choice(transport="relay" if relays else "broadcast", device="cpu", why=far)
    if shared := _shared_gpu(source, heads):
        why = f"{far}; {shared}, which NCCL refuses, so everything goes through host memory"
        return Choice(transport="relay", device="cpu", why=why)
    full = _full(receivers, num_bytes)
    if several or full:
        return Choice(transport="relay", device="cuda", why="; ".join(filter(None, (far, full))))
    return Choice(transport="broadcast", device="cuda", why=far)


def _full(receivers: Mapping[str, Place], num_bytes: int) -> str:
    """Say on whose GPU there is no room for everything beside what it serves, or nothing."""
    for name, place in receivers.items():
        if place.free_bytes < num_bytes:
            return f"{num_bytes} bytes do not fit on the GPU of {name}, where {place.free_bytes} are free"
    return ""


def _by_links(
    source: Place, receivers: Mapping[str, Place], shared: str, link: Callable[[str, str], Link]
) -> Choice:
    """Pick among the ways of GPUs in one machine."""
    links = {name: link(source.gpu, place.gpu) for name, place in receivers.items()}
    poor = next((name for name, found in links.items() if found not in _REACHING), "")
    if not poor:
        kinds = ", ".join(sorted({str(found) for found in links.values()}))
        why = f"on {source.hostname} all receiving ranks reach the source's GPU by {kinds}"
        return Choice(transport="cuda_ipc", device="cuda", why=why)
    why = f"the GPUs of the source and of {poor} have {links[poor]}"
    if shared:
        return Choice(transport="shm", device="cpu", why=f"{why}; {shared}, which NCCL refuses")
    return Choice(transport="broadcast", device="cuda", why=why)


def _shared_gpu(source: Place, receivers: Mapping[str, Place]) -> str:
    """Say which two ranks are on one GPU, or nothing."""
    on = {source.gpu: "the source"}
    for name, place in receivers.items():
        if place.gpu in on:
            return f"{on[place.gpu]} and {name} share a GPU"
        on[place.gpu] = name
    return ""


_REACHING = (Link.SAME, Link.NVLINK, Link.PCIE)


def link_between(one: str, other: str) -> Link:
    """Return how two GPUs of this machine, given by UUID, are linked, as NVML says."""
    if one == other and one:
        return Link.SAME
    try:
        import pynvml
    except ImportError:
        return Link.UNASKED
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return Link.UNKNOWN
    try:
        return _link(pynvml, pynvml.nvmlDeviceGetHandleByUUID(one), pynvml.nvmlDeviceGetHandleByUUID(other))
    except pynvml.NVMLError:
        return Link.UNKNOWN
    finally:
        pynvml.nvmlShutdown()


def gpu_uuid(index: int) -> str:
    """Return the UUID of the CUDA device `index` as NVML writes it, "GPU-..."."""
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def _link(nvml: Any, one: Any, other: Any) -> Link:  # noqa: ANN401 -- a module and handles without types
    def works(kind: int) -> bool:
        return nvml.nvmlDeviceGetP2PStatus(one, other, kind) == nvml.NVML_P2P_STATUS_OK

    if works(nvml.NVML_P2P_CAPS_INDEX_NVLINK):
        return Link.NVLINK
    return Link.PCIE if works(nvml.NVML_P2P_CAPS_INDEX_READ) else Link.NONE


def _apart(source: Place, place: Place) -> str:
    if (place.host, place.hostname) != (source.host, source.hostname):  # machines of one snapshot boot alike
        return f"on another machine ({place.hostname}; the source is on {source.hostname})"
    if place.user != source.user:
        return f"of another user ({place.user}; the source is of {source.user})"
    if place.network != source.network or not place.network:
        return "in another network namespace (a container, say)"
    if place.mounts != source.mounts:
        return "in another mount namespace (a container, say)"
    return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


Word = dict[str, Any]
"""What a side says; a rank's has "num_ranks" of its member."""

_TICK_S = 0.1  # how soon a waiting side notices an abort


class Rendezvous:
    """Either side's way to the source's store. `name` is the transport's; see above for `asked` and `told`."""

    def __init__(
        self, name: str, config: SyncConfig, *, asked: str, told: str, beside: Rendezvous | None = None
    ) -> None:
        """Serve nothing yet; a source will, on `config.host`, or meets at the store that `beside` serves."""
        self._name = name
        self._host = config.host
        self._secret = config.secret
        self._asked = asked
        self._told = told
        self._beside = beside
        self._lock = threading.Lock()
        self._served: Store | None = None
        self._joined: dict[tuple[str, int], Store] = {}
        # Kept: a wait of a sync that is over may look only after the next one has begun.
        self._aborted: set[str] = set()

    @property
    def store(self) -> Store:
        """The source's own."""
        if self._beside is not None:
            return self._beside.store
        assert self._served is not None, "`open` comes first"
        return self._served

    def open(self, *, keep: str = "") -> dict[str, str | int | float]:
        """Host the store (once), forget what earlier syncs left there but for keys under `keep`, and say where it is."""
        with self._lock:
            if self._served is None:
                self._served = Store.serve(self._host)
            self._served.clear(keep)
        place = here("cpu")
        return {
            "host": self._served.host,
            "port": self._served.port,
            "machine": place.loopback,
            "hostname": place.hostname,
        }

    def call_roll(self, offer: SyncOffer, members: list[str]) -> dict[str, list[Word]]:
        """Wait for the word of every rank of every member; in rank order, by member.

        Raises:
            TransferError: not all answered within the offer's `rendezvous_s`, or it was aborted; names who is missing.
        """
        timeout_s = float(offer.endpoint["rendezvous_s"])
        deadline = time.monotonic() + timeout_s
        words: dict[str, Word] = {}

        def wait(rank_ids: list[tuple[str, int]]) -> None:
            keys = {self._key(offer, member, rank): f"rank {rank} of {member}" for member, rank in rank_ids}
            words.update(self._wait(self.store, offer, list(keys), deadline))
            if missing := [self._named(keys[key], key) for key in keys if key not in words]:
                cause = "aborted" if self.is_aborted(offer.sync_id) else f"no answer within {timeout_s:g} s"
                raise TransferError(f"{self._name}: {cause} at the roll call; missing: {', '.join(missing)}")

        def ranks(member: str) -> range:
            return range(int(words[self._key(offer, member, 0)]["num_ranks"]))

        wait([(member, 0) for member in members])
        wait([(member, rank) for member in members for rank in ranks(member)])
        return {
            member: [words[self._key(offer, member, rank)] for rank in ranks(member)] for member in members
        }

    def tell(self, offer: SyncOffer, word: Word) -> None:
        """Say the source's word to all ranks."""
        self._write(self.store, f"{offer.sync_id}/{self._told}", word)

    def answer(self, offer: SyncOffer, rank_id: RankId, word: Word) -> None:
        """Say a rank's word.

        Raises:
            TransferError: the store is not there, or on loopback of another machine.
        """
        key = self._key(offer, rank_id.member, rank_id.rank)
        self._write(self.source_store(offer, rank_id), key, {"num_ranks": rank_id.num_ranks, **word})

    def hear(self, offer: SyncOffer, rank_id: RankId) -> Word:
        """Wait for the source's word; raises `TransferError` where none comes in time."""
        timeout_s = float(offer.endpoint["rendezvous_s"])
        key, store = f"{offer.sync_id}/{self._told}", self.source_store(offer, rank_id)
        words = self._wait(store, offer, [key], time.monotonic() + timeout_s)
        if key in words:
            return words[key]
        if self.is_aborted(offer.sync_id):
            raise TransferError(
                f"{self._name}: {rank_id} waited for the source's word, and the sync was aborted"
            )
        forged = "what is there was written without our secret" if store.get(key) is not None else ""
        raise TransferError(
            f"{self._name}: {rank_id} waited {timeout_s:g} s for the source's word; "
            f"{forged or 'a member is missing'}"
        )

    def source_store(self, offer: SyncOffer, rank_id: RankId) -> Store:
        """Return this rank's connection to the source's store; raises as `answer` does."""
        where = (str(offer.endpoint["host"]), int(offer.endpoint["port"]))
        self._require_reachable(offer, rank_id)
        if where not in self._joined:
            self._joined = {where: Store.join(*where, float(offer.endpoint["rendezvous_s"]))}
        return self._joined[where]

    def private(self, text: str) -> str:
        """Return a name made of `text` that nobody can tell without the secret."""
        return self._proof(f"private {text}")

    def abort(self, sync_id: str) -> None:
        """End the waits of `sync_id` here."""
        with self._lock:
            self._aborted.add(sync_id)
            self._joined = {}  # a connection that was cut does not mend: the next sync makes a new one

    def is_aborted(self, sync_id: str) -> bool:
        """Say whether `abort` was called for this sync."""
        return sync_id in self._aborted

    def close(self) -> None:
        """Leave the stores."""
        self._served = None
        self._joined.clear()

    def _key(self, offer: SyncOffer, member: str, rank: int) -> str:
        return f"{offer.sync_id}/{self._asked}/{member}/{rank}"

    def _require_reachable(self, offer: SyncOffer, rank_id: RankId) -> None:
        """Loopback of another machine is nobody, or somebody else."""
        place = here("cpu")
        own = place.loopback
        if is_loopback(str(offer.endpoint["host"])) and offer.endpoint.get("machine", own) != own:
            raise TransferError(
                f"{self._name}: the source listens on loopback, but {rank_id} is on another machine "
                f"({place.hostname}; the source is on {offer.endpoint['hostname']}): let `host` of the source's settings "
                "be an address of its machine that all members reach"
            )

    def _named(self, who: str, key: str) -> str:
        return f"{who} (it answered without our secret)" if self.store.get(key) is not None else who

    def _write(self, store: Store, key: str, word: Word) -> None:
        store.set(key, json.dumps({"word": word, "proof": self._proof(_signed_text(key, word))}))

    def _wait(self, store: Store, offer: SyncOffer, keys: list[str], deadline: float) -> dict[str, Word]:
        """Return the proven words under `keys`, all of them unless the time is over; none once the sync was aborted.

        A source that stood still may say a word before it hears of the abort: nobody comes where that leads.
        """
        words: dict[str, Word] = {}
        for key in keys:
            while key not in words:
                left_s = deadline - time.monotonic()
                text = store.get(key, min(max(left_s, 0.0), _TICK_S))
                if self.is_aborted(offer.sync_id):
                    return {}
                if text is not None and (word := self._proven(key, text)) is not None:
                    words[key] = word
                elif left_s <= 0:
                    break
                elif text is not None:  # without our secret: the right one may still come
                    time.sleep(_TICK_S)
        return words

    def _proven(self, key: str, text: str) -> Word | None:
        try:
            told: Word = json.loads(text)
            word, proof = told["word"], str(told["proof"])
        except (ValueError, KeyError, TypeError):
            return None
        return (
            word
            if hmac.compare_digest(proof.encode(), self._proof(_signed_text(key, word)).encode())
            else None
        )

    def _proof(self, text: str) -> str:
        return hmac.digest(self._secret.encode(), text.encode(), hashlib.sha256).hex()


def _signed_text(key: str, word: Word) -> str:
    return f"{key} {json.dumps(word, sort_keys=True, separators=(',', ':'))}"
