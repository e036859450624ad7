"""What losses add up to: on the device while micro-batches run, in rank order at the end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from offbeat_engine.errors import StepError
from offbeat_engine.values import LossOutput

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Read = tuple[float, dict[str, float], dict[str, float]]
"""Loss, sums and maxes."""


class Totals:
    """Loss, sums and maxes of this rank's micro-batches, float64 on the device: nobody waits for them before the end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._sums: dict[str, torch.Tensor] = {}
        self._maxes: dict[str, torch.Tensor] = {}

    def add(self, output: object) -> LossOutput:
        """Count in what a loss returned, and return it.

        Raises:
            StepError: it is not what a loss has to return.
        """
        if not isinstance(output, LossOutput) or getattr(output.loss, "ndim", 1):
            raise StepError(f"a loss function returns `LossOutput` with a scalar `loss`, got {output!r:.200}")
        self._loss = self._loss + self._wide(output.loss)
        for key, value in output.sums.items():
            self._sums[key] = self._sums.get(key, 0.0) + self._wide(value)
        for key, value in output.maxes.items():
            wide = self._wide(value)
            # Not `max`: NaN must come through, in either order.
            self._maxes[key] = torch.maximum(self._maxes[key], wide) if key in self._maxes else wide
        return output

    def read(self) -> Read:
        """Bring all numbers to the host at once, which waits for the device."""
        both = [self._loss, *self._sums.values(), *self._maxes.values()]
        loss, *rest = torch.stack(both).tolist()
        num_sums = len(self._sums)
        return (
            loss,
            dict(zip(self._sums, rest[:num_sums], strict=True)),
            dict(zip(self._maxes, rest[num_sums:], strict=True)),
        )

    def _wide(self, value: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(value, device=self._device).detach().reshape(()).double()

    @staticmethod
    def combined(parts: Sequence[Read]) -> Read:
        """Combine what `read` gave on several ranks, in that order."""
        maxes: dict[str, float] = {}
        for part in parts:
            for key, value in part[2].items():
                maxes[key] = _larger(maxes.get(key, -math.inf), value)
        return _sum(part[0] for part in parts), Totals.added([part[1] for part in parts]), maxes

    @staticmethod
    def added(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Add numbers up by name, in order."""
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: _sum(part[name] for part in parts if name in part) for name in names}


def _sum(values: Iterable[float]) -> float:
    total = 0.0
    for value in values:  # not `sum`, which rounds otherwise from Python 3.12 on
        total += value
    return total


def _larger(left: float, right: float) -> float:
    """Maximum that lets NaN through, in either order."""
    return left if math.isnan(left) else right if math.isnan(right) else max(left, right)
