from __future__ import annotations

import pytest
import torch

from offbeat_ckptsync.ends.sinks import DictSink, ModuleSink, ModuleSource, specs_of
from offbeat_ckptsync.errors import ManifestError


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def test_tied_weights_are_one_tensor_under_the_first_name():
    names = [spec.name for spec in ModuleSource(Tied()).manifest().specs]
    assert names == ["embed.weight", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var",
                     "norm.num_batches_tracked"]  # fmt: skip


def test_a_module_takes_anothers_weights_in_place():
    source, target = Tied(), Tied()
    weight = target.embed.weight
    ModuleSink(target).load(ModuleSource(source).tensors(), 1)
    assert target.embed.weight is weight is target.head.weight
    for name, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor), name


def test_everything_is_checked_before_the_first_copy():
    target = Tied()
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    tensors = dict(ModuleSource(Tied()).tensors()) | {"norm.running_var": torch.ones(4)}
    with pytest.raises(ManifestError, match=r"'norm\.running_var' has shape"):
        ModuleSink(target).load(tensors.items(), 1)
    assert all(torch.equal(before[name], tensor) for name, tensor in target.state_dict().items())


def test_a_cast_happens_only_where_it_is_allowed():
    target, tensors = Tied().to(torch.bfloat16), dict(ModuleSource(Tied()).tensors())
    with pytest.raises(ManifestError, match="allow_cast"):
        ModuleSink(target).load(tensors.items(), 1)
    ModuleSink(target, allow_cast=True).load(tensors.items(), 1)
    assert torch.equal(target.embed.weight, tensors["embed.weight"].to(torch.bfloat16))


def test_a_dictionary_keeps_copies():
    sink, live = DictSink(), torch.ones(3)
    sink.load([("w", live)], 4)
    live.zero_()
    assert sink.version == 4
    assert sink.weights["w"].tolist() == [1, 1, 1]
    assert sink.expected() is None


def test_specs_take_torch_dtypes_and_names():
    assert specs_of([("a", (1, 2), torch.bfloat16)]) == specs_of([("a", (1, 2), "bfloat16")])
