"""vLLM's own weight-update cycle on a CPU, to stand beside ours: loaded into vLLM's worker as a plugin by `sync_vllm.py`.

It is `NCCLWeightTransferEngine` of vLLM 0.32 in its unpacked form, with gloo where that one has NCCL (which a CPU lacks):
layers are opened by `start_weight_update`, each tensor is broadcast and loaded as it comes, `finish_weight_update`
closes them. Generation has to stand still from the first to the last of the three calls.
"""

# vLLM and torch's distributed bindings are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportPrivateUsage=false

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

BACKEND = "bench_native"


def register() -> None:
    """Register the backend; vLLM calls this in each of its processes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, "NativeEngine")
    except ValueError as error:
        if "already registered" not in str(error):
            raise


def group(host: str, port: int, rank: int) -> Any:  # noqa: ANN401 -- torch does not type it
    """Return the gloo group of trainer (rank 0, which hosts the store) and worker (rank 1)."""
    from torch.distributed import ProcessGroupGloo, TCPStore

    store = TCPStore(host, port, 2, rank == 0, timedelta(seconds=60), wait_for_workers=False)
    options = ProcessGroupGloo._Options()  # noqa: SLF001 -- torch gives no public way
    options._timeout = timedelta(seconds=60)  # noqa: SLF001 -- as above
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001 -- as above
    return ProcessGroupGloo(store, rank, 2, options)


def __getattr__(name: str) -> object:
    # The class needs vLLM's base class, which only its worker should import.
    if name != "NativeEngine":
        raise AttributeError(name)
    return _engine_class()


def _engine_class() -> type:
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    @dataclass
    class InitInfo(WeightTransferInitInfo):
        host: str
        port: int

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):
        names: list[str]
        dtype_names: list[str]
        shapes: list[list[int]]

    class NativeEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
        init_info_cls = InitInfo
        update_info_cls = UpdateInfo

        gloo: Any = None

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            self.gloo = group(init_info.host, init_info.port, 1)

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            # The base synchronises an accelerator afterwards, which a CPU has not.
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: UpdateInfo) -> None:
            rows = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
            with torch.no_grad():
                for name, dtype_name, shape in rows:
                    weight = torch.empty(shape, dtype=getattr(torch, dtype_name))
                    self.gloo.broadcast(weight, 0).wait()
                    self.model.load_weights([(name, weight)])  # pyright: ignore[reportCallIssue]

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            self.gloo = None

    return NativeEngine
