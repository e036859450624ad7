"""Where the ranks of a sync are, and which transport suits that."""

# nvidia-ml-py has no types, torch's CUDA interface some.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingImports=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


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
