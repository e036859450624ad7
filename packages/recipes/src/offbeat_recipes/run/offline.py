"""Runs that learn from what is written down: `offbeat sft`, and algorithms that generate nothing."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from offbeat_recipes.errors import TaskError
from offbeat_recipes.run.context import SFT_BY_LOSS, first_step
from offbeat_recipes.run.modes import cluster_spec, engine_on, make_rollout
from offbeat_recipes.tasks.base import HoldsOutExamples
from offbeat_trainer import Sft, SftConfig
from offbeat_trainer.algorithms.roles import POLICY
from offbeat_trainer.cluster.cluster import Cluster
from offbeat_trainer.data.types import version_of
from offbeat_trainer.loops.offline import OfflineSession, run_offline, warm_up_engine
from offbeat_trainer.loops.outcome import validate
from offbeat_trainer.loops.run_store import RunStore
from offbeat_trainer.loops.session import Session
from offbeat_trainer.watch.watchdog import Timeline, Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat_engine import TrainBatch
    from offbeat_recipes.run.context import RunContext
    from offbeat_recipes.tasks.base import RunnableTask
    from offbeat_trainer import OfflineAlgorithm, Rollout
    from offbeat_trainer.config import AlgorithmConfig
    from offbeat_trainer.data.metrics import Metric
    from offbeat_trainer.loops.offline import Validate
    from offbeat_trainer.watch.watchdog import PhaseClock

SFT = Sft(config=SftConfig())


async def supervise(context: RunContext) -> None:
    """Train on worked examples for `warmup.steps` steps, look at held-out ones, and write `<run>/model`."""
    config, folder = context.config, context.folder
    told, checkpoints = config.supervised, folder.checkpoints / "sft"
    spec = cluster_spec(config, folder, str(context.base_model))
    spec = replace(spec, train=replace(spec.train, algorithm=SFT, checkpoint_dir=str(checkpoints.absolute())))
    held_out = _held_out_examples(context)
    store = RunStore(checkpoints / "state", keep=config.trainer.keep_checkpoints)
    engine = warm_up_engine(engine_on(config, context.base_model), told)
    context.reporter.phase("start", f"supervised training, at most at a learning rate of {told.lr:g}")
    cluster = Cluster(spec)

    async def prepare() -> int:
        await cluster.train.build({POLICY: engine})
        return await first_step(context, cluster.train, store, steps=told.steps, setting="warmup.steps")

    async with AsyncExitStack() as opened:
        opened.push_async_callback(cluster.stop)
        rollout = _rollout(context, cluster)
        if rollout is None:
            await cluster.train.start()
            start = await prepare()
        else:
            opened.push_async_callback(rollout.close)
            start = await cluster.start(prepare)
        session = offline_session(
            context,
            cluster,
            store,
            batch=lambda step: SFT.batch(context.task.examples(step, told.batch_size)),
            held_out=held_out,
        )
        measured = None if rollout is None else _validation(context, cluster, store, rollout)
        await learn(
            context,
            cluster,
            replace(session, validate=measured, loop=replace(session.loop, steps=told.steps)),
            start,
        )
        if not context.outcome.interrupted:
            await cluster.train.export(str(folder.model.absolute()))


def offline_session(
    context: RunContext,
    cluster: Cluster,
    store: RunStore,
    *,
    batch: Callable[[int], TrainBatch],
    held_out: TrainBatch | None,
) -> OfflineSession:
    """Return what the loop works with; `learn` closes its timeline."""
    loop = context.config.trainer
    return OfflineSession(
        policy=cluster.train,
        batch=batch,
        held_out=held_out,
        reporter=context.reporter,
        store=store,
        loop=loop,
        stop=context.stop,
        timeline=Timeline(context.folder.trace),
        watchdog=Watchdog(timeout_s=loop.step_timeout_s),
    )


async def learn(context: RunContext, cluster: Cluster, session: OfflineSession, start: int) -> None:
    """Run the loop from step `start`, the ranks being watched."""
    context.startup_s = time.perf_counter() - context.started
    try:
        await cluster.train.watched(run_offline(session, context.outcome, start))
    finally:
        session.timeline.close()


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


def _held_out_examples(context: RunContext) -> TrainBatch | None:
    """Return what supervised training is measured by; None, and a line about it, where the task holds nothing out."""
    rows = []
    if isinstance(context.task, HoldsOutExamples):
        rows = context.task.validation_examples(context.config.trainer.validation_prompts)
    if not rows:
        context.reporter.phase(
            "task", "holds no examples out: nothing is measured but the loss of those that are trained"
        )
        return None
    return SFT.batch(rows)


def _rollout(context: RunContext, cluster: Cluster) -> Rollout | None:
    """Return what the task's accuracy is measured by: its turns and scores; None where nobody wants it, or there are none."""
    if context.program == SFT_BY_LOSS:
        return None
    try:
        return make_rollout(context, cluster)
    except TaskError as error:
        context.reporter.phase("task", f"no accuracy is measured: {error}")
        return None


def _validation(context: RunContext, cluster: Cluster, store: RunStore, rollout: Rollout) -> Validate:
    """Return what brings the weights of a step to the replicas and asks them for greedy accuracy on held-out prompts."""
    config = context.config
    session = Session(
        task=context.task,
        policy=cluster.train,
        rollout=rollout,
        publisher=cluster.publisher(),
        reporter=context.reporter,
        store=store,
        seed=config.seed,
        loop=config.trainer,
        algorithm=SFT,
        sampling=config.sampling,
    )

    async def measured(clock: PhaseClock, step: int, title: str) -> list[Metric]:
        with clock.phase("sync"):
            await session.publisher.publish(version_of(step))
        return await validate(session, step, title, clock)

    return measured
