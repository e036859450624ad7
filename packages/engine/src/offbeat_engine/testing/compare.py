"""Comparisons that say which token of which sequence, or which element of which tensor, is wrong.

Loss functions of the conformance suite: every token has its own weight, so that none can stand in for another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from offbeat_engine.batch import LossOutput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tensordict import TensorDict

    from offbeat_engine.batch import LossFn, LossScale, Predictions, TrainBatch


Named = dict[str, torch.Tensor]

# A tensor that holds less than this share of the norm of all tensors is measured against that share: its own
# digits are the rounding noise of the large ones.
_SHARE = 1e-3


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return |got - expected| / |expected| in L2; the absolute error where nothing is expected."""
    scale = float(expected.double().norm())
    error = float((got.double() - expected.double()).norm())
    return error / scale if scale else error


def check_number(what: str, got: float, expected: float, rtol: float) -> None:
    """Raise `AssertionError` unless `got` is within `rtol` of `expected`, relatively; NaN equals nothing."""
    error = abs(got - expected) / max(abs(expected), 1e-12)
    if not error <= rtol:
        raise AssertionError(
            f"{what}: expected {expected!r}, got {got!r} (relative error {error:.2g}, allowed {rtol:.2g})"
        )


def check_tokens(what: str, got: TensorDict, expected: TensorDict, batch: TrainBatch, atol: float) -> None:
    """Compare predictions token by token; outside `loss_mask` they must be exactly zero.

    Raises:
        AssertionError: naming the worst token of the first key that differs, with its place in `batch`.
    """
    for name in map(str, expected.keys()):
        if name not in got.keys():  # noqa: SIM118 a TensorDict iterates over its batch, not its keys
            there = ", ".join(sorted(map(str, got.keys())))
            raise AssertionError(f"{what}: `{name}` is not among the predictions, only {there}")
        got_BT, expected_BT = got[name].detach().cpu(), expected[name].detach()
        if got_BT.shape != expected_BT.shape:
            raise AssertionError(
                f"{what}: `{name}` should be {list(expected_BT.shape)}, got {list(got_BT.shape)}"
            )
        error_BT = (got_BT.double() - expected_BT.double()).abs().nan_to_num(nan=float("inf"))
        limit_BT = torch.where(batch["loss_mask"], atol, 0.0)
        wrong_BT = error_BT > limit_BT
        if bool(wrong_BT.any()):
            row, position = divmod(int((error_BT * wrong_BT).argmax()), error_BT.shape[1])
            masked = bool(batch["loss_mask"][row, position])
            raise AssertionError(
                f"{what}: `{name}` of sequence {row}, token {position} (id {int(batch['input_ids'][row, position])}, "
                f"length {int(batch['lengths'][row])}): expected {float(expected_BT[row, position]):.7g}, "
                f"got {float(got_BT[row, position]):.7g} "
                f"({'allowed difference ' + format(atol, '.2g') if masked else 'outside `loss_mask` it must be zero'}; "
                f"{int(wrong_BT.sum())} of {int(batch['loss_mask'].sum())} tokens differ)"
            )


def check_names(what: str, got: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Raise `AssertionError` naming what is missing or in excess."""
    missing = [name for name in expected if name not in got]
    excess = [name for name in got if name not in expected]
    if missing or excess:
        parts = [f"missing: {', '.join(missing)}"] if missing else []
        parts += [f"unexpected: {', '.join(excess)}"] if excess else []
        raise AssertionError(
            f"{what}: expected {len(expected)} names, got {len(got)}; {'; '.join(parts)}; "
            "names are those that `save_pretrained` writes, tied weights once"
        )


def check_tensors(what: str, got: Named, expected: Named, rtol: float, scales: Named | None = None) -> None:
    """Compare tensors by name: |got - expected| <= rtol |scale| in L2, for each tensor by itself.

    Args:
        what: what they are, for the message.
        got: by name.
        expected: by name.
        rtol: allowed relative error of each tensor; 0 asks for the same bits.
        scales: what the error is relative to (for weights, say, how far they moved); `expected` by default.

    Raises:
        AssertionError: naming the worst tensor and its worst element.
    """
    check_names(what, got, expected)
    scales = expected if scales is None else scales
    norms = {name: float(scale.double().norm()) for name, scale in scales.items()}
    floor = _SHARE * max(sum(norm**2 for norm in norms.values()) ** 0.5, 1e-30)
    errors: dict[str, float] = {}
    for name, tensor in expected.items():
        if got[name].shape != tensor.shape:
            raise AssertionError(
                f"{what}: `{name}` should be {list(tensor.shape)}, got {list(got[name].shape)}"
            )
        error = float((got[name].double().cpu() - tensor.double()).norm())
        errors[name] = float("inf") if error != error else error / max(norms[name], floor)
    wrong = {name: error for name, error in errors.items() if error > rtol}
    if wrong:
        worst = max(wrong, key=lambda name: wrong[name])
        raise AssertionError(
            f"{what}: `{worst}`{_worst_element(got[worst].cpu(), expected[worst])} "
            f"(relative error of the tensor {wrong[worst]:.2g}, allowed {rtol:.2g}; "
            f"{len(wrong)} of {len(expected)} tensors differ)"
        )


def _worst_element(got: torch.Tensor, expected: torch.Tensor) -> str:
    if expected.numel() == 0:
        return ""
    error = (got.double() - expected.double()).abs().nan_to_num(nan=float("inf"))
    place = torch.unravel_index(error.argmax(), expected.shape)
    at = [int(index) for index in place]
    return f" at {at}: expected {float(expected[place]):.7g}, got {float(got[place]):.7g}"


def check_gradients(what: str, got: Named | None, expected: Named, limit: float) -> None:
    """As `check_tensors`, where the engine hands gradients out (`Feature.NAMED_GRADIENTS`)."""
    if got is not None:
        check_tensors(what, got, expected, limit)


POISON = 63
"""The token whose presence makes `PoisonedLoss` misbehave."""


@dataclass(frozen=True, slots=True)
class WeightedLoss:
    """Negative log-likelihood weighted by `advantages`, a mean over sequences, and entropy, all with gradient."""

    entropy_gradient: bool = True

    def __call__(self, predictions: Predictions, batch: TrainBatch, scale: LossScale) -> LossOutput:
        """Return this micro-batch's share: both counts of `scale` are divided by."""
        mask_BT = batch["loss_mask"]
        nll_BT = -predictions["logprobs"] * mask_BT
        per_token = (batch["advantages"] * nll_BT).sum() + 0.1 * (predictions["entropy"] * mask_BT).sum()
        mean_B = nll_BT.sum(1) / mask_BT.sum(1).clamp(min=1)
        loss = per_token / scale.num_tokens + 0.1 * mean_B.sum() / scale.num_sequences
        largest = nll_BT.detach().max() if nll_BT.numel() else torch.zeros(())
        return LossOutput(loss=loss, sums={"nll": nll_BT.detach().sum()}, maxes={"nll": largest})


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Half the squared error of `values` against `returns`, averaged over tokens."""

    def __call__(self, predictions: Predictions, batch: TrainBatch, scale: LossScale) -> LossOutput:
        """Return this micro-batch's share."""
        error_BT = (predictions["values"] - batch["returns"]) * batch["loss_mask"]
        square = 0.5 * error_BT.square().sum()
        return LossOutput(loss=square / scale.num_tokens, sums={"square": square.detach()})


@dataclass(frozen=True, slots=True)
class UnitLoss:
    """Softplus of what the sequences of a unit come to together, a mean over units: of a part of one it is another number."""

    def __call__(self, predictions: Predictions, batch: TrainBatch, scale: LossScale) -> LossOutput:
        """Return this micro-batch's share."""
        _, place_B = batch["unit"].unique(return_inverse=True)
        sum_B = (batch["advantages"] * predictions["logprobs"] * batch["loss_mask"]).sum(1)
        sum_U = sum_B.new_zeros(int(place_B.max()) + 1).index_add(0, place_B, sum_B)
        return LossOutput(loss=torch.nn.functional.softplus(-0.1 * sum_U).sum() / scale.num_units)


@dataclass(frozen=True, slots=True)
class PoisonedLoss:
    """`inner`, but where the token `POISON` is seen the loss is NaN, or finite with a gradient of NaN."""

    inner: LossFn
    gradient_only: bool

    def __call__(self, predictions: Predictions, batch: TrainBatch, scale: LossScale) -> LossOutput:
        """Return the share of `inner`, poisoned where it has to be."""
        output = self.inner(predictions, batch, scale)
        if not bool((batch["input_ids"] == POISON).any()):
            return output
        # The square root of zero has an infinite slope, and infinity times zero is no number.
        poison = (output.loss * 0.0).sqrt() if self.gradient_only else output.loss * float("nan")
        return LossOutput(loss=output.loss + poison)

    @property
    def entropy_gradient(self) -> bool:
        """As `inner` has it."""
        return bool(getattr(self.inner, "entropy_gradient", False))
