"""Rows on their way to a GPU: nothing is mixed with what stayed on the host, and nothing is read back."""

from types import SimpleNamespace

import pytest
import torch

from offbeat_engine import ConfigError, train_batch
from offbeat_engine.fsdp2.attention import varlen
from offbeat_engine.fsdp2.attention.packed import packed_attention, plan_padded
from offbeat_engine.fsdp2.attention.packing import RowInputs, lay_out, padded_inputs
from offbeat_engine.fsdp2.attention.varlen import plan_varlen
from offbeat_engine.testing import FakeCuda
from offbeat_engine.toolkit.step import logprobs
from offbeat_engine.toolkit.world import SubGroup

CUDA = torch.device("cuda:0")
MAKERS = {
    "padded": padded_inputs,
    "sdpa": RowInputs(plan_padded),
    "sdpa-shared": RowInputs(plan_padded, share=True),
    "varlen": RowInputs(plan_varlen),
    "varlen-shared": RowInputs(plan_varlen, share=True),
}


def group_batch(temperature=0.7):
    ids = torch.randint(1, 50, (4, 12), generator=torch.Generator().manual_seed(0))
    ids[:, :5] = ids[0, :5]
    lengths = torch.tensor([12, 9, 12, 7])
    position_T = torch.arange(12)
    mask = (position_T[None] >= 5) & (position_T[None] < lengths[:, None])
    return train_batch(
        input_ids=ids, lengths=lengths, loss_mask=mask, temperature=torch.full((4,), temperature)
    )


def tensors_in(value):
    """Return every tensor in inputs, plans and the parts of plans."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for each in value.values() for tensor in tensors_in(each)]
    if isinstance(value, tuple):
        return [tensor for each in value for tensor in tensors_in(each)]
    fields = getattr(value, "__dataclass_fields__", ())
    return [tensor for name in fields for tensor in tensors_in(getattr(value, name))]


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("batch", ["group", "none"])
def test_a_layout_arrives_whole_and_nothing_is_read_back(maker, batch):
    with FakeCuda() as cuda:
        layout = lay_out(group_batch() if batch == "group" else None, MAKERS[maker], CUDA)
        found = tensors_in(layout)
        assert len(found) >= 5
        assert {tensor.device for tensor in found} == {CUDA}
    assert cuda.waits == []


@pytest.mark.parametrize("maker", ["sdpa", "varlen"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_slices_of_a_row_are_cut_before_they_leave(maker, rank):
    peers = SubGroup(rank=rank, size=3, group=torch.distributed.ProcessGroup(rank, 3))
    with FakeCuda() as cuda:
        layout = lay_out(group_batch(), MAKERS[maker], CUDA, peers)
        assert {tensor.device for tensor in tensors_in(layout.model_inputs)} == {CUDA}
        assert len(layout.counts_P) == 3
        assert layout.select_M.device == CUDA
        assert len(layout.select_M) == layout.counts_P[rank]
    assert sum(layout.counts_P) == int(group_batch()["loss_mask"].sum())
    assert cuda.waits == []


def heads_of(num_tokens, size=20):
    return [
        torch.empty(1, number, num_tokens, size, dtype=torch.bfloat16, device=CUDA) for number in (4, 2, 2)
    ]


@pytest.mark.parametrize("maker", [name for name in MAKERS if name != "padded"])
@pytest.mark.parametrize("window", [None, 3])
def test_attention_stays_on_the_device(maker, window):
    with FakeCuda() as cuda:
        layout = lay_out(group_batch(), MAKERS[maker], CUDA)
        num_tokens = layout.model_inputs["input_ids"].shape[1]
        plan = layout.model_inputs["packed"]
        out, _ = packed_attention(
            torch.nn.Identity(), *heads_of(num_tokens), None, packed=plan, sliding_window=window
        )
        assert (out.device, out.dtype, out.shape) == (CUDA, torch.bfloat16, (1, num_tokens, 4, 20))
    assert cuda.waits == []


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_the_backward_pass_of_the_gpus_kernel_does_too(share, window):
    """Called by hand: autograd's own threads want a driver."""
    with FakeCuda() as cuda:
        layout = lay_out(group_batch(), RowInputs(plan_varlen, share), CUDA)
        plan = layout.model_inputs["packed"]
        heads = [each[0].transpose(0, 1) for each in heads_of(plan.num_tokens, size=24)]
        ctx = SimpleNamespace()
        ctx.save_for_backward = lambda *tensors: setattr(ctx, "saved_tensors", tensors)
        out = varlen._Varlen.forward(ctx, *heads, plan.parts(window), 0.2, window)
        assert ctx.saved_tensors[-1].shape == (4, plan.num_tokens)
        grads = varlen._Varlen.backward(ctx, torch.ones_like(out))
        for head, grad in zip(heads, grads[:3], strict=True):
            assert (grad.device, grad.dtype, grad.shape) == (CUDA, torch.bfloat16, head.shape)
    assert cuda.waits == []


@pytest.mark.parametrize("entropy", [True, False], ids=["entropy", "none"])
@pytest.mark.parametrize("trains", ["everything", "hidden", "head"])
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "anew"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_backward_pass_of_the_head_does_too(monkeypatch, entropy, trains, kept, temperature):
    """Called by hand, as above; several chunks, a bias, and a head that is trained, or not, or alone."""
    monkeypatch.setattr(logprobs, "_CHUNK_ELEMENTS", {"cuda": 3 * 50})
    monkeypatch.setattr(logprobs, "_KEEP_ELEMENTS", 1 << 24 if kept else 0)
    needs = {"everything": (True, True, True), "hidden": (True, False, False), "head": (False, True, True)}
    with FakeCuda() as cuda:
        layout = lay_out(group_batch(temperature), MAKERS["padded"], CUDA)
        num_tokens = len(layout.targets_M)
        inputs = [
            torch.empty(size, dtype=torch.bfloat16, device=CUDA)
            for size in ((num_tokens, 24), (50, 24), (50,))
        ]
        ctx = SimpleNamespace(needs_input_grad=(*needs[trains], *[False] * 4))
        ctx.save_for_backward = lambda *tensors: setattr(ctx, "saved_tensors", tensors)
        ctx.mark_non_differentiable = lambda *_: None
        asked = (layout.targets_M, layout.temperature_M, entropy, None)
        answers = logprobs._TokenLogprobs.forward(ctx, *inputs, *asked)
        assert ctx.frozen == (trains == "hidden")
        grads = logprobs._TokenLogprobs.backward(ctx, *map(torch.ones_like, answers))
        assert len(grads) == 7
        assert {each.device for each in answers} == {CUDA}
        for tensor, grad, needed in zip(inputs, grads[:3], needs[trains], strict=True):
            assert (grad is not None) == needed
            if needed:
                assert (grad.device, grad.dtype, grad.shape) == (CUDA, torch.bfloat16, tensor.shape)
    assert cuda.waits == []


def test_what_flash_attention_cannot_take_is_refused():
    with FakeCuda():
        layout = lay_out(group_batch(), MAKERS["varlen"], CUDA)
        plan, num_tokens = layout.model_inputs["packed"], layout.model_inputs["input_ids"].shape[1]
        for heads in (heads_of(num_tokens, size=264), [each.float() for each in heads_of(num_tokens)]):
            with pytest.raises(ConfigError, match="heads of at most 256 in half precision"):
                packed_attention(torch.nn.Identity(), *heads, None, packed=plan)
