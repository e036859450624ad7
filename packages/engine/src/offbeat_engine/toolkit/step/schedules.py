"""Learning-rate schedules as one pure function of the step, and what no optimizer here can be told."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, assert_never

from offbeat_engine.config import OptimizerName, Refusal, Schedule
from offbeat_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat_engine.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Return the learning rate of optimizer step `step` (0-based).

    Warm-up rises linearly and never starts at zero: step s of W uses (s + 1) / W of `lr`. After it, with
    p = (s - W) / (total - W) cut to 0..1 and r = `min_lr_ratio`:

    - constant: 1
    - linear: 1 - (1 - r) p
    - cosine: r + (1 - r) (1 + cos(pi p)) / 2  (arxiv.org/abs/1608.03983, without restarts)
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    decay_steps = max(1, config.total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / decay_steps)
    floor = config.min_lr_ratio
    match config.schedule:
        case Schedule.CONSTANT:
            return config.lr
        case Schedule.LINEAR:
            return config.lr * (1.0 - (1.0 - floor) * progress)
        case Schedule.COSINE:
            return config.lr * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))
        case _:
            assert_never(config.schedule)


def step_rates(
    config: OptimizerConfig, step: int, lr: float | None, betas: tuple[float, float] | None
) -> tuple[float, tuple[float, float]]:
    """Return learning rate and betas of optimizer step `step`; `lr` and `betas` go before what `config` says.

    Raises:
        ConfigError: one of them is out of range.
    """
    beta1, beta2 = (config.beta1, config.beta2) if betas is None else betas
    asked = replace(config, lr=config.lr if lr is None else lr, beta1=beta1, beta2=beta2)
    for refusal in refusals(asked):
        raise ConfigError(str(refusal))
    return learning_rate(config, step) if lr is None else lr, (beta1, beta2)


def refusals(config: OptimizerConfig) -> Iterator[Refusal]:
    """Yield every reason why weights could not be stepped by `config`, whatever the engine: part of its `check`."""
    if config.name == OptimizerName.ADAFACTOR:
        yield Refusal(
            setting="optimizer.name",
            reason="there is no Adafactor any more",
            remedy="set it to adamw_8bit, whose moments take a quarter of the memory, or to adamw",
        )
    limits = {
        "lr": (config.lr >= 0, "must not be negative"),
        "beta1": (0 <= config.beta1 < 1, "must lie in [0, 1)"),
        "beta2": (0 <= config.beta2 < 1, "must lie in [0, 1)"),
        "eps": (config.eps > 0, "must be more than 0, a weight without a gradient would be divided by it"),
        "weight_decay": (config.weight_decay >= 0, "must not be negative"),
        "warmup_steps": (config.warmup_steps >= 0, "must not be negative"),
    }
    for name, (holds, limit) in limits.items():
        if not holds:
            reason = f"{limit}, got {getattr(config, name):g}"
            yield Refusal(setting=f"optimizer.{name}", reason=reason, remedy="leave it out for the default")
    if config.schedule != Schedule.CONSTANT and config.total_steps <= config.warmup_steps:
        yield Refusal(
            setting="optimizer.total_steps",
            reason=f"{config.schedule} needs more than `warmup_steps` ({config.warmup_steps}), got {config.total_steps}",
            remedy="give the number of optimizer steps of the run, or use the constant schedule",
        )
