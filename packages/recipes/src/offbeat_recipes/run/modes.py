"""Which loop runs, and what it works with: the one place that knows all modes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, assert_never

from offbeat_recipes.plan.algorithm import algorithm_of
from offbeat_recipes.plan.journals import open_journal
from offbeat_recipes.plan.replay import recorded_schedule
from offbeat_recipes.tasks.base import make_scorer
from offbeat_recipes.tasks.observations import observation_encoder
from offbeat_trainer.config import RewardFrom
from offbeat_trainer.loops.online import run_fully_async, run_one_step_off, run_sync
from offbeat_trainer.rollouts.multi import EnvironmentSetup, MultiTurn
from offbeat_trainer.rollouts.processes import EnvironmentProcesses
from offbeat_trainer.rollouts.single import GroupGenerator, SingleTurn
from offbeat_trainer.scoring.scorer import FunctionScorer
from offbeat_trainer.stream.parts import Parts

if TYPE_CHECKING:
    from offbeat_recipes.run.session import Session
    from offbeat_recipes.settings.tree import RunConfig
    from offbeat_trainer import Rollout, Scorer
    from offbeat_trainer.cluster.cluster import Cluster
    from offbeat_trainer.loops.outcome import Outcome
    from offbeat_trainer.run_store import RunStore


class Loop(Protocol):
    """One of the loops of `offbeat_trainer.loops`."""

    async def __call__(self, parts: Parts, outcome: Outcome, start: int = 0) -> None:
        """Train from step `start` on."""
        ...


def make_parts(session: Session, cluster: Cluster, store: RunStore, rollout: Rollout) -> Parts:
    """Return what the loop of this run works with. The caller closes rollout, journal and timeline."""
    config = session.config
    return Parts(
        task=session.task,
        policy=cluster.train,
        rollout=rollout,
        publisher=cluster.publisher(),
        reporter=session.reporter,
        store=store,
        seed=config.seed,
        loop=config.trainer,
        algorithm=algorithm_of(config),
        sampling=config.sampling,
        stop=session.stop,
        asynchrony=config.asynchrony,
        journal=open_journal(session.folder.path),
        replay=recorded_schedule(config),
        timeline=cluster.timeline,
        watchdog=cluster.watchdog,
    )


def make_rollout(session: Session, cluster: Cluster) -> Rollout:
    """Return the way from prompts to scored groups, whose rewards and environments start at once. The caller closes it."""
    config, task, logs = session.config, session.task, session.folder.logs
    generator = GroupGenerator(cluster.rollout.generate_many, cluster.rollout.abort)
    if config.turns is None:
        return SingleTurn(generator, _started_scorer(session), cluster.timeline)
    scored = config.turns.reward_from is RewardFrom.ENVIRONMENT
    processes = EnvironmentProcesses(config.turns, logs / "environments.log")
    processes.start()
    return MultiTurn(
        generator,
        EnvironmentSetup(
            make=processes.make,
            decode=task.decode,
            encode=observation_encoder(task.tokenizer),
            close=processes.close,
        ),
        config.turns,
        scorer=None if scored else _started_scorer(session),
        timeline=cluster.timeline,
        watchdog=cluster.watchdog,
    )


def _started_scorer(session: Session) -> Scorer:
    """Return what scores completions; the processes that call reward functions start beside whatever else does."""
    scorer = make_scorer(session.task, session.config.reward, session.folder.logs / "rewards.log")
    if isinstance(scorer, FunctionScorer):
        scorer.start()
    return scorer


def loop_of(config: RunConfig) -> Loop:
    """Return the loop that the mode names."""
    match config.mode.name:
        case "sync":
            return run_sync
        case "one_step_off":
            return run_one_step_off
        case "fully_async":
            return run_fully_async
        case _:
            assert_never(config.mode.name)
