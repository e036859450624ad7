from dataclasses import replace

import pytest

from offbeat_engine import Fsdp2Config, ModelConfig, OptimizerConfig, Schedule, learning_rate
from offbeat_trainer.config import WarmupConfig
from offbeat_trainer.loops.offline import warm_up_engine

ENGINE = Fsdp2Config(
    model=ModelConfig(path="/m"),
    optimizer=OptimizerConfig(lr=1e-5, weight_decay=0.1, schedule=Schedule.LINEAR, total_steps=7),
    micro_batch_tokens=99,
)


def test_only_the_schedule_is_the_warm_ups():
    made = warm_up_engine(ENGINE, WarmupConfig(steps=100, lr=3e-3, lr_warmup_steps=20))
    assert replace(made, optimizer=ENGINE.optimizer) == ENGINE
    assert made.optimizer == OptimizerConfig(
        lr=3e-3,
        weight_decay=0.1,
        schedule=Schedule.COSINE,
        warmup_steps=20,
        total_steps=100,
        min_lr_ratio=0.1,
    )


@pytest.mark.parametrize("steps", [1, 2, 3, 30])
def test_a_short_warm_up_still_comes_down_again(steps):
    optimizer = warm_up_engine(ENGINE, WarmupConfig(steps=steps, lr=1e-3, lr_warmup_steps=20)).optimizer
    assert optimizer.warmup_steps == steps // 2
    rates = [learning_rate(optimizer, step) for step in range(steps)]
    assert max(rates) <= optimizer.lr
    assert min(rates) > 0
    assert learning_rate(optimizer, steps) == pytest.approx(0.1 * optimizer.lr)
