"""What every loop is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat_trainer.config import AsyncConfig
from offbeat_trainer.stream.events import MemoryJournal
from offbeat_trainer.watch.watchdog import PhaseClock, Timeline, Watchdog

if TYPE_CHECKING:
    from offbeat_trainer.algorithms.interface import Algorithm
    from offbeat_trainer.config import AlgorithmConfig, LoopConfig, SamplingConfig
    from offbeat_trainer.interface import Policy, Publisher, Reporter, Rollout, Task
    from offbeat_trainer.stream.events import Journal
    from offbeat_trainer.stream.run_store import RunStore
    from offbeat_trainer.stream.schedule import Schedule


class StopRequest:
    """Asked for from outside (Ctrl-C), honoured by a loop between two steps.

    `listening` says that a loop is at work and will come to look; before that there is nothing to finish. `held` says
    that the step at hand is none to end after: its weights have not flowed, and a run that goes on from it would begin
    by letting them flow, which one that is left alone does not.
    """

    def __init__(self) -> None:
        self.requested = False
        self.listening = False
        self.held = False

    @property
    def due(self) -> bool:
        """Whether the run ends after the step at hand."""
        return self.requested and not self.held


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything a loop works with.

    `asynchrony` says how far generation may run ahead; `replay` is a recorded schedule to be followed.
    """

    task: Task
    policy: Policy
    rollout: Rollout
    publisher: Publisher
    reporter: Reporter
    store: RunStore
    seed: int
    loop: LoopConfig
    algorithm: Algorithm[AlgorithmConfig]
    sampling: SamplingConfig
    stop: StopRequest = field(default_factory=StopRequest)
    asynchrony: AsyncConfig = field(default_factory=AsyncConfig)
    journal: Journal = field(default_factory=MemoryJournal)
    replay: Schedule | None = None
    timeline: Timeline = field(default_factory=Timeline)
    watchdog: Watchdog = field(default_factory=Watchdog)

    def clock(self) -> PhaseClock:
        """Return a clock for the phases of one step."""
        return PhaseClock(self.reporter, self.timeline, self.watchdog)
