"""Random streams that are pure functions of seed, purpose and step, so that a resumed run meets the same prompts."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """What random numbers are for: streams of different purposes are independent."""

    PROMPTS = 1
    EXAMPLES = 2
    HELD_OUT = 3


def stream(seed: int, purpose: Stream, step: int = 0) -> np.random.Generator:
    """Return the generator of (seed, purpose, step); the same numbers on every machine (Philox, counter-based)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, int(purpose), step])))


def epoch_indices(num_rows: int, step: int, num_taken: int, seed: int, purpose: Stream) -> list[int]:
    """Return the rows of `step` when each epoch is a fresh permutation of `num_rows` rows.

    A step lies within one epoch and an epoch holds each row at most once: what does not fill a step is left
    over, another part in each epoch. A pure function of its arguments.
    """
    if not 1 <= num_taken <= num_rows:
        raise ValueError(f"a step takes {num_taken} rows, and there are {num_rows}")
    steps_per_epoch = num_rows // num_taken
    epoch, position = divmod(step, steps_per_epoch)
    order = stream(seed, purpose, epoch).permutation(num_rows)
    return [int(row) for row in order[position * num_taken : (position + 1) * num_taken]]
