"""The composition root: the one place where tasks, engines, replicas, weight sync and loop are put together."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from offbeat_engine.config import LoraExport
from offbeat_recipes.planning.algorithm import algorithm_of, engines_of
from offbeat_recipes.run.context import SFT, SFT_BY_LOSS, Caller, RunContext, drive, first_step
from offbeat_recipes.run.evaluate import Evaluation, evaluate_run
from offbeat_recipes.run.modes import cluster_spec, engine_on, loop_of, make_rollout, make_session
from offbeat_recipes.run.offline import learn, offline_session, rows_of, supervise
from offbeat_trainer import OfflineAlgorithm
from offbeat_trainer.algorithms.roles import POLICY
from offbeat_trainer.cluster.cluster import Cluster
from offbeat_trainer.data.types import version_of
from offbeat_trainer.loops.offline import run_warm_up, warm_up_engine
from offbeat_trainer.loops.run_store import RunStore
from offbeat_trainer.watch.watchdog import Timeline, Watchdog

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping
    from pathlib import Path

    from offbeat_recipes.run.live import Handover
    from offbeat_recipes.settings.tree import RunConfig
    from offbeat_trainer.cluster.train_group import TrainGroup
    from offbeat_trainer.loops.session import Session


def train(config: RunConfig, started: float, caller: Caller | None = None) -> int:
    """Reinforcement learning, after a warm-up if the settings have one; returns the exit code.

    `started` is when the command began, on `time.perf_counter`; so for all commands here.
    """
    return drive(config, _reinforce if config.generates else _learn_from_rows, started, caller=caller)


def sft(config: RunConfig, started: float) -> int:
    """Supervised training alone: `warmup.steps` steps, ends in `<run>/model`; returns the exit code."""
    return drive(config, supervise, started, program=SFT)


def sft_by_loss(config: RunConfig, started: float) -> int:
    """As `sft`, without replicas: the task's accuracy is not measured."""
    return drive(config, supervise, started, program=SFT_BY_LOSS)


def evaluate(config: RunConfig, started: float, asked: Mapping[str, Any]) -> int:
    """Accuracy of a finished or interrupted run's policy on held-out prompts; returns the exit code. `asked` are fields of `Evaluation`."""
    return drive(config, partial(evaluate_run, Evaluation(**asked)), started, reopen=True)


def hold(config: RunConfig, started: float, caller: Caller, handover: Handover) -> int:
    """Start all that a run of reinforcement learning has but its loop, for whoever takes the session; returns the exit code."""

    async def work(context: RunContext) -> None:
        async with _opened(context) as (cluster, session):
            session.algorithm = session.algorithm.at(context.outcome.algorithm_state)
            report = await session.publisher.publish(version_of(session.steps))
            session.version = report.version
            context.stop.listening = True
            await cluster.train.watched(handover.hand_over(session))
            context.outcome.steps = session.steps
            context.outcome.interrupted = handover.is_interrupted
            if not handover.is_interrupted:
                await cluster.train.export(str(context.folder.final.absolute()))

    return drive(config, work, started, caller=caller)


async def _reinforce(context: RunContext) -> None:
    async with _opened(context) as (cluster, session):
        await cluster.train.watched(loop_of(context.config)(session, context.outcome, session.steps))
        if not context.outcome.interrupted:
            await cluster.train.export(str(context.folder.final.absolute()))


@asynccontextmanager
async def _opened(context: RunContext) -> AsyncGenerator[tuple[Cluster, Session]]:
    """Start the processes of a run, after a warm-up if the settings have one, and bring the ranks to the first step to be done."""
    config = context.config
    spec = cluster_spec(config, context.folder, str(await _replicas_model(context)))
    watchdog = Watchdog(timeout_s=config.trainer.step_timeout_s)
    cluster = Cluster(spec, Timeline(context.folder.trace), watchdog)
    async with AsyncExitStack() as opened:
        opened.push_async_callback(cluster.stop)
        rollout = make_rollout(context, cluster)  # before engines load: rewards start meanwhile
        opened.push_async_callback(rollout.close)
        store = RunStore(context.folder.checkpoints / "state", keep=config.trainer.keep_checkpoints)
        context.reporter.phase(
            "start", f"{config.engine.num_ranks} training rank(s), {config.rollout.num_replicas} replica(s)"
        )
        start = await cluster.start(lambda: _prepare_training(context, cluster.train, store))
        context.startup_s = time.perf_counter() - context.started
        session = make_session(context, cluster, store, rollout, start)
        with closing(session.journal), closing(session.timeline):
            yield cluster, session


async def _learn_from_rows(context: RunContext) -> None:
    """Train by an algorithm that learns from what is written down: no replica runs."""
    config, folder, algorithm = context.config, context.folder, algorithm_of(context.config)
    assert isinstance(algorithm, OfflineAlgorithm), "the registry lets no other have `written_rows`"
    rows, held_out = rows_of(context.task, algorithm)
    measured = held_out(config.trainer.validation_prompts)
    store = RunStore(folder.checkpoints / "state", keep=config.trainer.keep_checkpoints)
    cluster = Cluster(cluster_spec(config.alone, folder, str(context.base_model)))
    try:
        context.reporter.phase("start", f"{config.engine.num_ranks} training rank(s); nothing is generated")
        await cluster.train.start()
        start = await _prepare_training(context, cluster.train, store)
        session = offline_session(
            context,
            cluster,
            store,
            batch=lambda step: algorithm.batch(rows(step, config.trainer.prompts_per_step)),
            held_out=algorithm.batch(measured) if measured else None,
        )
        await learn(context, cluster, session, start)
        if not context.outcome.interrupted:
            await cluster.train.export(str(folder.final.absolute()))
    finally:
        await cluster.stop()


async def _replicas_model(context: RunContext) -> Path:
    """Return the folder that replicas start from: any of the same shape, unless they get no more than an adapter over it."""
    config, model = context.config, context.folder.model
    if not (config.sends_adapter_alone and config.warmup.steps):
        return context.base_model
    if not model.exists():
        await _warm_up_alone(context)
    return model.absolute()


async def _prepare_training(context: RunContext, train: TrainGroup, store: RunStore) -> int:
    """Bring the training pool to the first step to be done and return that step."""
    config = context.config
    engine = engine_on(config, await _starting_model(context, train))
    await train.build(engines_of(config, engine))
    return await first_step(context, train, store, steps=config.trainer.steps, setting="trainer.steps")


async def _starting_model(context: RunContext, train: TrainGroup) -> Path:
    """Return the folder that reinforcement learning starts from; the warm-up makes it, once per run."""
    config, model = context.config, context.folder.model
    if config.warmup.steps == 0:
        return context.base_model
    if not model.exists():
        started = time.perf_counter()
        await _warm_up(context, train)
        context.outcome.warmup_s = time.perf_counter() - started
    return model.absolute()


async def _warm_up(context: RunContext, train: TrainGroup) -> None:
    """Train on worked examples and write `<run>/model`; what follows needs it merged, a base of its own."""
    config = context.config
    engine = engine_on(config, context.base_model)
    engine = replace(engine, lora=replace(engine.lora, export=LoraExport.MERGED))
    told = config.supervised
    context.reporter.phase("warm-up", f"{told.steps} steps, at most at a learning rate of {told.lr:g}")
    await train.build({POLICY: warm_up_engine(engine, told)})
    await run_warm_up(train, context.task, told, context.reporter)
    await train.export(str(context.folder.model.absolute()))


async def _warm_up_alone(context: RunContext) -> None:
    cluster = Cluster(cluster_spec(context.config, context.folder, str(context.base_model)))
    try:
        await cluster.train.start()
        context.startup_s = time.perf_counter() - context.started
        await _warm_up(context, cluster.train)
        context.outcome.warmup_s = time.perf_counter() - context.started - context.startup_s
    finally:
        await cluster.stop()
