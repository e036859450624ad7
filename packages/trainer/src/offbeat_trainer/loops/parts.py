"""What every loop is given, and the pieces of a step that the loops share."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from offbeat_rollout import SamplingParams
from offbeat_trainer.config import AsyncConfig
from offbeat_trainer.errors import DeadlineExceeded
from offbeat_trainer.gate import version_of as version_of  # the loops' word for it, kept here for them
from offbeat_trainer.journal.memory import MemoryJournal
from offbeat_trainer.metrics import Last, Mean, Metric, Sum
from offbeat_trainer.phases import PhaseClock
from offbeat_trainer.seeds import derive_seed
from offbeat_trainer.timeline import Timeline
from offbeat_trainer.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat_ckptsync import SyncReport
    from offbeat_trainer.algorithms.interface import Algorithm
    from offbeat_trainer.config import AlgorithmConfig, LoopConfig, SamplingConfig
    from offbeat_trainer.interface import Generator, Policy, Publisher, Reporter, Task
    from offbeat_trainer.journal.events import Journal
    from offbeat_trainer.run_store import RunStore
    from offbeat_trainer.schedule import Schedule
    from offbeat_trainer.types import Group

NUM_SHOWN = 4

P = ParamSpec("P")
T = TypeVar("T")


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
    generator: Generator
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


async def score(parts: Parts, groups: Sequence[Group]) -> list[Group]:
    """Return `groups` with scores; `score_groups` with the deadline of a step."""
    return await score_groups(parts.task, groups, parts.loop.step_timeout_s)


class _Daemons(Executor):
    """Runs each call in a daemon thread: one that hangs keeps nobody from ending, as those of a pool would."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 -- becomes the future's exception
                future.set_exception(error)

        threading.Thread(target=run, name="rewards", daemon=True).start()
        return future


_DAEMONS = _Daemons()


async def score_groups(task: Task, groups: Sequence[Group], timeout_s: float) -> list[Group]:
    """Return `groups` with scores. Reward functions may block, so they run beside the event loop.

    Raises:
        DeadlineExceeded: they took longer than `timeout_s`; names the prompt. A call that hangs holds up nobody's end.
    """
    under_way = ""

    def all_scores() -> list[Group]:
        nonlocal under_way
        scored: list[Group] = []
        for group in groups:
            under_way = group.prompt.uid
            scores = tuple(task.score(group.prompt, one) for one in group.completions)
            scored.append(replace(group, scores=scores))
        return scored

    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await asyncio.get_running_loop().run_in_executor(_DAEMONS, all_scores)
    except TimeoutError as error:
        if not limit.expired():
            raise  # the reward's own
        raise DeadlineExceeded(
            f"waited {timeout_s:g} s for the rewards of {len(groups)} groups; that of {under_way or 'the first'} is under "
            "way. Make the reward function faster or give it a limit of its own, or raise trainer.step_timeout_s"
        ) from error


async def validate(parts: Parts, clock: PhaseClock, step: int, title: str = "") -> float | None:
    """Return greedy accuracy on held-out prompts under the weights now served; `title` shows some completions.

    None where the task holds none out.
    """
    prompts = parts.task.validation_prompts(parts.loop.validation_prompts)
    if not prompts:
        return None
    greedy = replace(training_params(parts, step), temperature=0.0)
    with clock.phase("validate", f"{len(prompts)} held-out prompts, greedy"):
        groups = await score(parts, await parts.generator.collect(prompts, greedy, 1))
    if title:
        show(parts, step, title, groups)
    return sum(group.scores[0].correct for group in groups) / len(groups)


def show(parts: Parts, step: int, title: str, groups: Sequence[Group]) -> None:
    """Hand a few groups with their texts to the reporter."""
    some = list(groups[:NUM_SHOWN])
    texts = [[parts.task.decode(one.token_ids.tolist()) for one in group.completions] for group in some]
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
