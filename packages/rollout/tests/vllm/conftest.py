# pyright: basic
"""A weight-transfer backend that reads a file: a plugin in a folder of its own, found by vLLM's processes as every plugin is."""

from __future__ import annotations

import sys
import textwrap

import pytest

PLUGIN = """
from dataclasses import dataclass
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

@dataclass
class Init(WeightTransferInitInfo):
    pass

@dataclass
class Update(WeightTransferUpdateInfo):
    path: str
    expected: list

class FileEngine(WeightTransferEngine):
    init_info_cls = Init
    update_info_cls = Update

    def init_transfer_engine(self, init_info):
        pass

    def start_weight_update(self):
        pass

    def update_weights(self, update_info):
        self.receive_weights(Update(**update_info))

    def receive_weights(self, info):
        from safetensors.torch import load_file
        from offbeat_rollout import UpdateRefused
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
        tensors = load_file(info.path)
        if not info.expected:
            raise ConnectionError("Connection refused")
        if sorted(tensors) != sorted(info.expected):
            raise UpdateRefused(f"unknown or missing: {sorted(set(tensors) ^ set(info.expected))}")
        with torch.no_grad():
            for module in self.model.modules():  # on a CPU experts are prepacked where their kernel is made
                if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                    module.quant_method.moe_kernel = None
            initialize_layerwise_reload(self.model)
            self.model.load_weights(iter(tensors.items()))
            finalize_layerwise_reload(self.model, self.vllm_config.model_config)

    def finish_weight_update(self):
        pass

    def shutdown(self):
        pass

def register():
    if "file" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("file", FileEngine)
"""


@pytest.fixture(scope="module")
def file_backend(tmp_path_factory):
    """Return the name of a backend whose updates are {"path": a safetensors file, "expected": the names in it}."""
    plugin = tmp_path_factory.mktemp("plugin")
    (plugin / "file_weights.py").write_text(textwrap.dedent(PLUGIN))
    metadata = plugin / "file_weights-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: file-weights\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nfile_weights = file_weights:register\n"
    )
    sys.path.insert(0, str(plugin))  # spawned processes search where this one does
    from vllm import plugins

    plugins.plugins_loaded = False  # and forked ones have what was loaded here
    yield "file"
    sys.path.remove(str(plugin))
