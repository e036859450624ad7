"""One call of `forward_backward_step`, but for the model: counts, hooks, losses, agreement, order, statistics.

An engine runs the model over micro-batch after micro-batch, in whatever order its schedule likes:

    run = MicroBatches(request, batch, ctx, plan)        # all ranks: checked, planned, preprocessed, counted
    for number in range(run.num_micro):
        predictions, anchor = ...                      # the model on run.rows(number), or on a dummy where that is None
        loss = run.loss(number, predictions, anchor)   # on ranks that have outputs; never raises
        if run.failed():                               # all ranks, wherever all stand at the same place
            ...
        loss.backward()
    answers = run.finish()                             # all ranks: reduced, or raised on all of them
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, cast

import torch
from tensordict import TensorDict

from offbeat_engine.batch import (
    LossScale,
    StepStats,
    check_batch,
    check_replay,
    check_tokens,
    check_top_tokens,
    fingerprint,
    select_rows,
    units_of,
)
from offbeat_engine.errors import BatchError, StepError
from offbeat_engine.toolkit.collectives import first_failure, gather, gather_ints
from offbeat_engine.toolkit.step.planning import check_whole
from offbeat_engine.toolkit.step.throughput import Meter
from offbeat_engine.toolkit.step.totals import Answers, Totals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from offbeat_engine.batch import LossFn, PostprocessFn, Predictions, PreprocessFn, StepContext, TrainBatch
    from offbeat_engine.toolkit.step.throughput import ModelCost
    from offbeat_engine.toolkit.step.totals import Described, Read
    from offbeat_engine.toolkit.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """What the caller asked of one call, and this rank's part in it.

    `device` is where the model computes, `names` what it predicts. `loss_fn` is None when there is only a forward pass.
    Ranks of one `data_rank` (0 to `data_size` - 1) hold the same sequences; one rank of each such group `leads` it. `predict`
    false: the predictions are not kept. `replays_experts`: the engine takes a batch's `routed_experts`; else such a batch is refused.
    `names_top_tokens` says the same of `top_ids` and `StepContext.top_k`.
    `vocab_size`: where it is given, a batch with other tokens is refused. `cost` and `peak_flops` (of one rank) give the MFU where both are known.
    """

    world: World
    device: torch.device
    names: tuple[str, ...]
    data_rank: int
    data_size: int
    leads: bool = True
    loss_fn: LossFn | None = None
    preprocess_fn: PreprocessFn | None = None
    postprocess_fn: PostprocessFn | None = None
    predict: bool = True
    replays_experts: bool = False
    names_top_tokens: bool = False
    vocab_size: int | None = None
    cost: ModelCost | None = None
    peak_flops: float | None = None


class _Said(TypedDict):
    """What a rank tells the others at the end."""

    failed: bool
    leads: bool
    totals: Read
    engine: dict[str, float]
    answers: Described
    elapsed_s: float
    peak_bytes: int


class MicroBatches:
    """The micro-batches of one call on this rank; see the page above. Constructor and `finish` are collectives."""

    def __init__(
        self,
        request: StepRequest,
        batch: TrainBatch,
        ctx: StepContext,
        plan: Callable[[TrainBatch], list[list[int]]],
    ) -> None:
        """Check `batch`, cut it by `plan`, run `preprocess_fn`, and count over all ranks.

        `ctx.scale` is filled if it is open, with counts of what `preprocess_fn` left under the mask.

        Raises:
            BatchError: on some rank the batch breaks the schema, or ranks of a group hold different sequences.
            StepError: `preprocess_fn` raised on some rank.
        """
        self._request, self._ctx = request, ctx
        self._meter = Meter(request.device)
        self._error: Exception | None = None
        self._micros: list[TrainBatch] = []
        self._plan: list[list[int]] = []
        self._totals = Totals(request.device)
        self._answers = Answers(batch, request.names if request.predict else ())
        self._moved: dict[int, TrainBatch] = {}
        counts = [0] * 6
        try:
            check_batch(batch)
            check_replay(batch, request.replays_experts)
            check_top_tokens(batch, ctx.top_k, request.names_top_tokens)
            check_tokens(batch, request.vocab_size)
            self._plan = plan(batch)
            check_whole(units_of(batch), self._plan)
            self._micros = [self._preprocessed(batch, rows) for rows in self._plan]
            counts = self._mine(batch)
        except Exception as error:  # noqa: BLE001 a hook's failure becomes every rank's
            self._error = error
        self.num_micro, self._num_tokens, self._num_pairs, self._num_loss_tokens = self._count(counts)

    def rows(self, number: int) -> TrainBatch | None:
        """Return micro-batch `number`, on the device of the batch; None where this rank has fewer."""
        return self._micros[number] if number < len(self._micros) else None

    def on_device(self, number: int) -> TrainBatch | None:
        """Return micro-batch `number` where the model computes; ask for it before the forward pass.

        A copy between forward and backward would let the device wait for the host.
        """
        micro = self.rows(number)
        if micro is None or micro["input_ids"].device == self._request.device:
            return micro
        if number not in self._moved:
            self._moved[number] = micro.to(self._request.device)
        return self._moved[number]

    def loss(
        self, number: int, predictions: Mapping[str, torch.Tensor], anchor: torch.Tensor
    ) -> torch.Tensor:
        """Return a scalar whose backward pass is the loss's, with this rank's share of the loss taken down.

        Nothing that a hook or a loss does wrong is raised here: other ranks may stand in collectives that this one must
        enter too, those of backward above all. It is remembered, the scalar has a gradient of zero like that of an empty
        micro-batch, and all ranks raise together at the next `failed` or at the end. For the same reason
        the loss's own backward pass is run here, as far as the predictions: what it raises is caught as well.

        Args:
            number: the micro-batch.
            predictions: [b, T] each, with their gradient, on the device.
            anchor: any outcome of this forward pass: backward runs through it where there is nothing to train.
        """
        zero = anchor.sum() * 0.0
        micro = self.on_device(number)
        if micro is None or self._error is not None:
            return zero
        try:
            return zero + self._scored(number, predictions, micro)
        except Exception as error:  # noqa: BLE001 a loss's or hook's failure becomes every rank's
            self._error = error
            return zero
        finally:
            self._moved.pop(number, None)

    def take(self, number: int, predictions: Mapping[str, torch.Tensor]) -> None:
        """Take down the predictions of a pass without a loss; failures as in `loss`."""
        micro = self.on_device(number)
        if micro is None or self._error is not None:
            return
        try:
            self._answered(number, dict(predictions), micro)
        except Exception as error:  # noqa: BLE001 as above
            self._error = error
        finally:
            self._moved.pop(number, None)

    def failed(self) -> bool:
        """Return whether a loss or hook has raised on any rank so far. A collective, of the hosts alone.

        Where all ranks stand at the same place between two passes, it ends a step that has failed early.
        """
        if self._request.loss_fn is None and self._request.postprocess_fn is None:
            return False  # nothing of the caller's has run since the last time
        return any(failed for (failed,) in gather_ints(self._request.world, int(self._error is not None)))

    def raise_failure(self) -> None:
        """Raise what the lowest failed rank raised, on all ranks, if any has failed. A collective."""
        message = first_failure(self._request.world, self._error)
        if message is None:
            return
        is_bad_batch = message.split(": ")[message.startswith("rank ")] == BatchError.__name__
        if is_bad_batch:
            raise BatchError(message.replace("BatchError: ", "", 1)) from self._error
        raise StepError(f"{message} (all ranks agree)") from self._error

    def finish(self, engine: Mapping[str, float] | None = None) -> Predictions:
        """Reduce over ranks, fill `ctx.stats`, and return the predictions in the order and on the device of the batch.

        Args:
            engine: statistics of the engine's own, of this rank; they are added up over the groups of ranks.

        Raises:
            BatchError: as `StepError`, for an answer of a hook that breaks the schema.
            StepError: a loss or hook raised on some rank.
        """
        request = self._request
        mine = _Said(
            failed=self._error is not None,
            leads=request.leads,
            totals=self._totals.read(),  # the one time that the host waits for the device
            engine=dict(engine or {}),
            answers=self._answers.described(),
            elapsed_s=self._meter.elapsed_s(),
            peak_bytes=self._meter.peak_bytes(),
        )
        said = gather(request.world, mine)
        if any(one["failed"] for one in said):
            self.raise_failure()
        # In rank order, so that every rank adds the same numbers in the same order.
        leaders = [one for one in said if one["leads"]]
        loss, sums, maxes = Totals.combined([one["totals"] for one in leaders])
        elapsed_s = max(one["elapsed_s"] for one in said)
        self._ctx.stats = StepStats(
            loss=loss,
            sums=sums,
            maxes=maxes,
            num_tokens=self._num_tokens,
            num_loss_tokens=self._num_loss_tokens,
            num_micro_batches=self.num_micro,
            elapsed_s=elapsed_s,
            mfu=self._mfu(elapsed_s),
            peak_memory_bytes=max(one["peak_bytes"] for one in said),
            engine=Totals.added([one["engine"] for one in leaders]),
        )
        return self._answers.joined([one["answers"] for one in said])

    def _preprocessed(self, batch: TrainBatch, rows: list[int]) -> TrainBatch:
        micro = select_rows(batch, rows)
        if self._request.preprocess_fn is None:
            return micro
        width = micro["input_ids"].shape[1]
        micro = self._request.preprocess_fn(micro, self._ctx)
        check_batch(micro)
        if tuple(micro["input_ids"].shape) != (len(rows), width):
            raise BatchError(
                f"`preprocess_fn` must return the rows and tokens it was given, [{len(rows)}, {width}], got "
                f"{list(micro['input_ids'].shape)}; take tokens out by `loss_mask`"
            )
        return micro

    def _mine(self, batch: TrainBatch) -> list[int]:
        lengths = [micro["lengths"] for micro in self._micros]
        masks = [micro["loss_mask"] for micro in self._micros]
        return [
            sum(len(part) for part in lengths),
            len(set(units_of(batch) or range(len(batch["lengths"])))),
            sum(int(part.sum()) for part in lengths),
            sum(int(part.square().sum()) for part in lengths),
            sum(int(part.sum()) for part in masks),
            fingerprint(batch) if self._request.data_size < self._request.world.size else 0,
        ]

    def _count(self, mine: list[int]) -> tuple[int, int, int, int]:
        """Fill `ctx.scale`; return micro-batches per rank, then tokens, their pairs and loss tokens over all ranks."""
        request = self._request
        told = gather_ints(
            request.world, int(self._error is not None), request.data_rank, len(self._plan), *mine
        )
        if any(failed for failed, *_ in told):
            self.raise_failure()
        first: dict[int, int] = {}  # rank of each group that comes first: what a group holds counts once
        for rank, (_, group, *counts) in enumerate(told):
            other = first.setdefault(group, rank)
            if counts != list(told[other][2:]):
                raise BatchError(
                    f"ranks {other} and {rank} share the tokens of their sequences, but were given different batches; "
                    "give each rank what `shard_data` returns there"
                )
        columns = zip(*(told[rank][3:] for rank in first.values()), strict=True)
        num_sequences, num_units, num_tokens, num_pairs, num_loss_tokens, _ = map(sum, columns)
        if self._ctx.scale is None:
            # At least 1: with nothing under any mask there is nothing to divide either.
            self._ctx.scale = LossScale(
                num_tokens=max(1, num_loss_tokens),
                num_sequences=max(1, num_sequences),
                num_units=max(1, num_units),
            )
        return max(counts[2] for counts in told), num_tokens, num_pairs, num_loss_tokens

    def _scored(
        self, number: int, predictions: Mapping[str, torch.Tensor], micro: TrainBatch
    ) -> torch.Tensor:
        """Return the sum of each prediction times the loss's gradient by it: backward through that is the loss's."""
        assert self._request.loss_fn is not None
        assert self._ctx.scale is not None
        leaves = {
            name: value.detach().requires_grad_(value.requires_grad) for name, value in predictions.items()
        }
        answers = self._answered(number, dict(leaves), micro)
        output = self._totals.add(self._request.loss_fn(answers, micro, self._ctx.scale))
        scalar = torch.zeros((), device=self._request.device)
        trained = [name for name, leaf in leaves.items() if leaf.requires_grad]
        if not trained or not output.loss.requires_grad:
            return scalar  # a loss that depends on nothing
        grads = cast(
            "tuple[torch.Tensor | None, ...]",
            torch.autograd.grad(output.loss, [leaves[name] for name in trained], allow_unused=True),
        )
        for name, grad in zip(trained, grads, strict=True):
            if grad is not None:
                scalar = scalar + (predictions[name] * grad).sum()
        return scalar

    def _answered(self, number: int, values: dict[str, torch.Tensor], micro: TrainBatch) -> Predictions:
        """Return what the loss gets: the predictions after the hook; kept if they are asked for."""
        answers = TensorDict(values, batch_size=micro.batch_size)  # pyright: ignore[reportArgumentType]
        if self._request.postprocess_fn is not None:
            answers = self._request.postprocess_fn(answers, micro, self._ctx)
            self._answers.check(answers, micro)
        if self._request.predict:
            self._answers.add(self._plan[number], answers)
        return answers

    def _mfu(self, elapsed_s: float) -> float | None:
        request = self._request
        if request.cost is None or request.peak_flops is None:
            return None
        flops = request.cost.flops(self._num_tokens, self._num_pairs, backward=request.loss_fn is not None)
        return flops / (elapsed_s * request.peak_flops * request.world.size)
