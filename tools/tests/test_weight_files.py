"""Which files of a folder are the model's: trainer, replica and sync must take the same, and those that transformers takes."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from offbeat_ckptsync.transports import disk
from offbeat_engine.testing import make_tiny_model
from offbeat_engine.toolkit.hf.weight_files import WeightFiles
from offbeat_rollout.toolkit import weight_files

READERS = {
    "engine": lambda folder: WeightFiles.find(folder).shapes,
    "rollout": lambda folder: {
        name: shape for name, shape, _ in weight_files.folder_specs(str(folder), "float32")
    },
    "ckptsync": lambda folder: {spec.name: spec.shape for spec in disk.folder_specs(folder)},
}
# What lies in the folder, by file, and which file the weights are of.
WHOLE, SHARD, OTHER = "model.safetensors", "model-00001-of-00001.safetensors", "consolidated.safetensors"
CASES = {
    "one file": ((WHOLE,), False, WHOLE),
    "one file beside another set": ((WHOLE, OTHER), False, WHOLE),
    "an index": ((SHARD,), True, SHARD),
    "an index beside another set": ((SHARD, OTHER), True, SHARD),
    "one file and an index": ((WHOLE, SHARD), True, WHOLE),
    "one file and shards without an index": ((WHOLE, SHARD), False, WHOLE),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("case", CASES)
def test_all_packages_take_the_weights_from_the_same_files(tmp_path, case, reader):
    files, has_index, expected = CASES[case]
    (tmp_path / "config.json").write_text("{}")
    for size, file in enumerate((WHOLE, SHARD, OTHER), 1):
        if file in files:
            save_file({"w": torch.zeros(size)}, tmp_path / file)
    if has_index:
        write_index(tmp_path, ["w"])
    size = (WHOLE, SHARD, OTHER).index(expected) + 1
    assert READERS[reader](tmp_path) == {"w": (size,)}


def test_they_are_those_that_transformers_takes(tmp_path):
    """A folder with one file and an index of another: what is loaded is the one file."""
    whole = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path / "a", seed=1)).state_dict()
    make_tiny_model(tmp_path / "b", seed=2)
    (tmp_path / "b" / WHOLE).rename(tmp_path / "a" / SHARD)
    write_index(tmp_path / "a", whole)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a").state_dict()
    assert all(torch.equal(loaded[name], whole[name]) for name in whole)


def write_index(folder, names):
    places = dict.fromkeys(names, SHARD)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
