"""One table says which attention kernel a config comes to, how tokens lie for it, and what it needs."""

from dataclasses import replace

import pytest

from offbeat_engine import Dtype, ModelConfig
from offbeat_engine.fsdp2 import Fsdp2Config
from offbeat_engine.fsdp2.attention import packed as attention
from offbeat_engine.fsdp2.attention.packing import RowInputs, padded_inputs
from offbeat_engine.fsdp2.attention.varlen import (
    KERNELS,
    implementation,
    inputs_maker,
    kernel_name,
    missing_here,
    refusal,
)

CPU = Fsdp2Config(model=ModelConfig(path="nowhere"))
GPU = replace(CPU, device="cuda", dtype=Dtype.BFLOAT16)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (CPU, "sdpa"),
        (replace(CPU, dtype=Dtype.BFLOAT16), "sdpa"),
        (replace(CPU, packing=False), "sdpa"),
        (GPU, "varlen"),
        (replace(GPU, dtype=Dtype.FLOAT32), "sdpa"),
        (replace(GPU, packing=False), "sdpa"),
    ],
)
def test_auto_is_decided_by_settings_alone(config, name):
    """So it is the same on a driver and on every rank, whatever is installed there."""
    assert kernel_name(config) == name
    assert refusal(config) is None


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("base", [CPU, GPU], ids=["cpu", "gpu"])
def test_every_kernel_lays_tokens_out_or_is_refused(name, packing, base):
    config, kernel = replace(base, attention=name, packing=packing), KERNELS[name]
    possible = kernel.plan is not None if packing else kernel.padded is not None
    refused = refusal(config)
    assert (refused is None) == possible
    if refused is not None:
        return
    # All that packs enters by one name: what refuses a model there refuses it on every kernel.
    assert implementation(config) == (attention.NAME if packing else name)
    maker = inputs_maker(config)
    assert maker == (RowInputs(kernel.plan, share=kernel.shares) if packing else padded_inputs)


def test_beginnings_are_shared_only_where_asked_and_where_rows_are_whole():
    for changes in ({"share_prefixes": False}, {"sequence_parallel_size": 2}):
        for base in (CPU, GPU):
            assert not inputs_maker(replace(base, **changes)).share


def test_what_a_gpu_lacks_is_named():
    assert missing_here(GPU, (9, 0)) is None
    assert "compute capability 8.0, this one has 7.5" in missing_here(GPU, (7, 5))
    assert missing_here(replace(GPU, attention="sdpa"), (7, 5)) is None
