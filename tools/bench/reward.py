"""The reward that both sides train on. Nothing is imported: both environments load this file."""

from __future__ import annotations

GOOD = frozenset("abcdefgh")


def share_of_good(completion: str) -> float:
    """Return how much of the completion's text is good letters, 0 to 1: samples of one prompt differ in it."""
    return sum(letter in GOOD for letter in completion) / max(1, len(completion))
