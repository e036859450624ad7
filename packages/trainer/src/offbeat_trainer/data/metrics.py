"""Metrics carry their reduction, so that whoever has several values of one key knows how to join them.

Keys are `area/thing_unit`: `reward/mean`, `time/train_s`, `sync/gb_per_s`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable


class Reduction(Protocol):
    """A value that can be joined with another of its own kind."""

    def join(self, other: Reduction) -> Reduction:
        """Return the two joined; both must be of one class."""
        ...

    def value(self) -> float:
        """Return the number to report."""
        ...


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean: `total` over `weight`."""

    total: float
    weight: float = 1.0

    def join(self, other: Reduction) -> Mean:
        """Add totals and weights."""
        assert isinstance(other, Mean)
        return Mean(self.total + other.total, self.weight + other.weight)

    def value(self) -> float:
        """Return the mean; NaN when nothing was counted."""
        return self.total / self.weight if self.weight else float("nan")


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum."""

    total: float

    def join(self, other: Reduction) -> Sum:
        """Add."""
        assert isinstance(other, Sum)
        return Sum(self.total + other.total)

    def value(self) -> float:
        """Return the sum."""
        return self.total


@dataclass(frozen=True, slots=True)
class Max:
    """A maximum; NaN if one of its values is."""

    peak: float

    def join(self, other: Reduction) -> Max:
        """Take the larger, or what is no number: `max` would take whichever of the two came first."""
        assert isinstance(other, Max)
        return self if math.isnan(self.peak) or self.peak >= other.peak else other

    def value(self) -> float:
        """Return the maximum."""
        return self.peak


@dataclass(frozen=True, slots=True)
class Last:
    """The newest value (a learning rate, a version)."""

    newest: float

    def join(self, other: Reduction) -> Last:
        """Take the newer."""
        assert isinstance(other, Last)
        return other

    def value(self) -> float:
        """Return the newest value."""
        return self.newest


@dataclass(frozen=True, slots=True)
class Metric:
    """One measurement under its key."""

    key: str
    reduction: Reduction


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What a metric is. `low` and `high` bound what is usual, where that is the same for most runs."""

    unit: str = ""
    meaning: str
    low: float | None = None
    high: float | None = None


DESCRIBED: dict[str, Described] = {}
"""Metrics by key that the modules imported so far describe. A run writes those of its own into its folder, where the report reads them."""


def described(
    key: str, *, meaning: str, unit: str = "", low: float | None = None, high: float | None = None
) -> str:
    """Return `key`, and say what it is in the module that measures it: nothing else is needed to add a metric.

    Those that are drawn together with others, and advised about, stand in watch/metrics.toml instead.
    """
    DESCRIBED[key] = Described(unit=unit, meaning=meaning, low=low, high=high)
    return key


def reduce_metrics(metrics: Iterable[Metric]) -> dict[str, float]:
    """Join the metrics of equal key, in order, and return one number per key, keys sorted.

    Raises:
        TypeError: one key came with two kinds of reduction.
    """
    joined: dict[str, Reduction] = {}
    for metric in metrics:
        have = joined.get(metric.key)
        if have is not None and type(have) is not type(metric.reduction):
            raise TypeError(
                f"metric {metric.key!r} came as {type(have).__name__} and as {type(metric.reduction).__name__}; "
                "one key has one reduction"
            )
        joined[metric.key] = metric.reduction if have is None else have.join(metric.reduction)
    return {key: joined[key].value() for key in sorted(joined)}
