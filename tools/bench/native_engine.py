"""vLLM's own weight-update cycle on a CPU, to stand beside ours; runs in vLLM's worker.

It is `NCCLWeightTransferEngine` of vLLM 0.32 in its unpacked form, with gloo where that one has NCCL (which a CPU lacks):
layers are opened by `start_weight_update`, each tensor is broadcast and loaded as it comes, `finish_weight_update`
closes them. Generation has to stand still from the first to the last of the three calls.
"""

# vLLM types its interfaces in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import native_gloo
import torch
from vllm.distributed.weight_transfer.base import (  # noqa: TID253 -- this module is loaded by vLLM only
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (  # noqa: TID253 -- as above
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Where the trainer's store is."""

    host: str
    port: int


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What will be broadcast, in this order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class NativeEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads each tensor as it comes."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    gloo: Any = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the trainer's group."""
        self.gloo = native_gloo.group(init_info.host, init_info.port, 1)

    def start_weight_update(self) -> None:
        """Open the layers: their parameters are on the meta device from here on."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive; the base synchronises an accelerator afterwards, which a CPU has not."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive and load tensor by tensor."""
        rows = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        with torch.no_grad():
            for name, dtype_name, shape in rows:
                weight = torch.empty(shape, dtype=getattr(torch, dtype_name))
                self.gloo.broadcast(weight, 0).wait()
                self.model.load_weights([(name, weight)])

    def finish_weight_update(self) -> None:
        """Close the layers."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the group."""
        self.gloo = None
