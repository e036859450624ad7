"""ReMax (arXiv 2310.10505) as an algorithm of one's own: `algorithm=examples/remax.py:ReMax`.

No critic and no comparison within a group: a completion is worth what it earned above the greedy one of the same prompt.
"""

import torch

from offbeat_trainer.algorithms.grpo import Grpo


class ReMax(Grpo):
    """GRPO's settings and loss; one completion of a prompt is enough (`trainer.group_size=1`)."""

    def baseline(self):
        """Return how the completion is drawn that is scored beside the others, and not trained."""
        return {"temperature": 0.0}

    def targets(self, groups):
        """Return r - r(greedy) for each completion."""
        return {
            "advantages": torch.tensor(
                [score.reward - group.baseline[0].reward for group in groups for score in group.scores],
                dtype=torch.float64,
            )
        }

    def check(self):
        """Return what GRPO refuses, but for groups of one."""
        return [refusal for refusal in super().check() if refusal.setting != "trainer.group_size"]
