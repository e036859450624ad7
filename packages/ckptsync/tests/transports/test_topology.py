from __future__ import annotations

import dataclasses
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from as_text import dumps, loads
from offbeat_ckptsync.transports.rendezvous import Link, Place, choose, here, link_between

HOME = Place(host="boot-1", hostname="one", user=7, network=42, gpu="GPU-a", free_bytes=1000)
LINKS = {
    "GPU-a": Link.SAME,
    "GPU-b": Link.NVLINK,
    "GPU-c": Link.PCIE,
    "GPU-d": Link.NONE,
    "GPU-e": Link.UNASKED,
    "GPU-f": Link.UNKNOWN,
}


def at(**changes):
    return dataclasses.replace(HOME, **changes)


FAR = {"host": "boot-2", "hostname": "two"}


@pytest.mark.parametrize(
    ("places", "transport", "why"),
    [
        ({"a": at(), "b": at()}, "shm", "all 2 receiving ranks are on the source's machine, one"),
        ({"b": at(**FAR)}, "broadcast", "b is on another machine (two; "),
        ({"a": at(), "b": at(**FAR)}, "relay", "b is on another machine (two; "),
        ({"a": at(**FAR), "b": at(**FAR)}, "relay", "a is on another machine (two; "),
        ({"a": at(user=8)}, "broadcast", "a is of another user (8; the source is of 7)"),
        ({"a": at(network=43)}, "broadcast", "a is in another network namespace"),
        ({}, "broadcast", "nobody"),
    ],
)
def test_in_host_memory_the_choice_and_its_reason(places, transport, why):
    choice = choose(HOME, places, device="cpu", num_bytes=10**9)
    assert (choice.transport, choice.device) == (transport, "cpu")
    assert why in choice.why


@pytest.mark.parametrize(
    ("places", "transport", "device", "why"),
    [
        ({"a": at()}, "cuda_ipc", "cuda", "by the same GPU"),
        ({"a": at(gpu="GPU-b"), "b": at(gpu="GPU-c")}, "cuda_ipc", "cuda", "by NVLink, PCIe peer-to-peer"),
        ({"a": at(gpu="GPU-b"), "b": at(gpu="GPU-d")}, "broadcast", "cuda", "of b have no peer-to-peer link"),
        ({"a": at(gpu="GPU-e")}, "broadcast", "cuda", "nvidia-ml-py is not installed (offbeat-ckptsync[nvml])"),
        ({"a": at(gpu="GPU-f")}, "broadcast", "cuda", "a link that NVML does not know"),
        ({"a": at(gpu="GPU-b", **FAR)}, "broadcast", "cuda", "a is on another machine"),
        # NCCL refuses two ranks on one GPU, so it is never asked.
        ({"a": at(), "b": at(gpu="GPU-d")}, "shm", "cpu", "the source and a share a GPU, which NCCL refuses"),
        ({"a": at(), "b": at(gpu="GPU-e")}, "shm", "cpu", "nvidia-ml-py is not installed"),
        ({"a": at(gpu="GPU-d"), "b": at(gpu="GPU-d")}, "shm", "cpu", "a and b share a GPU"),
        ({"a": at(), "b": at(gpu="GPU-b", **FAR)}, "relay", "cpu", "b is on another machine (two; the source"),
        ({"a": at(), "b": at(gpu="GPU-b", **FAR)}, "relay", "cpu", "the source and a share a GPU"),
        # One rank per machine receives, into host memory.
        ({"a": at(gpu="GPU-b", **FAR), "b": at(gpu="GPU-c", **FAR)}, "relay", "cuda", "a is on another machine"),
        ({"a": at(gpu="GPU-b", **FAR), "b": at(gpu="GPU-b", **FAR)}, "relay", "cuda", "a is on another machine"),
        ({"a": at(gpu="GPU-b", free_bytes=99, **FAR)}, "relay", "cuda", "100 bytes do not fit on the GPU of a"),
        # What does not fit beside the served weights is staged in host memory.
        ({"a": at(gpu="GPU-b"), "b": at(gpu="GPU-c", free_bytes=99)}, "shm", "cpu", "100 bytes do not fit on the GPU of b"),
    ],
)  # fmt: skip
def test_on_gpus_the_choice_and_its_reason(places, transport, device, why):
    choice = choose(HOME, places, device="cuda:0", num_bytes=100, link=lambda _, other: LINKS[other])
    assert (choice.transport, choice.device) == (transport, device)
    assert why in choice.why


GPUS = st.sampled_from(["GPU-a", "GPU-b", "GPU-d", "GPU-e"])
PLACES = st.dictionaries(
    st.text("abc", min_size=1), st.builds(at, gpu=GPUS, host=st.sampled_from(["boot-1", "boot-2"]))
)


@given(PLACES)
def test_nccl_is_never_chosen_where_two_ranks_share_a_gpu(places):
    choice = choose(HOME, places, device="cuda:0", num_bytes=100, link=lambda _, other: LINKS[other])
    gpus = [HOME.gpu, *(place.gpu for place in places.values())]
    if (choice.transport, choice.device) == ("broadcast", "cuda"):
        assert len({*gpus}) == len(gpus)
    if (choice.transport, choice.device) == ("relay", "cuda"):  # a machine's first rank is its relay
        firsts = {place.host: place.gpu for place in reversed(places.values())}
        assert len({HOME.gpu, *firsts.values()}) == 1 + len(firsts)


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


def test_without_nvidia_ml_py_the_link_is_said_to_be_unasked(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert link_between("GPU-x", "GPU-y") is Link.UNASKED
    assert link_between("GPU-x", "GPU-x") is Link.SAME
