from __future__ import annotations

import dataclasses

import pytest

from offbeat_ckptsync.transports.topology import Link, Place, choose, here, link_between
from offbeat_ckptsync.wire import dumps, loads

HOME = Place(host="boot-1", hostname="one", user=7, network=42, gpu="GPU-a")
LINKS = {
    "GPU-a": Link.SAME,
    "GPU-b": Link.NVLINK,
    "GPU-c": Link.PCIE,
    "GPU-d": Link.NONE,
    "GPU-e": Link.UNKNOWN,
}


def at(**changes):
    return dataclasses.replace(HOME, **changes)


@pytest.mark.parametrize(
    ("device", "places", "transport", "why"),
    [
        ("cpu", {"a": at(), "b": at()}, "shm", "all 2 receiving ranks are on the source's machine, one"),
        (
            "cpu",
            {"a": at(), "b": at(host="boot-2", hostname="two")},
            "broadcast",
            "b is on another machine (two; ",
        ),
        ("cpu", {"a": at(user=8)}, "broadcast", "a is of another user (8; the source is of 7)"),
        ("cpu", {"a": at(network=43)}, "broadcast", "a is in another network namespace"),
        ("cpu", {}, "broadcast", "nobody"),
        ("cuda", {"a": at()}, "cuda_ipc", "by the same GPU"),
        ("cuda", {"a": at(gpu="GPU-b"), "b": at(gpu="GPU-c")}, "cuda_ipc", "by NVLink, PCIe peer-to-peer"),
        (
            "cuda",
            {"a": at(), "b": at(gpu="GPU-d")},
            "broadcast",
            "of the source and of b have no peer-to-peer link",
        ),
        ("cuda", {"a": at(gpu="GPU-e")}, "broadcast", "nvidia-ml-py is not installed"),
        ("cuda", {"a": at(host="boot-2")}, "broadcast", "a is on another machine"),
    ],
)
def test_the_choice_and_its_reason(device, places, transport, why):
    choice = choose(HOME, places, device=device, link=lambda _, other: LINKS[other])
    assert choice.transport == transport
    assert why in choice.why


def test_this_process_knows_its_place_and_it_crosses_a_wire():
    place = here("cpu")
    assert place == here("cpu")
    assert len(place.host) == 36
    assert place.network > 0
    assert loads(Place, dumps(place)) == place


def test_a_gpu_is_itself_and_an_unknown_one_is_said_to_be_unknown():
    assert link_between("GPU-x", "GPU-x") is Link.SAME
    assert link_between("GPU-no-such", "GPU-none") is Link.UNKNOWN
    assert link_between("", "") is Link.UNKNOWN
