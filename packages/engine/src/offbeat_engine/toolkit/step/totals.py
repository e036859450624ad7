"""What losses add up to: on the device while micro-batches run, in rank order at the end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase

from offbeat_engine.batch import LossOutput
from offbeat_engine.config import NonFinite
from offbeat_engine.errors import BatchError, NonFiniteError, StateError, StepError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from offbeat_engine.batch import Predictions, StepStats, TrainBatch


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


Described = dict[str, tuple[str, list[int]]]
"""Of each key: its dtype, and its shape beyond [B] as the whole batch has it."""


class Answers:
    """What the model and the hooks said of this rank's sequences, kept on the device until all of it is there."""

    def __init__(self, batch: TrainBatch, names: Sequence[str]) -> None:
        """Expect `names`, of which a rank without sequences has zeros where nobody says anything; none: nothing is kept."""
        self._batch = batch
        self._names = tuple(names)
        self._rows: list[int] = []
        self._parts: dict[str, list[tuple[int, torch.Tensor]]] = {}

    def check(self, answers: object, micro: TrainBatch) -> None:
        """Raise `BatchError` unless `answers` is what a `postprocess_fn` may return for `micro`."""
        shape = tuple(micro["input_ids"].shape)
        if not isinstance(answers, TensorDictBase):
            raise BatchError(
                f"`postprocess_fn` must return predictions (a TensorDict), got {type(answers).__name__}"
            )
        for name, value in answers.items():
            if not isinstance(value, torch.Tensor) or tuple(value.shape[:2]) != shape[: value.ndim]:
                raise BatchError(
                    f"`postprocess_fn`: `{name}` must be [{shape[0]}], {list(shape)} or [{shape[0]}, {shape[1]}, K], got "
                    f"{list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__}"
                )

    def add(self, rows: Sequence[int], answers: Predictions) -> None:
        """Keep what was said of the sequences numbered `rows`, without its gradient."""
        start = len(self._rows)
        self._rows += rows
        for name in map(str, answers.keys()):  # a TensorDict iterates over its batch, not its keys
            self._parts.setdefault(name, []).append((start, answers[name].detach()))

    def described(self) -> Described:
        """Return the keys that this rank has, for ranks that have none of a key's rows."""
        width = self._batch["input_ids"].shape[1]
        described: Described = {}
        for name, parts in self._parts.items():
            part = parts[0][1]
            beyond = [] if part.ndim == 1 else [width, *part.shape[2:]]
            described[name] = (str(part.dtype).removeprefix("torch."), beyond)
        return described

    def joined(self, described: Sequence[Described]) -> Predictions:
        """Return all that is kept, with every key that any rank described: zeros where nothing was said.

        On a rank that keeps nothing of a batch with sequences (it has no outputs, or nobody asked) there are no keys.
        """
        batch_size, width = self._batch["input_ids"].shape
        known: Described = {}
        for one in described:
            known |= {key: what for key, what in one.items() if key not in known}
        if batch_size and not self._rows:
            known = {}
        elif not batch_size and not known:
            known = {name: ("float32", [width]) for name in self._names}
        tensors = {name: self._whole(name, *what) for name, what in known.items()}
        device = self._batch["input_ids"].device
        return TensorDict(tensors, batch_size=[batch_size], device=device)  # pyright: ignore[reportArgumentType]

    def _whole(self, name: str, dtype: str, beyond: Sequence[int]) -> torch.Tensor:
        known: Any = getattr(torch, dtype)
        batch_size, device = self._batch.batch_size[0], self._batch["input_ids"].device
        whole = torch.zeros((batch_size, *beyond), dtype=known, device=device)
        parts = self._parts.get(name)
        if not parts:
            return whole
        # One copy for all micro-batches, so that the device is waited for once.
        joined = parts[0][1].new_zeros((batch_size, *beyond))
        for start, part in parts:
            place = joined[start : start + len(part)]
            (place if part.ndim == 1 else place[:, : part.shape[1]]).copy_(part)
        rows = torch.tensor(self._rows, dtype=torch.int64, device=device)
        whole[rows] = joined[: len(self._rows)].to(device)
        return whole


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
