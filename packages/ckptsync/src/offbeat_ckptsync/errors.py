"""The exceptions of offbeat-ckptsync: every failure names where it happened."""

from __future__ import annotations


class SyncError(Exception):
    """Root of everything offbeat-ckptsync raises on purpose."""


class ManifestError(SyncError, ValueError):
    """Two sides disagree about which tensors there are; the message names each one that differs."""


class PlanError(SyncError, ValueError):
    """A bucket plan that cannot be made (say, a bucket smaller than the alignment)."""


class DigestError(SyncError, RuntimeError):
    """What arrived is not what was sent; the message names the bucket and the tensors in it."""


class VersionError(SyncError, RuntimeError):
    """A version out of order, or one that does not belong to the staged content."""


class TransferError(SyncError, RuntimeError):
    """The bytes did not arrive: a peer is missing, died, or was too slow; names rank, phase and bucket."""


class WireError(SyncError, ValueError):
    """A message that is not what the protocol says: a field is unknown, missing or of the wrong type."""


class PhaseError(SyncError, RuntimeError):
    """A step out of turn: the receiver's state machine has no such transition."""


class LoadError(SyncError, RuntimeError):
    """The sink failed after it began to write: this member's weights are neither old nor new. Fence it off."""


class SyncFailed(SyncError, RuntimeError):
    """A sync that did not reach every member; the message says which member, in which phase, and why.

    `served` tells what each member serves now, `silent` which members alone gave no word, and in which phase.
    """

    def __init__(
        self, message: str, *, served: dict[str, int] | None = None, silent: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.served = {} if served is None else served
        self.silent = {} if silent is None else silent
