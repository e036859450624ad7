"""A rollout of one's own: twice as many completions are sampled as are trained, and those are trained whose rewards differ most.

    offbeat train ... environment.rollout=examples/pods.py:Pods

Xu et al., "Not All Rollouts are Useful: Down-Sampling Rollouts in LLM Reinforcement Learning", 2025 (max-variance down-sampling).
"""

from dataclasses import replace
from statistics import pvariance

from offbeat_trainer import SingleTurn

TIMES = 2


class Pods(SingleTurn):
    """Of `TIMES` n completions the n with the largest variance of rewards: some of the lowest, and the rest of the highest."""

    def __init__(self, setup):
        super().__init__(setup.generator, setup.scorer, setup.timeline)

    async def run(self, prompt, sampling, n, begun=(), keep=None):
        """Return n of the completions."""
        group = (await super().run(prompt, sampling, TIMES * n, begun, keep)).scored
        rewards = [score.reward for score in group.scores]
        if len(rewards) <= n:  # the others have no score
            return group
        ranked = sorted(range(len(rewards)), key=rewards.__getitem__)
        ends = [ranked[:low] + ranked[len(ranked) - (n - low) :] for low in range(n + 1)]
        chosen = sorted(max(ends, key=lambda places: pvariance(rewards[place] for place in places)))
        return replace(
            group,
            trajectories=tuple(group.trajectories[place] for place in chosen),
            scores=tuple(group.scores[place] for place in chosen),
        )
