"""The weight-transfer engine that runs inside each vLLM worker, and its sink. Imported by vLLM's factory only."""

# vLLM types its interfaces in part.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingParameterType=false, reportMissingTypeArgument=false

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer.base import (  # noqa: TID253 -- this module is the adapter
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from offbeat_ckptsync.adapters.vllm.adapter import AdapterSink, adapter_of, expected_manifest
from offbeat_ckptsync.ends.manifest import manifest_of
from offbeat_ckptsync.ends.rank import Rank
from offbeat_ckptsync.errors import ManifestError
from offbeat_ckptsync.seams import WeightSink
from offbeat_ckptsync.toolkit.threads import settle, use_device

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import ModelConfig, VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig

    from offbeat_ckptsync.values import Manifest


@dataclass
class OffbeatInitInfo(WeightTransferInitInfo):
    """Nothing to know beforehand: each sync's offer says everything."""


@dataclass
class OffbeatUpdateInfo(WeightTransferUpdateInfo):
    """One request to `Rank.handle`."""

    request: dict[str, Any]


class OffbeatWeightTransferEngine(WeightTransferEngine[OffbeatInitInfo, OffbeatUpdateInfo]):
    """Hands update requests to a `Rank`; live weights change in its "flip" only."""

    init_info_cls = OffbeatInitInfo
    update_info_cls = OffbeatUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = vllm_config.parallel_config
        adapter = adapter_of(vllm_config)
        self._rank = Rank(
            VllmSink(model, vllm_config.model_config, device)
            if adapter is None
            else AdapterSink(model, vllm_config, adapter, device),
            rank=parallel.data_parallel_index * parallel.world_size + parallel.rank,
            num_ranks=parallel.data_parallel_size * parallel.world_size,
            prepare_thread=_use_parent_cores if device.type == "cpu" else None,
        )

    def init_transfer_engine(self, init_info: OffbeatInitInfo) -> None:
        """Do nothing: connections are made by the first sync."""

    def start_weight_update(self) -> None:
        """Do nothing: layers are prepared inside the flip, so that a sync that fails touches none."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Handle one request. Overrides the base, which asks for an accelerator that a CPU has not."""
        self.receive_weights(OffbeatUpdateInfo(request=update_info))

    def receive_weights(self, update_info: OffbeatUpdateInfo) -> None:
        """Handle one request. What was refused goes to the mailbox, and is raised where there is none (see `Rank.handle`)."""
        # This thread's: transports are made here, and stay on it in threads of their own.
        use_device(str(self.device))
        # What a worker raises puts the executor of several out of step (vLLM 0.32): it reads their answers up to the first
        # failure, and takes what the others said for their answers to its next call.
        self._rank.handle(update_info.request, quiet=True)

    def finish_weight_update(self) -> None:
        """Do nothing: an error here would leave vLLM's update session open for good."""

    def shutdown(self) -> None:
        """Leave all connections; the served version stays known."""
        self._rank.close()


class VllmSink(WeightSink):
    """Loads Hugging Face tensors into a vLLM model by its own loaders, layer by layer.

    vLLM keeps some weights in other forms than the checkpoint's (fused, sharded; on CPU prepacked by oneDNN, the
    original gone). Its layerwise reload rebuilds those and copies them into the tensors that kernels and captured
    graphs hold. Between its two calls parameters are on the meta device: an exception there tears the model.
    """

    def __init__(self, model: torch.nn.Module, model_config: ModelConfig, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._model_config = model_config
        self._expected: Manifest | None = None

    def expected(self) -> Manifest | None:
        """Return what the model's checkpoint holds, in the dtype being served.

        Of a quantized model that is not what a trainer has: it is what was loaded before, and None until something was.
        """
        if self._expected is None:
            self._expected = expected_manifest(self._model_config)
        return self._expected

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Load all tensors; raises `ManifestError` before the first write when there are none."""
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        whole = list(tensors)
        if not whole:
            raise ManifestError(f"version {version} has no tensors; nothing was changed")
        with torch.no_grad():
            if self._device.type == "cpu":
                _forget_expert_kernels(self._model)
            initialize_layerwise_reload(self._model)
            self._model.load_weights(iter(whole))  # type: ignore[operator]
            finalize_layerwise_reload(self._model, self._model_config)
            _repack_tied(self._model)
        settle(self._device)  # until then only queued: neither over nor known to have worked
        if self._expected is None:
            self._expected = manifest_of(whole)


def _forget_expert_kernels(model: torch.nn.Module) -> None:
    """Let the experts of mixtures be prepared as they were at the start, where their kernel is made.

    vLLM 0.32 does no more than copy what an update brings where there is a kernel already. On a CPU that kernel reads weights that
    are prepacked, and filled up, in another place: it would multiply by what came as if it were that.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            setattr(method, "moe_kernel", None)  # noqa: B010 vLLM does not say that it may be


def _repack_tied(model: torch.nn.Module) -> None:
    """Let layers that share a parameter prepare it again.

    The reload works layer by layer: with tied embeddings it loads the input embedding and, as nothing came under the
    output layer's own name, leaves that one alone. On CPU the output layer multiplies by a prepacked copy, which
    would stay that of the weights before (vLLM 0.32, oneDNN).
    """
    owners: dict[int, list[torch.nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    for module in {module for modules in owners.values() if len(modules) > 1 for module in modules}:
        prepare = getattr(getattr(module, "quant_method", None), "process_weights_after_loading", None)
        if prepare is not None:
            prepare(module)


def _use_parent_cores() -> None:
    """Let the calling thread run on every core its parent process may use.

    On CPU vLLM binds each worker to cores of its own; staging there would take its share out of generation.
    """
    os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
