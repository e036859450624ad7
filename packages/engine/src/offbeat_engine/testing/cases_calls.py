"""Cases about calls: what is left out, what hooks add, what goes wrong on one rank, and weights for some ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from offbeat_engine.capabilities import Feature
from offbeat_engine.testing import call_probes, probes
from offbeat_engine.testing.compare import check_gradients, check_number, check_tensors
from offbeat_engine.testing.losses import UnitLoss
from offbeat_engine.testing.reference import Setup, reference_run
from offbeat_engine.testing.runner import BATCHES, Case

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat_engine.testing.runner import Options, Runner


def cases(options: Options) -> Iterator[Case]:
    """Yield the cases of this file."""
    first = options.families[0]
    checks = {
        "unasked": _unasked,
        "added_keys": _added_keys,
        "narrowed": _narrowed,
        "failing": _failing,
        "empty": _empty,
        "units": _units,
        "weights_on": _weights_on,
    }
    for name, check in checks.items():
        for num_ranks in (1, 2):
            yield Case(
                name=f"calls_{name}_{num_ranks}",
                check=partial(check, family=first, num_ranks=num_ranks),
                num_ranks=num_ranks,
            )
    yield Case(
        name="calls_gradients",
        check=partial(_gradients, family=first),
        features=frozenset({Feature.NAMED_GRADIENTS}),
    )


def _unasked(runner: Runner, family: str, num_ranks: int) -> None:
    """A training call without predictions has none, and the same loss."""
    job = runner.job(family)
    for loss, keys, same in runner.run(call_probes.unasked, num_ranks, job, BATCHES[0]):
        if keys or loss != same:
            raise AssertionError(
                f"with `predict=False` a call should return no predictions and the same loss, {same}; got {keys}, {loss}"
            )


def _added_keys(runner: Runner, family: str, num_ranks: int) -> None:
    """A key that `postprocess_fn` adds is there on all ranks, also on those without a sequence."""
    one = BATCHES[0][:1]
    for rank, (whole, device) in enumerate(
        runner.run(call_probes.added_keys, num_ranks, runner.job(family), one)
    ):
        expected = one["input_ids"] * (
            torch.arange(one["input_ids"].shape[1])[None] < one["lengths"][:, None]
        )
        if not torch.equal(whole["conformance/tokens"], expected):
            raise AssertionError(f"rank {rank} lost what `postprocess_fn` added, or its order")
        if device != "cpu":
            raise AssertionError(
                f"predictions come back on the device of the batch, cpu; rank {rank} got {device}"
            )


def _narrowed(runner: Runner, family: str, num_ranks: int) -> None:
    """The scale counts what `preprocess_fn` leaves under the mask."""
    expected = int(call_probes.last_only(BATCHES[0])["loss_mask"].sum())
    for counted in runner.run(call_probes.narrowed, num_ranks, runner.job(family), BATCHES[0]):
        if counted != (expected, expected):
            raise AssertionError(
                f"`scale` and `num_loss_tokens` should count the {expected} tokens that `preprocess_fn` left, got {counted}"
            )


def _failing(runner: Runner, family: str, num_ranks: int) -> None:
    """What a loss or hook raises on the last rank is raised on all, and the next step is good."""
    job, last = runner.job(family), num_ranks - 1
    for rank, (errors, loss, fresh) in enumerate(runner.run(call_probes.failing, num_ranks, job, BATCHES[0])):
        for where, said in errors.items():
            if call_probes.COMPLAINT not in said:
                raise AssertionError(
                    f"`{where}` raised {call_probes.COMPLAINT!r} on rank {last}; rank {rank} should raise `StepError` with "
                    f"these words, got {said or 'nothing'}"
                )
        if loss != fresh:
            raise AssertionError(
                f"after a failed step the loss of a good one is {loss} on rank {rank}, not {fresh}"
            )


def _empty(runner: Runner, family: str, num_ranks: int) -> None:
    """A mini-batch without sequences on any rank is a step that changes nothing."""
    for norm, before, after in runner.run(call_probes.empty, num_ranks, runner.job(family), BATCHES[0]):
        if norm != 0.0:
            raise AssertionError(f"`optimizer_step` after an empty mini-batch should return 0.0, got {norm}")
        check_tensors("weights after an empty mini-batch", after, before, 0.0)


def _units(runner: Runner, family: str, num_ranks: int) -> None:
    """Sequences of one unit are never parted, and the scale counts units."""
    batch = BATCHES[0].clone()
    batch["unit"] = torch.tensor([7, 3, 5, 7, 1, 3, 5, 2, 7])
    job = replace(runner.job(family), loss_fn=UnitLoss())
    reference = reference_run(
        Setup(path=job.config.model.path, optimizer=job.config.optimizer), [batch], UnitLoss()
    )
    for record in runner.run(probes.train, num_ranks, job, [batch]):
        check_number("loss over units", record.losses[0], reference.losses[0], runner.tolerances.loss)
        check_gradients(
            "gradient of a loss over units", record.grads, reference.first_grads, runner.tolerances.gradient
        )


def _weights_on(runner: Runner, family: str, num_ranks: int) -> None:
    """`named_weights_on` gives tensors to those ranks and None to the others."""
    last = num_ranks - 1
    answers = runner.run(call_probes.weights_on, num_ranks, runner.job(family), last)
    for rank, (everywhere, names, chosen) in enumerate(answers):
        if names != list(everywhere):
            raise AssertionError(f"`named_weights_on` yields other names on rank {rank}, or another order")
        check_tensors(f"weights on rank {rank}", chosen, everywhere if rank == last else {}, 0.0)


def _gradients(runner: Runner, family: str) -> None:
    """Gradients are those of the reference."""
    job = runner.job(family)
    _, _, grads, _ = runner.run(probes.share, 1, job, [BATCHES[0]])[0]
    if grads is None:
        raise AssertionError("gradients are declared and not handed out")
    check_tensors("gradient", grads, runner.reference(job).first_grads, runner.tolerances.gradient)
