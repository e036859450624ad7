"""Starting and ending Ray."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray._private import ray_constants
from ray._private.node import Node

from offbeat_trainer.errors import TrainerError

if TYPE_CHECKING:
    from collections.abc import Generator

    from offbeat_trainer.config import ClusterConfig

# Actors ask for slices of a logical core: what they may really use is decided by the plan, not by Ray.
CPUS_PER_PROCESS = 0.01
CONNECT_TIMEOUT_S = 20.0
_HELPERS = ("start_monitor", "start_api_server", "start_log_monitor")
LOGICAL_CPUS = 2  # Ray starts as many processes at once as it counts CPUs


def start_ray(config: ClusterConfig, *, num_gpus: int) -> None:
    """Connect to `config.ray_address`, or start a private Ray that ends with this process.

    Raises:
        TrainerError: the address does not answer, or Ray could not be started.
    """
    try:
        _require_answer(config.ray_address)
        with _own_signals():
            _connect(config, num_gpus)
    except Exception as error:  # Ray raises many kinds, a bare Exception where its start takes too long
        if config.ray_address:
            message = (
                f"Ray could not connect to {config.ray_address} ({error}); check cluster.ray_address with `ray status`. "
                "If it says InvalidAuthToken, the cluster has a token (`ray get-auth-token` there): put it into "
                "RAY_AUTH_TOKEN or ~/.ray/auth_token here, and set RAY_AUTH_MODE=token before Ray is imported"
            )
        else:
            message = f"Ray could not start on this machine ({error})"
        raise TrainerError(message) from error


def _require_answer(address: str) -> None:
    """Hold that there is a Ray at `host:port`: `ray.init` would try for many minutes, without a word.

    Raises:
        ConnectionError: nobody is there, or who is there does not answer as Ray does.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "//" in host:  # "auto", and what Ray refuses by itself
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConnectionError(f"nobody is there: {error}") from error
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]

    try:
        GcsClient(address=address)  # has a deadline of its own, of about half a minute
    except Exception as error:
        raise ConnectionError(f"what is there does not answer as Ray does: {error}") from error


def _connect(config: ClusterConfig, num_gpus: int) -> None:
    if config.ray_address:
        ray.init(address=config.ray_address, log_to_driver=False, logging_level=logging.ERROR)
        return
    with _lean():
        ray.init(
            address="local",
            num_cpus=LOGICAL_CPUS,
            num_gpus=num_gpus,
            include_dashboard=False,
            object_store_memory=config.object_store_mib << 20,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )


@contextmanager
def _lean() -> Generator[None]:
    """Start no process of Ray that a private Ray has no use for, each a second of a core, and workers by `start_worker.py`.

    These are the autoscaler, which also opens a port to everybody, usage statistics (`start_api_server`, also without a dashboard),
    and the copying of logs to the driver. Ray 2.60 has no setting for any of this.
    """
    usual = {name: getattr(Node, name) for name in _HELPERS}
    setup_worker = ray_constants.SETUP_WORKER_FILENAME
    for name in usual:
        setattr(Node, name, _start_nothing)
    ray_constants.SETUP_WORKER_FILENAME = str(Path(__file__).with_name("start_worker.py"))
    try:
        yield
    finally:
        ray_constants.SETUP_WORKER_FILENAME = setup_worker
        for name, method in usual.items():
            setattr(Node, name, method)


def _start_nothing(*_: object, **__: object) -> None: ...


@contextmanager
def _own_signals() -> Generator[None]:
    """Put back who handles SIGTERM: Ray takes it to end the process at once, and a run ends after its step.

    What is started here ignores SIGTSTP: Ctrl-Z stops the driver alone. Ray's servers are of its process group, and workers that
    hear nothing of them for some minutes would end themselves.
    """
    if threading.current_thread() is not threading.main_thread():  # Ray takes it in the main thread only
        yield
        return
    terminated, stopped = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, terminated)
        signal.signal(signal.SIGTSTP, stopped)


def stop_ray() -> None:
    """Leave Ray; ends it if this process started it. Safe to call twice."""
    if ray.is_initialized():
        # Each has half a minute; without it one second, and is then left behind.
        ray.shutdown(wait_for_processes=True)
