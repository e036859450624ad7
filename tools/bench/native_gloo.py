"""Names `native_engine` to vLLM, and makes the group that it shares with the trainer; loaded as a plugin of vLLM."""

# vLLM and torch's distributed bindings are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportPrivateUsage=false

from __future__ import annotations

from datetime import timedelta
from typing import Any

BACKEND = "bench_native"


def register() -> None:
    """Register the backend; vLLM calls this in each of its processes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(BACKEND, "native_engine", "NativeEngine")
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
