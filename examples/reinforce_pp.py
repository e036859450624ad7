"""REINFORCE++ (arXiv 2501.03262) as an algorithm of one's own: `algorithm=examples/reinforce_pp.py:ReinforcePlusPlus`.

No critic and no groups: rewards are compared over the whole batch, and the clipped surrogate is followed.
"""

import torch

from offbeat_trainer.algorithms.grpo import Grpo


class ReinforcePlusPlus(Grpo):
    """GRPO's settings and loss; one completion of a prompt is enough (`trainer.group_size=1`)."""

    def targets(self, groups):
        """Return (r - mean) / std over all completions of the step: the paper's global normalization of advantages."""
        rewards_B = torch.tensor(
            [score.reward for group in groups for score in group.scores], dtype=torch.float64
        )
        std = rewards_B.std(correction=0) if len(rewards_B) else rewards_B.sum()
        return {"advantages": (rewards_B - rewards_B.mean()) / (std + 1e-8)}

    def check(self):
        """Return what GRPO refuses, but for groups of one."""
        return [refusal for refusal in super().check() if refusal.setting != "trainer.group_size"]
