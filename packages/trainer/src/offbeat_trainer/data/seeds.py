"""Seeds: every random choice of a run is a pure function of the run's seed and of where it is made.

That is what makes a resumed run repeat the undisturbed one: nothing random is carried along.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def derive_seed(*parts: int | str) -> int:
    """Return a seed in 0 .. 2**63 - 1 that depends on every part and on their order."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def derive_seeds(*parts: int | str, places: Iterable[int]) -> list[int]:
    """Return `derive_seed(*parts, place)` for each of `places`; what they share is hashed once."""
    text = "".join(f"{part}/" for part in parts)
    shared = hashlib.blake2b(text.encode(), digest_size=8)
    seeds: list[int] = []
    for place in places:
        own = shared.copy()
        own.update(str(place).encode())
        seeds.append(int.from_bytes(own.digest(), "big") >> 1)
    return seeds
