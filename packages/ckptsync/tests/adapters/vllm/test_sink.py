"""vLLM's own reload on a module of one layer: when a load is over, and what a quantized model is compared with."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from offbeat_ckptsync.ends.manifest import manifest_of
from offbeat_ckptsync.ends.receiver import Receiver
from offbeat_ckptsync.errors import ManifestError
from offbeat_ckptsync.values import RankId, SyncOffer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@dataclasses.dataclass
class Quantized:
    quantization: str = "fp8"
    dtype: torch.dtype = torch.float32


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        self.layer = torch.nn.Linear(4, 4, bias=False)
        self.layer.weight.weight_loader = default_weight_loader
        record_metadata_for_reloading(self)

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].weight_loader(parameters[name], tensor)


def sink_of(model, device):
    from offbeat_ckptsync.adapters.vllm.engine import VllmSink

    return VllmSink(model, Quantized(), torch.device(device))


def test_a_load_on_a_gpu_is_over_when_the_gpu_says_so(monkeypatch):
    model, waited = Model(), []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    sink_of(model, "cpu").load([("layer.weight", torch.ones(4, 4))], 1)
    assert waited == []
    sink_of(model, "cuda:1").load([("layer.weight", torch.ones(4, 4))], 1)
    assert waited == [torch.device("cuda:1")]
    assert torch.equal(model.layer.weight, torch.ones(4, 4))


def test_a_quantized_model_takes_the_names_it_took_before_and_refuses_others():
    model = Model()
    sink = sink_of(model, "cpu")
    assert sink.expected() is None, "what its checkpoint holds is not what a trainer has"
    first = {"layer.weight": torch.ones(4, 4)}
    sink.load(first.items(), 1)
    assert sink.expected() == manifest_of(first.items())
    receiver = Receiver(RankId(member="m"), sink, version=1)
    offered = manifest_of([("layer.wight", torch.ones(4, 4))])
    offer = SyncOffer(
        sync_id="s", version=2, manifest=offered, bucket_bytes=4096, transport="loopback", endpoint={}
    )
    with pytest.raises(ManifestError, match=r"layer\.wight"):
        receiver.begin(offer)
