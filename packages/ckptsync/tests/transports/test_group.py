"""A process group that is left, or that nobody answers in: over gloo, and by the way that NCCL is driven."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from offbeat_ckptsync.errors import TransferError
from offbeat_ckptsync.toolkit.store import Store
from offbeat_ckptsync.transports import broadcast as groups
from offbeat_ckptsync.transports.broadcast import CHUNK_BYTES, Group

LONG_S = 3000.0  # no wait that ends early has to do with it


@pytest.fixture(params=["gloo", "as NCCL is driven", pytest.param("nccl", marks=pytest.mark.gpu(2))])
def devices(request, monkeypatch):
    """Return the devices of two ranks; "as NCCL is driven" connects, cuts and waits so, over gloo."""
    if request.param == "nccl":
        return ["cuda:0", "cuda:1"]
    if request.param == "gloo":
        return ["cpu", "cpu"]

    def gloo(store, rank, world, device, timeout_s):
        return groups._gloo(store, rank, world, "127.0.0.1", timeout_s)

    monkeypatch.setattr(groups, "nccl_group", gloo)
    return ["cpu:0", "cpu:0"]  # torch's own name for the CPU, and not the one that means gloo


class Ends:
    """Rank 0 and 1 of a group, in this process."""

    def __init__(self, devices):
        self.devices = devices
        self.store = Store.serve("127.0.0.1")
        self.ends = [Group("g", [["m", 0]]) for _ in devices]
        self.both(lambda rank: self.build(rank, 600.0))

    def build(self, rank, timeout_s):
        joined = Store.join("127.0.0.1", self.store.port, 600.0)
        self.ends[rank].build(joined, rank, "127.0.0.1", self.devices[rank], timeout_s)

    def both(self, call):
        failures = []

        def run(rank):
            try:
                call(rank)
            except (RuntimeError, TransferError, AssertionError) as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
        assert not any(thread.is_alive() for thread in threads)
        assert failures == []

    def leave(self):
        for end in self.ends:
            end.leave()


@pytest.fixture
def ends(devices):
    made = Ends(devices)
    yield made
    made.leave()


def test_payloads_of_any_size_cross(ends):
    for num_bytes in (1, CHUNK_BYTES, 5 * CHUNK_BYTES + 3):
        want = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
        payloads = [
            want.to(ends.devices[0]),
            torch.zeros(num_bytes, dtype=torch.uint8, device=ends.devices[1]),
        ]
        ends.both(lambda rank, each=payloads: ends.ends[rank].broadcast(each[rank], LONG_S))
        assert torch.equal(payloads[1].cpu(), want)


def test_a_payload_is_begun_while_nobody_has_taken_the_one_before_it(ends):
    for end in ends.ends:
        end._chunk_bytes = min(end._chunk_bytes, 1 << 20)
    wants = [torch.randint(0, 256, (2 << 20,), dtype=torch.uint8) for _ in range(5)]
    first = [
        ends.ends[0].start(want.to(ends.devices[0]), LONG_S) for want in wants[:2]
    ]  # nobody receives yet
    got = [torch.zeros(2 << 20, dtype=torch.uint8, device=ends.devices[1]) for _ in wants]

    def both(rank):
        if rank == 0:
            waits = [*first, *(ends.ends[0].start(want.to(ends.devices[0]), LONG_S) for want in wants[2:])]
        else:
            waits = [ends.ends[1].start(into, LONG_S) for into in got]
        for wait in waits:
            wait()

    ends.both(both)
    assert all(torch.equal(into.cpu(), want) for into, want in zip(got, wants, strict=True))


def test_leaving_ends_a_wait_that_nobody_answers_long_before_its_deadline(ends):
    end, said = ends.ends[1], []
    payload = torch.zeros(1 << 20, dtype=torch.uint8, device=ends.devices[1])

    def wait():
        try:
            end.broadcast(payload, LONG_S)
        except TransferError as error:
            said.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.2)  # so that it waits, mostly; it is to end as well if it does not yet
    end.leave()
    thread.join(600)
    assert said == ["the group was left"]


@pytest.mark.parametrize("nums", [(4, 2), (2, 4)], ids=["the source is ahead", "the member is ahead"])
def test_a_group_that_all_have_left_is_gone_long_before_its_deadline(ends, nums):
    """Works that were done held one side's connections, for which the other side's works waited until their deadline."""
    payloads = [torch.zeros(1 << 20, dtype=torch.uint8, device=each) for each in ends.devices]
    waits = [
        [end.start(payload, LONG_S) for _ in range(num)]
        for end, payload, num in zip(ends.ends, payloads, nums, strict=True)
    ]
    while not all(each[0].is_completed() for each in ends.ends[nums.index(2)]._flying if each):
        time.sleep(0.01)  # done, and nobody has asked for it yet
    ends.leave()
    for thread in groups._leaving[-2:]:
        thread.join(600)
        assert not thread.is_alive()
    with pytest.raises(TransferError, match="the group was left"):
        waits[nums.index(4)][-1]()


def test_a_wait_ends_at_its_deadline_and_says_so(ends):
    payload = torch.zeros(1 << 20, dtype=torch.uint8, device=ends.devices[1])
    with pytest.raises((RuntimeError, TransferError), match=r"in time|[Tt]imed out"):
        ends.ends[1].broadcast(payload, 0.1)


def test_who_does_not_come_is_not_waited_for_longer_than_the_deadline(devices):
    store = Store.serve("127.0.0.1")
    alone = Group("g", [["m", 3]])
    with pytest.raises(TransferError, match=r"the group of 2 \(source, rank 3 of m\) did not form"):
        alone.build(store, 0, "127.0.0.1", devices[0], 0.5)


def test_only_the_group_that_is_made_has_no_watchdog(monkeypatch):
    seen = []

    class Nccl:
        class Options:
            pass

        def __init__(self, store, rank, world, options):
            seen.append(os.environ.get("TORCH_NCCL_BLOCKING_WAIT"))

    monkeypatch.setattr("torch.distributed.ProcessGroupNCCL", Nccl)
    monkeypatch.setattr(groups, "use_device", lambda device: seen.append(device))
    for before in (None, "0"):
        if before is not None:
            monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", before)
        groups.nccl_group(None, 0, 2, "cuda:1", 5.0)
        assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == before
    assert seen == ["cuda:1", "1", "cuda:1", "1"]


class LeftInACall:
    """A process group that is left while a broadcast is begun: by then nobody else holds it."""

    def __init__(self, group, inner):
        self.group, self.inner, self.aborted = group, inner, threading.Event()

    def broadcast(self, *given):
        work = self.inner.broadcast(*given)
        self.group.leave()
        assert self.aborted.wait(600)
        groups._leaving[-1].join(1.0)  # it lets go of the group, unless it waits for this call
        return work

    def abort(self):
        self.aborted.set()


def test_who_is_just_beginning_something_in_a_group_that_is_left_does_not_wait_for_what_it_began(devices):
    ends = Ends(devices)
    ends.ends[0]._held = [LeftInACall(ends.ends[0], ends.ends[0]._held.pop())]
    begun = threading.Event()

    def begin():
        payload = torch.zeros(8, dtype=torch.uint8, device=devices[0])
        ends.ends[0].start(payload, LONG_S)  # nobody receives it
        begun.set()

    threading.Thread(target=begin, name="begin", daemon=True).start()
    assert begun.wait(300)
    ends.leave()


class Aborting:
    """A process group as NCCL drives it, whose kernels end when `abort` has returned."""

    def __init__(self):
        self.goes_on = threading.Event()

    def broadcast(self, tensors, options):
        class Never:
            def is_completed(self):
                return False

        return Never()

    def abort(self):
        assert self.goes_on.wait(600)


def test_memory_that_a_kernel_may_still_write_to_is_held_until_the_abort_is_done():
    """Who staged lets go of it at once; another tensor would be laid there meanwhile."""
    group, inner = Group("g", [["m", 0]]), Aborting()
    group._held, group._chunk_bytes = [inner], 1 << 10
    memory = np.zeros(2 << 10, dtype=np.uint8)
    payload, is_there = torch.from_numpy(memory), weakref.ref(memory)
    end = group.start(payload, LONG_S)
    group.leave()
    with pytest.raises(TransferError, match="the group was left"):
        end()
    del payload, memory, end, group
    gc.collect()
    assert is_there() is not None
    inner.goes_on.set()
    groups._leaving[-1].join(600)
    gc.collect()
    assert is_there() is None
