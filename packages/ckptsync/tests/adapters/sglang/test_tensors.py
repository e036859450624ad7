"""Bodies of `/update_weights_from_tensor`: whole, in order, and of a GPU's memory the place alone."""

from __future__ import annotations

import base64
import pickle

import pytest
import torch

from offbeat_ckptsync.adapters.sglang import group as module
from offbeat_ckptsync.adapters.sglang.group import in_parts

WHOLE = {
    "odd": torch.arange(7, dtype=torch.int8),
    "strided": torch.randn(3, 5).to(torch.bfloat16).t(),
    "one": torch.tensor(2.0, dtype=torch.float64),
    "wide": torch.randn(4, 9),
}


def opened(body):
    """What SGLang's `reconstruct_tensors` makes of it."""
    content = pickle.loads(base64.b64decode(body))
    flat = content["flattened_tensor"]
    return {
        one.name: flat[one.start_idx : one.end_idx].view(one.dtype).reshape(one.shape)
        for one in content["metadata"]
    }


@pytest.mark.parametrize("part_bytes", [1, 1 << 20])
def test_every_rank_is_told_of_every_tensor_once(monkeypatch, part_bytes):
    monkeypatch.setattr(module, "PART_BYTES", part_bytes)
    parts = list(in_parts(WHOLE, "cpu", 2))
    assert len(parts) == (4 if part_bytes == 1 else 1)
    for rank in (0, 1):
        found = [(name, tensor) for part in parts for name, tensor in opened(part[rank]).items()]
        assert [name for name, _ in found] == list(WHOLE)
        for name, tensor in found:
            assert (tensor.dtype, tensor.shape) == (WHOLE[name].dtype, WHOLE[name].shape)
            assert torch.equal(tensor, WHOLE[name])


class OnGpu(torch.Tensor):
    """Says that it lies on a GPU."""

    is_cuda = True


def test_of_a_gpu_s_memory_the_handle_goes_with_the_gpu_s_uuid(monkeypatch):
    """torch's own arguments of `rebuild_cuda_tensor`, the seventh of which is the number of the device in this process."""
    handle = (
        "what",
        (2, 3),
        (3, 1),
        0,
        "storage",
        torch.uint8,
        4,
        b"handle",
        64,
        0,
        False,
        b"count",
        1,
        b"event",
        True,
    )
    given = {4: "1234-abcd"}
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda index: type("", (), {"uuid": given[index]})
    )
    monkeypatch.setattr("torch.multiprocessing.reductions.reduce_tensor", lambda _: (_rebuilt, handle))
    body = module._body({"flattened_tensor": torch.zeros(6).as_subclass(OnGpu), "metadata": []})
    found = pickle.loads(base64.b64decode(body))["flattened_tensor"]
    assert found == (*handle[:6], "1234-abcd", *handle[7:])


def _rebuilt(*about):
    return about


@pytest.mark.gpu(1)
def test_a_gpu_s_memory_is_opened_by_another_process_and_kept_until_then():
    """Never run: no GPU was there. By torch's own rebuilding, which SGLang wraps to find the device by its UUID."""
    whole = {"a": torch.randn(1000, 1000, device="cuda"), "b": torch.arange(9, device="cuda")}
    context = torch.multiprocessing.get_context("spawn")
    for bodies in in_parts(whole, "cuda:0", 2):
        for body in bodies:
            asked, answers = context.Queue(), context.Queue()
            other = context.Process(target=_read, args=(asked, answers))
            other.start()
            asked.put(body)
            found = answers.get(timeout=300)
            other.join(300)
            assert found == {name: float(tensor.double().sum()) for name, tensor in whole.items()}


def _read(asked, answers):
    from torch.multiprocessing import reductions

    rebuild = reductions.rebuild_cuda_tensor

    def by_uuid(*about):
        number = next(
            i
            for i in range(torch.cuda.device_count())
            if str(torch.cuda.get_device_properties(i).uuid) == about[6]
        )
        return rebuild(*about[:6], number, *about[7:])

    reductions.rebuild_cuda_tensor = by_uuid
    answers.put(
        {name: float(tensor.double().sum()) for name, tensor in opened(asked.get(timeout=300)).items()}
    )
