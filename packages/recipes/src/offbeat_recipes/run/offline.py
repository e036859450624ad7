"""Runs that learn from what is written down: `offbeat-sft`, and algorithms that generate nothing."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from offbeat_recipes.errors import TaskError
from offbeat_recipes.run.modes import cluster_spec, engine_on, make_rollout
from offbeat_recipes.run.session import SFT_BY_LOSS, first_step
from offbeat_recipes.tasks.base import HoldsOutExamples
from offbeat_trainer import Sft, SftConfig
from offbeat_trainer.algorithms.roles import POLICY
from offbeat_trainer.cluster.cluster import Cluster
from offbeat_trainer.loops.offline import OfflineParts, run_offline, warm_up_engine
from offbeat_trainer.loops.outcome import validate
from offbeat_trainer.stream.gate import version_of
from offbeat_trainer.stream.parts import Parts
from offbeat_trainer.stream.run_store import RunStore
from offbeat_trainer.watch.watchdog import Timeline, Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat_engine import TrainBatch
    from offbeat_recipes.run.session import Session
    from offbeat_recipes.tasks.base import RunnableTask
    from offbeat_trainer import OfflineAlgorithm, Rollout
    from offbeat_trainer.config import AlgorithmConfig
    from offbeat_trainer.data.metrics import Metric
    from offbeat_trainer.loops.offline import Validate
    from offbeat_trainer.watch.watchdog import PhaseClock

SFT = Sft(config=SftConfig())


async def supervise(session: Session) -> None:
    """Train on worked examples for `warmup.steps` steps, look at held-out ones, and write `<run>/model`."""
    config, folder = session.config, session.folder
    told, checkpoints = config.supervised, folder.checkpoints / "sft"
    spec = cluster_spec(config, folder, str(session.base_model))
    spec = replace(spec, train=replace(spec.train, algorithm=SFT, checkpoint_dir=str(checkpoints.absolute())))
    held_out = _held_out_examples(session)
    store = RunStore(checkpoints / "state", keep=config.trainer.keep_checkpoints)
    engine = warm_up_engine(engine_on(config, session.base_model), told)
    session.reporter.phase("start", f"supervised training, at most at a learning rate of {told.lr:g}")
    cluster = Cluster(spec)

    async def prepare() -> int:
        await cluster.train.build({POLICY: engine})
        return await first_step(session, cluster.train, store, steps=told.steps, setting="warmup.steps")

    async with AsyncExitStack() as opened:
        opened.push_async_callback(cluster.stop)
        rollout = _rollout(session, cluster)
        if rollout is None:
            await cluster.train.start()
            start = await prepare()
        else:
            opened.push_async_callback(rollout.close)
            start = await cluster.start(prepare)
        parts = offline_parts(
            session,
            cluster,
            store,
            batch=lambda step: SFT.batch(session.task.examples(step, told.batch_size)),
            held_out=held_out,
        )
        measured = None if rollout is None else _validation(session, cluster, store, rollout)
        await learn(
            session,
            cluster,
            replace(parts, validate=measured, loop=replace(parts.loop, steps=told.steps)),
            start,
        )
        if not session.outcome.interrupted:
            await cluster.train.export(str(folder.model.absolute()))


def offline_parts(
    session: Session,
    cluster: Cluster,
    store: RunStore,
    *,
    batch: Callable[[int], TrainBatch],
    held_out: TrainBatch | None,
) -> OfflineParts:
    """Return what the loop works with; `learn` closes its timeline."""
    loop = session.config.trainer
    return OfflineParts(
        policy=cluster.train,
        batch=batch,
        held_out=held_out,
        reporter=session.reporter,
        store=store,
        loop=loop,
        stop=session.stop,
        timeline=Timeline(session.folder.trace),
        watchdog=Watchdog(timeout_s=loop.step_timeout_s),
    )


async def learn(session: Session, cluster: Cluster, parts: OfflineParts, start: int) -> None:
    """Run the loop from step `start`, the ranks being watched."""
    session.startup_s = time.perf_counter() - session.started
    try:
        await cluster.train.watched(run_offline(parts, session.outcome, start))
    finally:
        parts.timeline.close()


def rows_of(
    task: RunnableTask, algorithm: OfflineAlgorithm[AlgorithmConfig]
) -> tuple[Callable[[int, int], Sequence[Any]], Callable[[int], Sequence[Any]]]:
    """Return what gives the rows of a step, and what gives held-out ones.

    Raises:
        TaskError: the task has none of what the algorithm reads.
    """
    found = [getattr(task, name, None) for name in (algorithm.reads, f"validation_{algorithm.reads}")]
    if None in found:
        raise TaskError(
            f"task: {type(algorithm).__name__} learns from {algorithm.reads}, and {type(task).__name__} has none"
        )
    return cast("Any", tuple(found))


def _held_out_examples(session: Session) -> TrainBatch | None:
    """Return what supervised training is measured by; None, and a line about it, where the task holds nothing out."""
    rows = []
    if isinstance(session.task, HoldsOutExamples):
        rows = session.task.validation_examples(session.config.trainer.validation_prompts)
    if not rows:
        session.reporter.phase(
            "task", "holds no examples out: nothing is measured but the loss of those that are trained"
        )
        return None
    return SFT.batch(rows)


def _rollout(session: Session, cluster: Cluster) -> Rollout | None:
    """Return what the task's accuracy is measured by: its turns and scores; None where nobody wants it, or there are none."""
    if session.program == SFT_BY_LOSS:
        return None
    try:
        return make_rollout(session, cluster)
    except TaskError as error:
        session.reporter.phase("task", f"no accuracy is measured: {error}")
        return None


def _validation(session: Session, cluster: Cluster, store: RunStore, rollout: Rollout) -> Validate:
    """Return what brings the weights of a step to the replicas and asks them for greedy accuracy on held-out prompts."""
    config = session.config
    parts = Parts(
        task=session.task,
        policy=cluster.train,
        rollout=rollout,
        publisher=cluster.publisher(),
        reporter=session.reporter,
        store=store,
        seed=config.seed,
        loop=config.trainer,
        algorithm=SFT,
        sampling=config.sampling,
    )

    async def measured(clock: PhaseClock, step: int, title: str) -> list[Metric]:
        with clock.phase("sync"):
            await parts.publisher.publish(version_of(step))
        return await validate(parts, clock, step, title)

    return measured
