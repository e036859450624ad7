from __future__ import annotations

import os
import threading

import pytest
import torch

from offbeat_ckptsync.ends import sinks
from offbeat_ckptsync.ends.sinks import copy_all
from offbeat_ckptsync.testing import awkward_weights


@pytest.mark.parametrize("span", [64, 1 << 20])
def test_every_kind_of_tensor_is_copied_in_place(span, monkeypatch):
    monkeypatch.setattr(sinks, "_SPAN_BYTES", span)
    live = {
        name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
        for name, t in awkward_weights(0).items()
    }
    given = awkward_weights(1)
    where = {name: tensor.data_ptr() for name, tensor in live.items()}
    copy_all([(live[name], given[name]) for name in live])
    for name, tensor in live.items():
        assert torch.equal(tensor, given[name]), name
        assert tensor.data_ptr() == where[name]


def test_a_cast_is_torchs_own():
    live, given = torch.zeros(100, dtype=torch.bfloat16), torch.randn(100)
    copy_all([(live, given)])
    assert torch.equal(live, given.to(torch.bfloat16))


def test_threads_share_the_work_and_a_failure_is_raised(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(sinks, "_SPAN_BYTES", 1000)
    names = set()
    real = sinks.ctypes.memmove

    def seen(into, data, num_bytes):
        names.add(threading.current_thread().name)
        if num_bytes < 1000:
            raise MemoryError("planted")
        barrier.wait(120)
        real(into, data, num_bytes)

    barrier = threading.Barrier(3)
    monkeypatch.setattr(sinks.ctypes, "memmove", seen)
    live, given = torch.zeros(3000, dtype=torch.uint8), torch.ones(3000, dtype=torch.uint8)
    copy_all([(live, given)])
    assert torch.equal(live, given)
    assert names == {"copy", threading.current_thread().name}
    with pytest.raises(MemoryError, match="planted"):
        copy_all([(live[:100], given[:100])])
