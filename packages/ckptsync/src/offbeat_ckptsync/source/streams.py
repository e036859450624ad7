"""CUDA streams for the threads that move weights, so that they wait for each other and not for anybody's training."""

# torch types its CUDA interface in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Generator


class Lane:
    """A stream of one thread's own on a GPU; on the CPU nothing, and nothing happens."""

    def __init__(self, device: str) -> None:
        """Make a stream where `device` is a CUDA device."""
        self._stream = torch.cuda.Stream(device) if torch.device(device).type == "cuda" else None

    @contextmanager
    def after(self, mark: torch.cuda.Event | None) -> Generator[None]:
        """Run what is inside on this stream, behind everything that `mark` stands for."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if mark is not None:
                self._stream.wait_event(mark)
            yield


def mark_of(tensor: torch.Tensor) -> torch.cuda.Event | None:
    """Return an event behind all work that the calling thread has queued on `tensor`'s GPU; None on the CPU."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event
