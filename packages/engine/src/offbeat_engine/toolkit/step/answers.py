"""Predictions of micro-batches, put back into the order, the shape and onto the device of the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase

from offbeat_engine.errors import BatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat_engine.batch import TrainBatch
    from offbeat_engine.values import Predictions

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
