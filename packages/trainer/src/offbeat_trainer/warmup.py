"""Supervised training before reinforcement learning: a policy that is right sometimes has something to learn from."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from offbeat_trainer.data.assemble import assemble_examples
from offbeat_trainer.metrics import reduce_metrics

if TYPE_CHECKING:
    from offbeat_engine import EngineConfig, TrainBatch
    from offbeat_trainer.config import WarmupConfig
    from offbeat_trainer.interface import Policy, Reporter, Supervised

TOLD_EVERY = 10


def warm_up_engine(engine: EngineConfig, config: WarmupConfig) -> EngineConfig:
    """Return `engine` with the schedule of the warm-up: a short rise, then half a cosine down to a tenth.

    `config.lr` is a number here: which one fits the model is known to whoever chose that.
    """
    from offbeat_engine import Schedule

    assert config.lr is not None
    optimizer = replace(
        engine.optimizer,
        lr=config.lr,
        schedule=Schedule.COSINE,
        warmup_steps=min(config.lr_warmup_steps, config.steps // 2),
        total_steps=config.steps,
        min_lr_ratio=0.1,
    )
    return replace(engine, optimizer=optimizer)


async def run_warm_up(policy: Policy, task: Supervised, config: WarmupConfig, reporter: Reporter) -> None:
    """Train `config.steps` supervised batches."""

    def batch_of(step: int) -> TrainBatch:
        return assemble_examples(task.examples(step, config.batch_size))

    batch = batch_of(0)
    for step in range(config.steps):
        following = min(step + 1, config.steps - 1)  # made while the ranks train on this one
        trained, batch = await asyncio.gather(policy.supervise(batch), asyncio.to_thread(batch_of, following))
        if (step + 1) % TOLD_EVERY == 0 or step + 1 == config.steps:
            loss = reduce_metrics(trained)["train/loss"]
            reporter.phase("warm-up", f"step {step + 1} of {config.steps}, loss {loss:.3f}")
