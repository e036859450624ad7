"""The reporter that says nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat_trainer.data.types import Group
    from offbeat_trainer.metrics import Metric


class Silent:
    """A `Reporter` that drops everything, so that no caller needs to ask whether there is one."""

    def phase(self, name: str, detail: str = "") -> None:
        """Drop it."""

    def metrics(self, step: int, metrics: Sequence[Metric]) -> None:
        """Drop them."""

    def samples(self, step: int, title: str, groups: Sequence[Group], texts: Sequence[Sequence[str]]) -> None:
        """Drop them."""

    def summary(self, values: Mapping[str, object]) -> None:
        """Drop it."""

    def close(self) -> None:
        """Do nothing."""
