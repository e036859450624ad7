"""What every loop is given, and the pieces of a step that the loops share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from offbeat_rollout import SamplingParams
from offbeat_trainer.config import AsyncConfig
from offbeat_trainer.data.seeds import derive_seed
from offbeat_trainer.metrics import Last, Mean, Metric, Sum
from offbeat_trainer.stream.gate import version_of as version_of  # the loops' word for it, kept here for them
from offbeat_trainer.stream.journal.memory import MemoryJournal
from offbeat_trainer.watch.phases import PhaseClock
from offbeat_trainer.watch.timeline import Timeline
from offbeat_trainer.watch.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat_ckptsync import SyncReport
    from offbeat_trainer.algorithms.interface import Algorithm
    from offbeat_trainer.config import AlgorithmConfig, LoopConfig, SamplingConfig
    from offbeat_trainer.data.types import Group
    from offbeat_trainer.interface import Policy, Publisher, Reporter, Rollout, Task
    from offbeat_trainer.run_store import RunStore
    from offbeat_trainer.stream.journal.events import Journal
    from offbeat_trainer.stream.schedule import Schedule

NUM_SHOWN = 4


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


def training_params(parts: Parts, step: int) -> SamplingParams:
    """Return how the completions of `step` are sampled; its seed is the base of one seed per completion."""
    return SamplingParams(
        max_tokens=parts.sampling.max_tokens,
        temperature=parts.sampling.temperature,
        stop_token_ids=parts.task.stop_token_ids(),
        stop=parts.sampling.stop,
        seed=derive_seed(parts.seed, "sample", step),
    )


async def validate(parts: Parts, clock: PhaseClock, step: int, title: str = "") -> float | None:
    """Return greedy accuracy on held-out prompts under the weights now served; `title` shows some completions.

    Prompts without a score do not count. None where the task holds none out.
    """
    prompts = parts.task.validation_prompts(parts.loop.validation_prompts)
    if not prompts:
        return None
    greedy = replace(training_params(parts, step), temperature=0.0)
    with clock.phase("validate", f"{len(prompts)} held-out prompts, greedy"):
        groups = await parts.rollout.run_all(prompts, greedy, 1)
    if title:
        show(parts, step, title, groups)
    return sum(group.scores[0].correct for group in groups) / len(groups)


def show(parts: Parts, step: int, title: str, groups: Sequence[Group]) -> None:
    """Hand a few groups with their texts to the reporter."""
    some = list(groups[:NUM_SHOWN])
    texts = [[parts.task.decode(one.token_ids.tolist()) for one in group.trajectories] for group in some]
    parts.reporter.samples(step, title, some, texts)


def due(step: int, every: int) -> bool:
    """Say whether something that happens `every` so many steps happens at `step`; 0 = never."""
    return every > 0 and step % every == 0


def sync_metrics(report: SyncReport) -> list[Metric]:
    """Return a weight sync in metrics."""
    gap = [] if report.worst_gap_s is None else [Metric("sync/worst_gap_s", Mean(report.worst_gap_s))]
    return [
        *gap,
        Metric("sync/version", Last(report.version)),
        Metric("sync/gb_per_s", Mean(report.gb_per_s)),
        Metric("sync/bytes", Sum(report.num_bytes)),
        Metric("sync/pause_s", Mean(report.pause_s)),
        Metric("sync/transfer_s", Mean(report.transfer_s)),
        Metric("sync/verify_s", Mean(report.verify_s)),
        Metric("sync/flip_s", Mean(report.flip_s)),
    ]
