"""The exceptions of offbeat-recipes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class RecipeError(Exception):
    """Root of everything offbeat-recipes raises on purpose."""


class SettingError(RecipeError, ValueError):
    """Settings that do not exist or hold something else than they can; `problems` has one sentence each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class RunRefused(RecipeError, ValueError):
    """A run that cannot be made; `refusals` has one sentence each, which names the setting."""

    def __init__(self, refusals: Sequence[str]) -> None:
        super().__init__("\n".join(refusals))
        self.refusals = tuple(refusals)


class RunFailed(RecipeError, RuntimeError):
    """A run that began and failed; the message is that of its last panel, and `folder` holds what was reached."""

    def __init__(self, message: str, folder: Path) -> None:
        super().__init__(message)
        self.folder = folder


class TaskError(RecipeError, ValueError):
    """A task that cannot be made: unknown name, no tokenizer, too few prompts."""


class DataError(TaskError):
    """A row of a data file that cannot be used; the message names file, row and key."""


class RunFolderError(RecipeError, RuntimeError):
    """A run folder that is in use, or that holds a run of other settings; the message says which."""
