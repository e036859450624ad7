"""DAPO (arXiv 2503.14476) as an algorithm of one's own: `offbeat-train algorithm=examples/dapo.py:Dapo`.

GRPO with its clip-higher and its mean over tokens, which are defaults here, dynamic sampling, and overlong filtering.
"""

from dataclasses import dataclass

import torch

from offbeat_rollout import Finish
from offbeat_trainer.algorithms.grpo import Grpo
from offbeat_trainer.config import GrpoConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DapoConfig(GrpoConfig):
    """Groups that are all right or all wrong are left out, and others made in their place (section 3.2)."""

    dynamic_sampling: bool = True


class Dapo(Grpo):
    """What was cut off at the longest length teaches nothing: its reward is noise (section 3.4)."""

    Config = DapoConfig

    def targets(self, groups):
        """Return the advantages, and a mask that leaves truncated completions out."""
        whole = [one.finish is not Finish.LENGTH for group in groups for one in group.trajectories]
        return {**super().targets(groups), "loss_mask": torch.tensor(whole)}
