"""A whole scripted run in one value: settings in, trained batches, metrics and journal out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat_trainer.algorithms.grpo import Grpo
from offbeat_trainer.config import (
    AsyncConfig,
    EnvironmentConfig,
    GrpoConfig,
    LoopConfig,
    RewardConfig,
    SamplingConfig,
)
from offbeat_trainer.loops.events import MemoryJournal
from offbeat_trainer.loops.online import run_fully_async, run_one_step_off, run_sync
from offbeat_trainer.loops.outcome import Outcome
from offbeat_trainer.loops.run_store import RunStore
from offbeat_trainer.loops.session import Session, StopRequest
from offbeat_trainer.rollouts.multi import EnvironmentSetup, MultiTurn
from offbeat_trainer.rollouts.scorer import TaskScorer
from offbeat_trainer.rollouts.single import GroupGenerator, SingleTurn
from offbeat_trainer.watch.watchdog import Timeline, Watchdog
from scripted.parts import (
    ScriptedPolicy,
    ScriptedPool,
    ScriptedPublisher,
    ScriptedTask,
)
from scripted.recorder import Recorder
from scripted.virtual import run_virtual

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat_trainer.algorithms.interface import Algorithm
    from offbeat_trainer.config import AlgorithmConfig
    from offbeat_trainer.data.interface import Rollout, Scorer
    from offbeat_trainer.loops.events import Journal
    from offbeat_trainer.loops.schedule import Schedule
    from offbeat_trainer.rollouts.environment import Environment

Loop = Callable[[Session, Outcome, int], Awaitable[None]]
LOOPS: dict[str, Loop] = {"sync": run_sync, "one_step_off": run_one_step_off, "fully_async": run_fully_async}


def _one_second(step: int) -> float:
    del step
    return 1.0


@dataclass(slots=True, kw_only=True)
class ScriptedRun:
    """One run of `mode` (a name, or a loop) in `folder`, an ordinary one in all but its engines. Call `go` once.

    `policy`, `publisher`, `reporter`, `outcome` and `journal` say afterwards what happened.
    """

    folder: Path
    mode: str | Loop = "fully_async"
    asynchrony: AsyncConfig = field(default_factory=AsyncConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    seed: int = 7
    algorithm: Algorithm[AlgorithmConfig] = field(default_factory=lambda: Grpo(config=GrpoConfig()))
    max_tokens: int = 12
    train_s: Callable[[int], float] = _one_second
    sync_s: float = 0.05
    journal: Journal = field(default_factory=MemoryJournal)
    pool: ScriptedPool = field(default_factory=ScriptedPool)
    task: ScriptedTask = field(default_factory=ScriptedTask)
    rewards: RewardConfig = field(default_factory=RewardConfig)
    scorer: Scorer | None = None  # that of the task
    environment: Callable[[], Environment] | None = None  # with one, several turns
    turns: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    stop: StopRequest = field(default_factory=StopRequest)
    replay: Schedule | None = None
    timeline: Timeline = field(default_factory=Timeline)
    watchdog: Watchdog = field(default_factory=Watchdog)
    reporter: Recorder = field(default_factory=Recorder)
    outcome: Outcome = field(default_factory=Outcome)
    policy: ScriptedPolicy = field(init=False)
    publisher: ScriptedPublisher = field(init=False)

    def __post_init__(self) -> None:
        self.policy = ScriptedPolicy(self.folder / "policy", train_s=self.train_s)
        self.publisher = ScriptedPublisher(self.policy, self.pool, sync_s=self.sync_s)

    def go(self) -> ScriptedRun:
        """Run to the end on a virtual clock, from the newest checkpoint in `folder` if there is one."""
        run_virtual(self.main())
        return self

    async def main(self) -> None:
        """Run to the end on the clock of the running event loop."""
        parts = Session(
            task=self.task,
            policy=self.policy,
            rollout=self._rollout(),
            publisher=self.publisher,
            reporter=self.reporter,
            store=RunStore(self.folder / "state", keep=self.loop.keep_checkpoints),
            seed=self.seed,
            loop=self.loop,
            algorithm=self.algorithm,
            sampling=SamplingConfig(max_tokens=self.max_tokens),
            stop=self.stop,
            asynchrony=self.asynchrony,
            journal=self.journal,
            replay=self.replay,
            timeline=self.timeline,
            watchdog=self.watchdog,
        )
        start = await self.policy.load(None)
        if start is not None:
            self.outcome.go_on(parts.store.load(start))
        loop = LOOPS[self.mode] if isinstance(self.mode, str) else self.mode
        await loop(parts, self.outcome, start or 0)

    def _rollout(self) -> Rollout:
        generator = GroupGenerator(self.pool.generate_many, self.pool.abort)
        scorer = TaskScorer(self.task.score, self.rewards) if self.scorer is None else self.scorer
        if self.environment is None:
            return SingleTurn(generator, scorer, self.timeline)
        setup = EnvironmentSetup(make=self.environment, decode=self.task.decode, encode=self.task.encode)
        return MultiTurn(
            generator,
            setup,
            self.turns,
            scorer=scorer,
            timeline=self.timeline,
            watchdog=self.watchdog,
        )

    def history(self) -> dict[int, dict[str, float]]:
        """Return the metrics of each step without those of clocks, queues, replicas and memory; see `at_their_step`."""
        skipped = ("time/", "buffer/", "idle/", "sync/", "memory/", "generation/lost")
        return at_their_step(
            {
                step: {key: value for key, value in values.items() if not key.startswith(skipped)}
                for step, values in self.reporter.steps.items()
            }
        )


def at_their_step(steps: Mapping[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    """Return the metrics of steps, validations that were made beside later ones with the step whose version they measured."""
    late = {
        step: {key: value for key, value in values.items() if "validation" in key}
        for step, values in steps.items()
        if "validation/version" in values
    }
    placed = {
        step: {key: value for key, value in values.items() if key not in late.get(step, ())}
        for step, values in steps.items()
    }
    for found in late.values():
        placed[int(found.pop("validation/version")) - 1] |= found
    return placed
