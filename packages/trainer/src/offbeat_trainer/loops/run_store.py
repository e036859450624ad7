"""What a run needs to be continued, beside the engine's checkpoint: one small JSON file per saved step.

The state of a step is written before the engine's checkpoint of that step, and only a whole engine checkpoint makes
it count: a crash between the two leaves a state file that nobody reads.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from offbeat_trainer.errors import ResumeError

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stood when it was saved: the step, and fields of its `Outcome`. Prompts and seeds are functions of `step`."""

    step: int
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    validation_before: float | None = None
    validation_after: float | None = None
    reward_first: float | None = None
    reward_last: float | None = None
    last_rewards: list[float] = field(default_factory=list[float])
    algorithm_state: dict[str, float] = field(default_factory=dict[str, float])
    loss_before: float | None = None
    loss_after: float | None = None
    warmup_s: float = 0.0


class RunStore:
    """Saves and finds `RunState`s in a folder."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        """Use `folder` (made if missing) and keep the newest `keep` states."""
        self._folder = folder
        self._keep = keep
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, state: RunState) -> None:
        """Write the state of its step, atomically, and forget the oldest beyond `keep` + 2, and any later ones.

        Two more than the engine keeps: at this moment the checkpoint that belongs to `state` does not exist yet, and the
        one before may still be on its way to disk. Later ones are leftovers of a crash before their checkpoint; they must not push out a state that counts.
        """
        target = self._path(state.step)
        beside = target.with_suffix(".writing")
        with beside.open("w") as file:
            json.dump(asdict(state), file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
        states = sorted(self._folder.glob("step_*.json"))
        until = states.index(target) + 1
        for path in [*states[: max(0, until - self._keep - 2)], *states[until:]]:
            path.unlink()

    def oldest(self) -> int:
        """Return the earliest step that a run may be asked to go on from.

        That is 0, its start, until states were forgotten: the checkpoints of those that are here may not be whole.
        """
        names = [path.stem.removeprefix("step_") for path in self._folder.glob("step_*.json")]
        return min(map(int, names)) if len(names) >= self._keep + 2 else 0

    def load(self, step: int) -> RunState:
        """Return the state saved with the checkpoint of `step`.

        Raises:
            ResumeError: there is none, or it is not one of ours.
        """
        path = self._path(step)
        try:
            return RunState(**json.loads(path.read_text()))
        except FileNotFoundError as error:
            raise ResumeError(
                f"the checkpoint of step {step} has no {path.name} in {self._folder}; "
                "resume from a run folder that Offbeat wrote, or start a new one"
            ) from error
        except (ValueError, TypeError) as error:
            raise ResumeError(
                f"{path} cannot be read as a run state ({error}); remove it to use an older step"
            ) from error

    def _path(self, step: int) -> Path:
        return self._folder / f"step_{step:08d}.json"
