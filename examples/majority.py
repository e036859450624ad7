"""A scorer of one's own: the answer that most completions of a prompt agree on counts as right, and no label is read.

    offbeat train task=file ... task.reward=examples/majority.py:Majority

Zuo et al., "TTRL: Test-Time Reinforcement Learning", 2025. An answer is what stands behind the last colon, or the last word.
"""

from collections import Counter
from dataclasses import replace

from offbeat_trainer import UNSCORED, Score


class Majority:
    """1 for the answer of most, 0 for others; a group of which no answer comes twice has no score."""

    def __init__(self, setup):
        self.decode = setup.task.decode

    async def score(self, group):
        """Return `group` with its scores."""
        answers = [self.answer(self.decode(one.token_ids.tolist())) for one in group.trajectories]
        most, count = Counter(answers).most_common(1)[0]
        if len(answers) > 1 and count < 2:
            return replace(group, scores=(UNSCORED,) * len(answers))
        return replace(group, scores=tuple(Score(reward=float(one == most)) for one in answers))

    @staticmethod
    def answer(text):
        """Return the answer in `text`."""
        return text.rpartition(":")[2].strip() if ":" in text else (text.split() or [""])[-1]

    async def close(self):
        """Nothing was started."""
