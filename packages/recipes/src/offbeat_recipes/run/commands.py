"""The composition root: the one place where tasks, engines, replicas, weight sync and loop are put together."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING

from offbeat_engine.config import LoraExport
from offbeat_recipes.plan.algorithm import algorithm_of, engines_of
from offbeat_recipes.run.evaluate import evaluate_run
from offbeat_recipes.run.modes import cluster_spec, engine_on, loop_of, make_parts, make_rollout
from offbeat_recipes.run.offline import learn, offline_parts, rows_of, supervise
from offbeat_recipes.run.session import SFT, SFT_BY_LOSS, Caller, Session, drive, first_step
from offbeat_trainer import OfflineAlgorithm
from offbeat_trainer.algorithms.roles import POLICY
from offbeat_trainer.cluster.cluster import Cluster
from offbeat_trainer.loops.offline import run_warm_up, warm_up_engine
from offbeat_trainer.stream.run_store import RunStore
from offbeat_trainer.watch.watchdog import Timeline, Watchdog

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat_recipes.settings.tree import RunConfig
    from offbeat_trainer.cluster.train_group import TrainGroup


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


def evaluate(config: RunConfig, started: float) -> int:
    """Accuracy of a finished or interrupted run's policy on held-out prompts; returns the exit code."""
    return drive(config, evaluate_run, started, reopen=True)


async def _reinforce(session: Session) -> None:
    config = session.config
    spec = cluster_spec(config, session.folder, str(await _replicas_model(session)))
    watchdog = Watchdog(timeout_s=config.trainer.step_timeout_s, on_stall=config.asynchrony.on_stall)
    cluster = Cluster(spec, Timeline(session.folder.trace), watchdog)
    async with AsyncExitStack() as opened:
        opened.push_async_callback(cluster.stop)
        rollout = make_rollout(session, cluster)  # before engines load: rewards start meanwhile
        opened.push_async_callback(rollout.close)
        store = RunStore(session.folder.checkpoints / "state", keep=config.trainer.keep_checkpoints)
        session.reporter.phase(
            "start", f"{config.engine.num_ranks} training rank(s), {config.rollout.num_replicas} replica(s)"
        )
        start = await cluster.start(lambda: _prepare_training(session, cluster.train, store))
        session.startup_s = time.perf_counter() - session.started
        parts = make_parts(session, cluster, store, rollout)
        with closing(parts.journal), closing(parts.timeline):
            await cluster.train.watched(loop_of(config)(parts, session.outcome, start))
        if not session.outcome.interrupted:
            await cluster.train.export(str(session.folder.final.absolute()))


async def _learn_from_rows(session: Session) -> None:
    """Train by an algorithm that learns from what is written down: no replica runs."""
    config, folder, algorithm = session.config, session.folder, algorithm_of(session.config)
    assert isinstance(algorithm, OfflineAlgorithm), "the registry lets no other have `written_rows`"
    rows, held_out = rows_of(session.task, algorithm)
    measured = held_out(config.trainer.validation_prompts)
    store = RunStore(folder.checkpoints / "state", keep=config.trainer.keep_checkpoints)
    cluster = Cluster(cluster_spec(config.alone, folder, str(session.base_model)))
    try:
        session.reporter.phase("start", f"{config.engine.num_ranks} training rank(s); nothing is generated")
        await cluster.train.start()
        start = await _prepare_training(session, cluster.train, store)
        parts = offline_parts(
            session,
            cluster,
            store,
            batch=lambda step: algorithm.batch(rows(step, config.trainer.prompts_per_step)),
            held_out=algorithm.batch(measured) if measured else None,
        )
        await learn(session, cluster, parts, start)
        if not session.outcome.interrupted:
            await cluster.train.export(str(folder.final.absolute()))
    finally:
        await cluster.stop()


async def _replicas_model(session: Session) -> Path:
    """Return the folder that replicas start from: any of the same shape, unless they get no more than an adapter over it."""
    config, model = session.config, session.folder.model
    if not (config.sends_adapter_alone and config.warmup.steps):
        return session.base_model
    if not model.exists():
        await _warm_up_alone(session, LoraExport.MERGED)
    return model.absolute()


async def _prepare_training(session: Session, train: TrainGroup, store: RunStore) -> int:
    """Bring the training pool to the first step to be done and return that step."""
    config = session.config
    engine = engine_on(config, await _starting_model(session, train))
    await train.build(engines_of(config, engine))
    return await first_step(session, train, store, steps=config.trainer.steps, setting="trainer.steps")


async def _starting_model(session: Session, train: TrainGroup) -> Path:
    """Return the folder that reinforcement learning starts from; the warm-up makes it, once per run."""
    config, model = session.config, session.folder.model
    if config.warmup.steps == 0:
        return session.base_model
    if not model.exists():
        started = time.perf_counter()
        await _warm_up(session, train, LoraExport.MERGED)
        session.outcome.warmup_s = time.perf_counter() - started
    return model.absolute()


async def _warm_up(session: Session, train: TrainGroup, export: LoraExport) -> None:
    """Train on worked examples and write `<run>/model`; what follows needs it merged, a base of its own."""
    config = session.config
    engine = engine_on(config, session.base_model)
    engine = replace(engine, lora=replace(engine.lora, export=export))
    told = config.supervised
    session.reporter.phase("warm-up", f"{told.steps} steps, at most at a learning rate of {told.lr:g}")
    await train.build({POLICY: warm_up_engine(engine, told)})
    await run_warm_up(train, session.task, told, session.reporter)
    await train.export(str(session.folder.model.absolute()))


async def _warm_up_alone(session: Session, export: LoraExport) -> None:
    cluster = Cluster(cluster_spec(session.config, session.folder, str(session.base_model)))
    try:
        await cluster.train.start()
        session.startup_s = time.perf_counter() - session.started
        await _warm_up(session, cluster.train, export)
        session.outcome.warmup_s = time.perf_counter() - session.started - session.startup_s
    finally:
        await cluster.stop()
