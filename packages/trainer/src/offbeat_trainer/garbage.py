"""How often Python looks for cycles while many groups are under way."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

RARER = 100


@contextmanager
def rare_full_collections() -> Generator[None]:
    """Make full collections a hundred times rarer in the block; young objects are looked at as always.

    A full collection stops the event loop while it walks every object there is. With ten thousand groups pending that
    was half a second, every few seconds, and a third of the driver's time; it found nothing, for groups make no cycles.
    The middle generation is looked at with the young one each second time, not once it holds ten times as much: then it
    stopped the loop for 5 ms, and most groups, which stay for seconds, were walked once more than they are now.
    """
    before = gc.get_threshold()
    gc.set_threshold(before[0], 0, before[2] * before[1] * RARER // 2)
    try:
        yield
    finally:
        gc.set_threshold(*before)
