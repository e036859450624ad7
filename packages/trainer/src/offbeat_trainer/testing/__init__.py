"""Parts for tests of trainers and tasks. They satisfy the protocols of `offbeat_trainer.interface`."""

from __future__ import annotations

from offbeat_trainer.testing.environments import check_environment
from offbeat_trainer.testing.recorder import Recorder
from offbeat_trainer.testing.run import ScriptedRun
from offbeat_trainer.testing.scripted import (
    ScriptedPolicy,
    ScriptedPool,
    ScriptedPublisher,
    ScriptedTask,
    prompt_number,
)
from offbeat_trainer.testing.virtual import VirtualLoop, run_virtual

__all__ = [
    "Recorder",
    "ScriptedPolicy",
    "ScriptedPool",
    "ScriptedPublisher",
    "ScriptedRun",
    "ScriptedTask",
    "VirtualLoop",
    "check_environment",
    "prompt_number",
    "run_virtual",
]
