"""What a replica serves, as a source of weights: for a joiner, while the trainer goes on training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat_ckptsync.seams import WeightSource

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from offbeat_ckptsync.member.receiver import Receiver
    from offbeat_ckptsync.values import Manifest


class StagedCopy(WeightSource):
    """The committed bytes that a receiver still has beside its live weights.

    Only transports that stage in the receiver's own memory leave such a copy (not `shm`, whose segment goes back to
    the source). Publish it with the bucket size of the sync that brought it: the label covers the bucket plan.
    """

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def manifest(self) -> Manifest:
        """Return what is served; raises `TransferError` where no copy is kept."""
        return self._receiver.copy()[0]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield views of the copy; raises `TransferError` where none is kept."""
        yield from self._receiver.copy()[1]
