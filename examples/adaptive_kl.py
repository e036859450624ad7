"""GRPO whose KL coefficient follows a target (arXiv 1909.08593, section 2.2): `algorithm=examples/adaptive_kl.py:AdaptiveKl`.

The coefficient is a state of the algorithm: it changes on the driver after each step, and is saved and resumed with the run.
"""

from dataclasses import dataclass, replace

from offbeat_trainer.algorithms.grpo import Grpo
from offbeat_trainer.config import GrpoConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveKlConfig(GrpoConfig):
    """`kl_coef` is where it begins."""

    kl_coef: float = 0.01
    kl_target: float = 0.02  # nats a token
    kl_gain: float = 0.1  # of the proportional error, which is cut to -0.2..0.2


class AdaptiveKl(Grpo):
    """beta <- beta (1 + gain * clip(KL / target - 1, -0.2, 0.2)) after every step."""

    Config = AdaptiveKlConfig

    def next_state(self, metrics):
        """Return the coefficient of the next step, by the KL that this one measured."""
        error = metrics["policy/ref_kl_nats"] / self.config.kl_target - 1
        before = self.state.get("kl_coef", self.config.kl_coef)
        return {"kl_coef": before * (1 + self.config.kl_gain * max(-0.2, min(0.2, error)))}

    def loss_fn(self):
        """Return GRPO's loss with the coefficient of this step."""
        coef = self.state.get("kl_coef", self.config.kl_coef)
        return replace(super().loss_fn(), config=replace(self.config, kl_coef=coef))
