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
    network: int  # network namespace: abstract sockets are known within one
    gpu: str = ""  # UUID of the current CUDA device, or empty


class Link(StrEnum):
    """How two GPUs of one machine reach each other's memory."""

    SAME = "the same GPU"
    NVLINK = "NVLink"
    PCIE = "PCIe peer-to-peer"
    NONE = "no peer-to-peer link"
    UNKNOWN = "an unknown link (nvidia-ml-py is not installed, or NVML does not answer)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A transport and the reason for it, in one sentence."""

    transport: str
    why: str


def here(device: str) -> Place:
    """Return the place of this process, with its GPU where `device` is a CUDA device with an index."""
    return Place(
        host=_read("/proc/sys/kernel/random/boot_id") or socket.gethostname(),
        hostname=socket.gethostname(),
        user=os.getuid(),
        network=_inode("/proc/self/ns/net"),
        gpu="" if device == "cpu" else gpu_uuid(torch.device(device).index),
    )


def choose(
    source: Place,
    receivers: Mapping[str, Place],
    *,
    device: str,
    link: Callable[[str, str], Link] | None = None,
) -> Choice:
    """Pick the transport for ranks at these places, by their names; pure but for `link` (two GPU UUIDs; NVML's word).

    One machine, user and network namespace: `shm` on CPUs; on GPUs `cuda_ipc` where every pair shares a GPU or has a
    peer-to-peer link. Else `broadcast`.
    """
    for name, place in receivers.items():
        if apart := _apart(source, place):
            return Choice(transport="broadcast", why=f"{name} is {apart}")
    if not receivers:
        return Choice(transport="broadcast", why="there is nobody to send to")
    if device == "cpu":
        return Choice(
            transport="shm",
            why=f"all {len(receivers)} receiving ranks are on the source's machine, {source.hostname}",
        )
    link = link_between if link is None else link
    links = {name: link(source.gpu, place.gpu) for name, place in receivers.items()}
    for name, found in links.items():
        if found in (Link.NONE, Link.UNKNOWN):
            return Choice(transport="broadcast", why=f"the GPUs of the source and of {name} have {found}")
    kinds = ", ".join(sorted({str(found) for found in links.values()}))
    return Choice(
        transport="cuda_ipc",
        why=f"on {source.hostname} all receiving ranks reach the source's GPU by {kinds}",
    )


def link_between(one: str, other: str) -> Link:
    """Return how two GPUs of this machine, given by UUID, are linked, as NVML says."""
    if one == other and one:
        return Link.SAME
    try:
        import pynvml
    except ImportError:
        return Link.UNKNOWN
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
    if place.host != source.host:
        return f"on another machine ({place.hostname}; the source is on {source.hostname})"
    if place.user != source.user:
        return f"of another user ({place.user}; the source is of {source.user})"
    if place.network != source.network or not place.network:
        return "in another network namespace (a container, say)"
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
