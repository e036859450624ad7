"""What the libraries below read from the environment when they are imported. Set here, and nowhere else."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_WANTED = {
    # `uv run` in front of the command would make Ray pack the folder and start every worker through uv again.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Workers that Ray starts ahead have no environment of a run, and none of its processes could use them.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",  # workers do the work here: they must not yield to everything else
    # What Ray gives its processes to start (30 s and a minute) is too little on a busy machine; nobody waits longer than needed.
    "RAY_raylet_start_wait_time_s": "180",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    # Threads that wait for each other give the core away soon: ranks, replicas and the driver share the cores here,
    # and with the default a step of two threads took three times the CPU time on a busy machine.
    "GOMP_SPINCOUNT": "1000",
    "TOKENIZERS_PARALLELISM": "false",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


def prepare_environment() -> None:
    """Set what is not set yet, before Ray or a model library is imported; child processes inherit it."""
    for name, value in _WANTED.items():
        os.environ.setdefault(name, value)
    # A Ray that was started with a token refuses drivers that do not say so; those without one take no offence. Once
    # imported, Ray has taken its mode and only its children would see another: it would refuse its own driver.
    if "ray" not in sys.modules and _has_token():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def _has_token() -> bool:
    if {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        return True
    return (Path.home() / ".ray" / "auth_token").is_file()
