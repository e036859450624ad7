"""Supervised training before reinforcement learning: a policy that is right sometimes has something to learn from."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from offbeat_trainer.data.assemble import assemble_examples
from offbeat_trainer.metrics import reduce_metrics

if TYPE_CHECKING:
    from offbeat_engine import EngineConfig
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


async def run_warm_up(
    policy: Policy, task: Supervised, config: WarmupConfig, reporter: Reporter
) -> list[dict[str, float]]:
    """Train `config.steps` supervised batches and return the metrics of each."""
    history: list[dict[str, float]] = []
    for step in range(config.steps):
        batch = assemble_examples(task.examples(step, config.batch_size))
        values = reduce_metrics(await policy.supervise(batch))
        history.append(values)
        if (step + 1) % TOLD_EVERY == 0 or step + 1 == config.steps:
            reporter.phase("warm-up", f"step {step + 1} of {config.steps}, loss {values['train/loss']:.3f}")
    return history
