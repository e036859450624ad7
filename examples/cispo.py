"""CISPO (arXiv 2506.13585, MiniMax-M1) as an algorithm of one's own: `offbeat-train algorithm=examples/cispo.py:Cispo`.

The importance ratio is clipped and taken as a constant weight of the policy gradient, so that no token loses its gradient.
"""

from dataclasses import dataclass

from offbeat_engine import bounded
from offbeat_trainer import Surrogate
from offbeat_trainer.algorithms.grpo import Grpo
from offbeat_trainer.config import GrpoConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CispoConfig(GrpoConfig):
    """GRPO's settings; the weight ends at 1 + `clip_high`, and there is no bound below (section 3.1)."""

    clip_high: float = bounded(4.0, at_least=0)


class Cispo(Grpo):
    """Advantages, correction, KL and metrics as GRPO has them."""

    Config = CispoConfig

    def surrogate(self, ratio, advantages):
        """Return -clip(r) A log pi with the clipped r as a constant (equation 4); log r has the gradient of log pi."""
        weight = ratio.detach().clamp(max=1 + self.config.clip_high)
        return Surrogate(loss=-weight * advantages * ratio.log(), clipped_high=weight < ratio)
