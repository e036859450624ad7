"""A reporter that remembers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat_trainer.data.metrics import reduce_metrics

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat_trainer.data.metrics import Metric
    from offbeat_trainer.data.types import Group


class Recorder:
    """A `Reporter` that remembers.

    `phases` holds (name, detail) in order, `steps` the reduced metrics by step (those of several calls for one step
    joined, the newer winning), `shown` (step, title, texts), `end` the summary or None, `closed` the number of calls.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        self.phases: list[tuple[str, str]] = []
        self.steps: dict[int, dict[str, float]] = {}
        self.shown: list[tuple[int, str, list[list[str]]]] = []
        self.end: dict[str, object] | None = None
        self.closed = 0

    def phase(self, name: str, detail: str = "") -> None:
        """Remember it."""
        self.phases.append((name, detail))

    def metrics(self, step: int, metrics: Sequence[Metric]) -> None:
        """Remember them, reduced."""
        self.steps.setdefault(step, {}).update(reduce_metrics(metrics))

    def samples(self, step: int, title: str, groups: Sequence[Group], texts: Sequence[Sequence[str]]) -> None:
        """Remember the texts."""
        assert len(groups) == len(texts)
        self.shown.append((step, title, [list(group_texts) for group_texts in texts]))

    def summary(self, values: Mapping[str, object]) -> None:
        """Remember it."""
        self.end = dict(values)

    def close(self) -> None:
        """Count it."""
        self.closed += 1
