"""The environment vLLM reads when it is imported, and in the processes it starts.

It is a value here: an entrypoint (or the actor that holds an engine) applies it before anything imports vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat_rollout.errors import ConfigError
from offbeat_rollout.vllm.plugin import ENVIRONMENT_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat_rollout.config import RolloutConfig

# Without these an engine would be slow to start, reach for the network, or come up in another form than configured.
_NEEDED = ("HF_HUB_OFFLINE", "TORCHDYNAMO_DISABLE", "VLLM_ENABLE_V1_MULTIPROCESSING")


def vllm_environment(config: RolloutConfig, cores: Sequence[int] = ()) -> dict[str, str]:
    """Return what the process that will hold a `VllmEngine` must have in its environment.

    `cores` are the CPU cores the replica should keep to (CPU only). A single worker then runs inside vLLM's engine
    process, which is a fork: vLLM is imported once, and no step crosses a process border more than once.
    """
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        ENVIRONMENT_VARIABLE: "1",
    }
    if config.device == "cpu":
        environment["OMP_NUM_THREADS"] = str(config.cpu_threads)
        # vLLM on CPU would compile one sampler kernel at the first request with log-probs, which takes 20 s.
        environment["TORCHDYNAMO_DISABLE"] = "1"
        if config.tensor_parallel_size == 1:
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        else:
            # By itself vLLM gives each worker a NUMA node of its own, and refuses where there are fewer.
            environment["VLLM_CPU_OMP_THREADS_BIND"] = _binding(config, cores) if cores else "nobind"
    return environment


def check_environment(config: RolloutConfig, environment: Mapping[str, str]) -> None:
    """Refuse an environment that lacks what this configuration needs.

    Raises:
        ConfigError: naming each variable with the value it should have.
    """
    wanted = vllm_environment(config)
    missing = [
        f"{name}={wanted[name]}"
        for name in _NEEDED
        if name in wanted and environment.get(name) != wanted[name]
    ]
    if missing:
        raise ConfigError(
            f"vllm: the environment lacks {' '.join(missing)}; set what `vllm_environment(config)` returns before the "
            "process starts (an entrypoint with os.environ.update, an actor through its runtime environment)"
        )


def _binding(config: RolloutConfig, cores: Sequence[int]) -> str:
    """Return vLLM's notation: cores of one worker joined by commas, workers by bars."""
    workers = config.tensor_parallel_size
    if len(cores) < workers:
        raise ConfigError(
            f"vllm: {len(cores)} cores for {workers} tensor-parallel workers; each needs at least one"
        )
    width = len(cores) // workers
    shares = [cores[index * width : (index + 1) * width] for index in range(workers)]
    return "|".join(",".join(str(core) for core in share) for share in shares)
