"""Host memory of a rank while it saves and loads the training state of a model, beside what it must hold."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING, Any

import torch
from engine_load import NUM_RANKS, engine_of, give_back, make_large_model
from engine_peaks import MIB, Peak

from offbeat_engine.testing import make_tiny_model, run_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat_engine import World

LAYERS = 4  # of the model that `engine_load` has 30 of: 0.13 B parameters, 1.5 GiB of state
_STATE_BYTES = 12  # a parameter: float32 master, two moments


def checkpointing(folder: Path, scale: int = 1) -> dict[str, Any]:
    """Return the figures of `tools/bench/engine.py`: peaks of the worst rank over its state and the largest tensor.

    Pages of files that are mapped into memory count. A save that is waited for; one in the background copies the state first.
    """
    model, numels = make_large_model(folder / "large", max(1, LAYERS // scale), scale)
    small = make_tiny_model(folder / "small")
    saved = run_ranks(_save, NUM_RANKS, small, model, str(folder), timeout_s=900.0)
    size = sum(path.stat().st_size for path in (folder / "step_1").iterdir())
    loaded = run_ranks(_load, NUM_RANKS, small, model, str(folder), timeout_s=900.0)
    shutil.rmtree(folder / "step_1")
    state = sum(numels) / NUM_RANKS * _STATE_BYTES / MIB
    must = state + max(numels) * 4 / MIB
    return {
        "save_peak_ratio": (state + max(part["above_mib"] for part in saved)) / must,
        "save_above_mib": max(part["above_mib"] for part in saved),
        "resume_peak_ratio": max(part["peak_mib"] for part in loaded) / must,
        "resume_peak_mib": max(part["peak_mib"] for part in loaded),
        "state_must_mib": must,
        "checkpoint_mib": size / MIB,
        "save_seconds": max(part["seconds"] for part in saved),
        "resume_seconds": max(part["seconds"] for part in loaded),
    }


def _save(world: World, small: str, model: str, folder: str) -> dict[str, float]:
    give_back()
    engine_of(world, small).save_checkpoint(f"{folder}/small_checkpoint", global_step=1)
    engine = engine_of(world, model)
    # Moments as after a step, without its gradients and activations.
    moments = engine._ready().updater.empty_moments()  # noqa: SLF001
    for number, state in enumerate(moments.values()):
        for value in state.values():
            value.fill_(float(number))
        state["step"].fill_(1.0)
    engine._ready().updater.set_moments(moments)  # noqa: SLF001
    peak, started = Peak("cpu"), time.perf_counter()
    engine.save_checkpoint(folder, global_step=1)
    figures = {"above_mib": peak.mib(), "seconds": time.perf_counter() - started}
    engine.close()
    return figures


def _load(world: World, small: str, model: str, folder: str) -> dict[str, float]:
    give_back()
    engine_of(world, small).load_checkpoint(f"{folder}/small_checkpoint")
    peak, started = Peak("cpu"), time.perf_counter()
    engine = engine_of(world, model)
    assert engine.load_checkpoint(folder) == 1
    figures = {"peak_mib": peak.mib(), "seconds": time.perf_counter() - started}
    for number, state in enumerate(engine._ready().updater.moments().values()):  # noqa: SLF001
        assert all(bool(torch.all(state[key] == number)) for key in ("exp_avg", "exp_avg_sq"))
    engine.close()
    return figures
