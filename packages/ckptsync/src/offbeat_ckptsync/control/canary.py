"""The canary: after a flip every replica answers one fixed question, and the answers must agree.

Digests prove that what was staged is what was sent. The canary looks at what became of it: a loader that put a tensor
in the wrong place, or memory that changed after it was digested.
"""

from __future__ import annotations

import math
from collections import Counter
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def odd_ones(
    answers: Mapping[str, Sequence[float]], *, tolerance: float, reference: Sequence[float] = ()
) -> dict[str, str]:
    """Return who answers otherwise than the rest, and how; empty answers take no part, nor does a `reference` that is no number.

    The right answer is `reference` (the source's own) where there is one. Else it is the element-wise median, which
    one wrong replica among three or more does not move; of two that differ nobody can say which is right, so both
    are returned. An answer is right when none of its numbers is further than `tolerance` from that, and has as many, which
    is how many most have.
    """
    given = {name: list(answer) for name, answer in answers.items() if len(answer)}
    odd = {name: "answers with numbers that are none" for name, a in given.items() if not _all_finite(a)}
    given = {name: answer for name, answer in given.items() if name not in odd}
    reference = reference if _all_finite(reference) else ()
    if not given or (len(given) == 1 and not reference):
        return odd
    right = list(reference) or _middle([*given.values()])
    for name, answer in given.items():
        if len(answer) != len(right):
            odd[name] = f"answered {len(answer)} numbers, {len(right) or 'nobody knows how many'} are right"
        elif (distance := _distance(answer, right)) > tolerance:
            odd[name] = f"answers {distance:.3g} away from what is right; the tolerance is {tolerance:g}"
    return odd


def _middle(answers: list[list[float]]) -> list[float]:
    (usual, most), *others = Counter(map(len, answers)).most_common(2)
    if any(number == most for _, number in others):
        return []
    return [median(column) for column in zip(*(a for a in answers if len(a) == usual), strict=True)]


def _distance(answer: Sequence[float], right: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(answer, right, strict=True))


def _all_finite(answer: Sequence[float]) -> bool:
    return all(math.isfinite(number) for number in answer)
