"""Rewards of one's own: `offbeat train task=file task.reward=[examples/rewards.py:right,examples/rewards.py:brief] ...`.

The data has a column `answer`. Together they say: be right first, then be short.
"""


def right(completion: str, answer: str) -> float:
    """Return 1 for the answer of the row, and nothing else, else 0: one completion a call."""
    return float(completion.strip() == answer)


def brief(completions: list[str], answer: list[str]) -> list[float]:
    """Return minus the characters beyond those of the answer, all completions of a prompt in one call."""
    return [-float(max(0, len(one) - len(wanted))) for one, wanted in zip(completions, answer, strict=True)]
