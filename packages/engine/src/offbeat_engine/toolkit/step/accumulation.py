"""What the calls of one optimizer step leave for each other: gradients of how much, whether they are good, what was taken."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from offbeat_engine.config import NonFinite
from offbeat_engine.errors import NonFiniteError, StateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat_engine.values import StepStats


class Accumulation:
    """From `optimizer_zero_grad` over training calls to `optimizer_step` and the schedule; the same on all ranks."""

    def __init__(self, on_nonfinite: NonFinite) -> None:
        """Stop or skip where a loss or norm is not finite."""
        self._on_nonfinite = on_nonfinite
        self._num_loss_tokens: int | None = None  # None: no call since gradients were dropped
        self._is_lost = False
        self._stepped = True

    @property
    def advances(self) -> bool:
        """Whether the schedule may go on: not after a step that was skipped or had nothing to step on."""
        return self._stepped

    def drop(self) -> None:
        """Begin anew; gradients were dropped."""
        self._num_loss_tokens, self._is_lost = None, False

    def add(self, stats: StepStats) -> None:
        """Count a training call.

        Raises:
            NonFiniteError: its loss is not finite and the config says stop.
        """
        self._num_loss_tokens = (self._num_loss_tokens or 0) + stats.num_loss_tokens
        if not math.isfinite(stats.loss):
            self._is_lost = True
            if self._on_nonfinite == NonFinite.STOP:
                raise NonFiniteError(
                    f"the loss is {stats.loss} (all ranks agree); see the batch, or lower the learning rate"
                )

    def step(self, grad_norm: Callable[[], float], update: Callable[[float], None]) -> float:
        """Take the norm and update by it if all is well; return what `optimizer_step` returns.

        Raises:
            NonFiniteError: the loss or the norm is not finite and the config says stop.
            StateError: nothing was accumulated.
        """
        self._stepped = False
        if self._num_loss_tokens is None:
            raise StateError("`optimizer_step` without a gradient; call `forward_backward_step` first")
        if not self._num_loss_tokens:
            return 0.0  # no rank had a token under its mask
        norm = grad_norm()
        if self._is_lost or not math.isfinite(norm):
            if self._on_nonfinite == NonFinite.STOP:
                what = "the loss was not finite" if self._is_lost else f"the gradient norm is {norm}"
                raise NonFiniteError(f"{what} (all ranks agree); no weight was changed")
            return math.nan
        update(norm)
        self._stepped = True
        return norm

    def check_gradients(self) -> None:
        """Raise `StateError` unless there is a gradient to look at."""
        if not self._num_loss_tokens:
            why = (
                "call `forward_backward_step` first"
                if self._num_loss_tokens is None
                else "no rank had a token under its `loss_mask`"
            )
            raise StateError(f"there are no gradients; {why}")
