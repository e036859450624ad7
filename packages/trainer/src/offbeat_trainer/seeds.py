"""Seeds: every random choice of a run is a pure function of the run's seed and of where it is made.

That is what makes a resumed run repeat the undisturbed one: nothing random is carried along.
"""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """Return a seed in 0 .. 2**63 - 1 that depends on every part and on their order."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
