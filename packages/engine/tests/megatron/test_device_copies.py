"""What Megatron's forward pass brings to a GPU: no copy makes the host wait until the passes before have ended there."""

from types import SimpleNamespace

import pytest
import torch

from offbeat_engine.megatron import stepping
from offbeat_engine.megatron.layers import context
from offbeat_engine.testing import FakeCuda

CUDA = torch.device("cuda:0")
LENGTHS = (12, 8, 8)


def waits_of(call):
    with FakeCuda() as cuda:
        call()
    return cuda.waits


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("num_tokens", [28, 32])
def test_a_row_is_fed_without_a_wait(replays, num_tokens):
    inputs = {
        "ids_S": torch.arange(28),
        "positions_S": torch.cat([torch.arange(length) for length in LENGTHS]),
        "lengths": torch.tensor(LENGTHS),
    }
    if replays:
        inputs["experts_SK"] = torch.zeros(28, 4, dtype=torch.int32)
    step = SimpleNamespace(
        request=SimpleNamespace(device=CUDA),
        groups=SimpleNamespace(context=SimpleNamespace(size=1, rank=0)),
        config=SimpleNamespace(sequence_parallel=False),
        shape=SimpleNamespace(vocab=50, num_layers=2),
    )
    with FakeCuda() as cuda:
        fed = stepping._feed(step, SimpleNamespace(model_inputs=inputs), num_tokens)
        assert fed.ids_1S.shape == (1, num_tokens)
        assert {fed.ids_1S.device, fed.positions_S.device} == {CUDA}
        assert (fed.experts_SLK is not None) == replays
    assert cuda.waits == []


@pytest.mark.parametrize("window", [None, 3])
def test_attention_over_a_row_waits_for_nothing(window):
    attention = SimpleNamespace(window=window, rotary_scaling=1.0)

    def attend():
        heads = [torch.empty(28, 1, 4, 8, device=CUDA) for _ in range(3)]
        out = context.Attention.forward(attention, *heads, torch.tensor(LENGTHS))
        assert (out.device, out.shape) == (CUDA, (28, 1, 32))

    context._classes.cache_clear()
    assert waits_of(attend) == []
    context._classes.cache_clear()


@pytest.mark.parametrize("window", [None, 3])
def test_the_work_of_a_context_rank_goes_without_a_wait(window):
    def plan():
        works = context._works(LENGTHS, (1, 2), window, CUDA)
        assert works

    clear = getattr(context._works, "cache_clear", lambda: None)
    clear()
    assert waits_of(plan) == []
    clear()
