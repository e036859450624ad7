"""Session for tests of the loops, scripted or on a virtual clock. They satisfy the protocols of `offbeat_trainer.data.interface`."""

from __future__ import annotations

from scripted.parts import (
    FlatTask,
    ScriptedPolicy,
    ScriptedPool,
    ScriptedPublisher,
    ScriptedTask,
    prompt_number,
)
from scripted.recorder import Recorder
from scripted.run import ScriptedRun
from scripted.virtual import VirtualLoop, run_virtual

__all__ = [
    "FlatTask",
    "Recorder",
    "ScriptedPolicy",
    "ScriptedPool",
    "ScriptedPublisher",
    "ScriptedRun",
    "ScriptedTask",
    "VirtualLoop",
    "prompt_number",
    "run_virtual",
]
