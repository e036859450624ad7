"""A plugin that vLLM loads in each of its processes, through the entry-point group `vllm.general_plugins`.

vLLM 0.32's engine process lives on when the process that started it is killed (SIGKILL, out of memory): it keeps its
memory and its core for ever. Here it notices and ends. Workers below it end by vLLM's own means.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import wait

ENVIRONMENT_VARIABLE = "OFFBEAT_VLLM_DIES_WITH_PARENT"
_PROCESS_NAMES = ("EngineCore",)
_LOOK_S = 2.0


def die_with_parent() -> None:
    """Watch the parent if this is an engine process started for Offbeat; do nothing anywhere else."""
    parent = multiprocessing.parent_process()
    name = multiprocessing.current_process().name
    wanted = os.environ.get(ENVIRONMENT_VARIABLE) == "1"  # noqa: TID251 -- a plugin is an entrypoint of its process
    if parent is None or not wanted or not name.startswith(_PROCESS_NAMES):
        return
    threading.Thread(
        target=_watch, args=(parent.sentinel, parent.pid), name="offbeat-parent-watch", daemon=True
    ).start()


def _watch(sentinel: int, pid: int | None) -> None:
    # Not PR_SET_PDEATHSIG: that fires when the thread that started us ends, and an engine is started in a thread.
    while not wait([sentinel], timeout=_LOOK_S) and os.getppid() == pid:
        pass
    os.kill(os.getpid(), signal.SIGKILL)  # nobody is left to take an answer
