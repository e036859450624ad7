"""The exceptions of offbeat-trainer."""

from __future__ import annotations


class TrainerError(Exception):
    """Root of everything offbeat-trainer raises on purpose."""


class PlanRefused(TrainerError, ValueError):
    """Settings that cannot be run: batch arithmetic, placement, capabilities. Raised before anything starts."""


class DeadlineExceeded(TrainerError, TimeoutError):
    """A wait ran out; the message says who waited for whom, for what, and how long."""


class WorkerGone(TrainerError, ConnectionError):
    """A training rank or a replica died; the message names it and says what it last did."""


class ResumeError(TrainerError, RuntimeError):
    """A run folder that cannot be continued; the message says which file disagrees and what to do."""


class LoadError(TrainerError, ImportError):
    """What a setting names by its path cannot be imported, or is not what it must be."""


class GroupFailed(TrainerError, RuntimeError):
    """A group cannot be made or scored, and is left out. `reason` is a few words: "raised", "timed out", "died", ..."""

    whose = "group"

    def __init__(self, reason: str, message: str) -> None:
        """Say why in `reason`, and what is known in `message`."""
        super().__init__(message)
        self.reason = reason

    @property
    def counted_as(self) -> str:
        """What the metrics count it by: "reward raised", "environment died", ..."""
        return f"{self.whose} {self.reason}"


class RewardFailed(GroupFailed):
    """A group could not be scored."""

    whose = "reward"


class EnvironmentFailed(GroupFailed):
    """A trajectory could not be made. `innocent`: another's failure took it along, and it may be tried again as if new."""

    whose = "environment"

    def __init__(self, reason: str, message: str, *, innocent: bool = False) -> None:
        """See `GroupFailed`."""
        super().__init__(reason, message)
        self.innocent = innocent
