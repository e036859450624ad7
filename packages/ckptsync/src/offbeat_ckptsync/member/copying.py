"""Copying many tensors into live ones as fast as the memory allows: what a pause consists of."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import torch

from offbeat_ckptsync.threads import num_movers

if TYPE_CHECKING:
    from collections.abc import Iterator

_SPAN_BYTES = 16 << 20  # copied at a time, so that threads finish together

Pair = tuple[torch.Tensor, torch.Tensor]
"""A live tensor and the one to copy into it."""


def copy_all(pairs: list[Pair]) -> None:
    """Copy the second tensor of each pair into the first, in place; shapes are equal, dtypes may differ.

    Plain runs of bytes in host memory are shared out to threads of this call, at most four and at most one per core
    that this process may use. Torch's own threads meet after every tensor: where cores are busy each meeting waits
    for the slowest, here there is one at the end.
    """
    plain = [pair for pair in pairs if is_plain(*pair)]
    with torch.no_grad():
        for live, given in pairs:
            if not is_plain(live, given):
                live.copy_(given)
    spans = iter([span for live, given in plain for span in _spans(live, given)])
    lock, failures = threading.Lock(), list[BaseException]()

    def work() -> None:
        try:
            while True:
                with lock:
                    span = next(spans, None)
                if span is None:
                    return
                np.copyto(*span)  # lets other threads run meanwhile
        except BaseException as error:  # noqa: BLE001 -- raised below, by the thread that called
            failures.append(error)

    helpers = [threading.Thread(target=work, name="copy") for _ in range(_num_threads(plain) - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if failures:
        raise failures[0]


def _num_threads(plain: list[Pair]) -> int:
    num_bytes = sum(live.nbytes for live, _ in plain)
    return max(1, min(num_movers(), num_bytes // _SPAN_BYTES))


def is_plain(live: torch.Tensor, given: torch.Tensor) -> bool:
    """Say whether both hold the same kind of numbers in host memory, in order and without gaps."""
    same = live.dtype == given.dtype and live.shape == given.shape
    host = live.device.type == given.device.type == "cpu"
    return same and host and live.is_contiguous() and given.is_contiguous()


def _spans(live: torch.Tensor, given: torch.Tensor) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    into, data = (each.detach().reshape(-1).view(torch.uint8).numpy() for each in (live, given))
    for start in range(0, len(into), _SPAN_BYTES):
        yield into[start : start + _SPAN_BYTES], data[start : start + _SPAN_BYTES]
