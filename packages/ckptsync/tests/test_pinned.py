"""Host memory that is pinned where a process uses CUDA: by CUDA's runtime as a fake, and on a GPU."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
import torch

from offbeat_ckptsync.ends import buffers
from offbeat_ckptsync.ends.buckets import plan_buckets
from offbeat_ckptsync.ends.buffers import BucketBuilder, Buffers
from offbeat_ckptsync.ends.digest import digest
from offbeat_ckptsync.ends.manifest import manifest_of
from offbeat_ckptsync.ends.staging import Memory
from offbeat_ckptsync.toolkit import threads
from offbeat_ckptsync.toolkit.threads import HostPages
from offbeat_ckptsync.transports.shm import Mapping, Segment

NUM_BYTES = 100_000


class Runtime:
    """The two calls of CUDA's runtime, which remember what is registered."""

    def __init__(self, refusal=0):
        self.refusal = refusal
        self.registered = {}

    def cudaHostRegister(self, address, num_bytes, flags):
        assert address not in self.registered
        assert flags == 1, "for every GPU of the process"
        if not self.refusal:
            self.registered[address] = num_bytes
        return self.refusal

    def cudaHostUnregister(self, address):
        del self.registered[address]
        return 0


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()
    monkeypatch.setattr(threads, "cuda_runtime", lambda: made)
    return made


def make(kind):
    match kind:
        case "segment":
            return Segment(NUM_BYTES).memory
        case "staging":
            return Memory(NUM_BYTES, "cpu").lend()
        case _:
            return Buffers().take(1, NUM_BYTES)[0]


@pytest.mark.parametrize("kind", ["segment", "staging", "buffer"])
def test_memory_is_pinned_whole_until_the_last_tensor_over_it_is_gone(runtime, kind):
    memory = make(kind)
    ((address, num_bytes),) = runtime.registered.items()
    assert (address, num_bytes >= NUM_BYTES) == (memory.data_ptr(), True)
    part = memory[10:20].fill_(7)
    del memory
    gc.collect()
    assert runtime.registered, "a tensor over it lives"
    assert part.tolist() == [7] * 10
    del part
    gc.collect()
    assert runtime.registered == {}


def test_a_segment_that_is_closed_is_pinned_no_more(runtime):
    segment = Segment(NUM_BYTES)
    assert len(runtime.registered) == 1
    segment.close()
    gc.collect()
    assert runtime.registered == {}


def test_what_cannot_be_pinned_is_said_and_works_all_the_same(monkeypatch, caplog):
    forgotten = []
    refusing = Runtime(refusal=304)
    monkeypatch.setattr(threads, "cuda_runtime", lambda: refusing)
    monkeypatch.setattr(threads, "_forget_last_error", lambda: forgotten.append(True))
    with HostPages.private(NUM_BYTES) as pages:
        assert not pages.is_pinned
        pages[:3] = b"abc"
        assert pages[:3] == b"abc"
    assert forgotten, "torch would blame its next kernel for the refusal"
    assert f"{NUM_BYTES} bytes of host memory cannot be pinned (CUDA error 304)" in caplog.text


def test_a_view_of_the_source_s_pages_is_not_pinned(runtime):
    segment = Segment(NUM_BYTES)
    mapping = Mapping(segment.id, os.dup(segment.fd), NUM_BYTES)
    segment.memory[:4] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    assert mapping.view()[:4].tolist() == [1, 2, 3, 4]
    assert [*runtime.registered] == [segment.memory.data_ptr()]


def test_nothing_is_pinned_in_a_process_that_does_not_use_cuda():
    assert threads.cuda_runtime() is None or torch.cuda.is_initialized()
    if threads.cuda_runtime() is None:
        assert not HostPages.private(NUM_BYTES).is_pinned


class OnGpu(torch.Tensor):
    """Bytes that seem to lie on a GPU: what is copied from them by itself arrives when somebody waits for it."""

    under_way = []  # noqa: RUF012 -- of the test

    @property
    def device(self):
        return torch.device("cuda:0")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_:
            assert kwargs == {"non_blocking": True}
            into, given = args
            cls.under_way.append((into, given.as_subclass(torch.Tensor).clone()))
            return into
        return super().__torch_function__(func, types, args, kwargs or {})


class Event:
    def synchronize(self):
        for into, given in OnGpu.under_way:
            into.copy_(given)
        OnGpu.under_way.clear()


@pytest.mark.parametrize("digests_pieces", [False, True])
def test_a_bucket_is_digested_once_a_gpu_has_copied_its_part_of_it(monkeypatch, digests_pieces):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    monkeypatch.setattr(buffers, "cuda_runtime", lambda: True)
    monkeypatch.setattr(buffers, "mark_of", lambda _: Event())
    host, gpu = (torch.randint(1, 256, (5000,), dtype=torch.uint8) for _ in range(2))
    weights = {"first": gpu, "second": host}
    (bucket,) = plan_buckets(manifest_of(weights.items()), 1 << 20)
    filling = BucketBuilder(bucket, torch.zeros(1 << 20, dtype=torch.uint8), digests_pieces=digests_pieces)
    for piece, data in zip(bucket.pieces, (gpu.as_subclass(OnGpu), host), strict=True):
        filling.add(piece, data)
        if piece.spec_index == 0:
            assert not filling.payload.any(), "it is not there yet"
    told = filling.digest()
    want = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    for piece, data in zip(bucket.pieces, weights.values(), strict=True):
        want[piece.bucket_offset : piece.bucket_offset + piece.num_bytes] = data
    assert torch.equal(filling.payload, want)
    assert told == digest(want)


@pytest.mark.gpu(1)
def test_a_gpu_knows_pinned_pages_and_copies_to_and_from_them():
    torch.cuda.init()
    for memory in (make("segment"), make("staging"), make("buffer")):
        assert memory.is_pinned()
        want = torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, device="cuda")
        memory.copy_(want, non_blocking=True)
        torch.cuda.synchronize()
        assert np.array_equal(memory.numpy(), want.cpu().numpy())
        assert torch.equal(memory.to("cuda"), want)


@pytest.mark.gpu(1)
def test_torch_goes_on_after_pages_that_cannot_be_pinned(caplog):
    torch.cuda.init()
    pages = HostPages.private(NUM_BYTES)
    pages.pin()  # they are already: nothing is asked
    assert caplog.text == ""
    pages._runtime = None
    pages.pin()  # a second time, which CUDA refuses
    assert "cannot be pinned" in caplog.text
    assert torch.ones(3, device="cuda").sum().item() == 3.0
    pages._runtime = torch.cuda.cudart()
