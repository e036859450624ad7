"""Cases about what goes wrong: ranks with nothing to do, and numbers that are not finite."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from offbeat_engine.config import NonFinite
from offbeat_engine.testing import probes
from offbeat_engine.testing.compare import check_gradients, check_number, check_tensors, check_tokens
from offbeat_engine.testing.losses import POISON, PoisonedLoss
from offbeat_engine.testing.runner import BATCHES, Case

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat_engine.testing.probes import Fault
    from offbeat_engine.testing.runner import Options, Runner

Idle = Literal["empty", "masked"]


def cases(options: Options) -> Iterator[Case]:
    """Yield the cases of this file."""
    first = options.families[0]
    kinds: tuple[Idle, ...] = ("empty", "masked")
    for kind in kinds:
        yield Case(name=f"idle_rank_{kind}", check=partial(_idle, family=first, kind=kind), num_ranks=2)
    for num_ranks in (1, 2):
        for choice in NonFinite:
            for part in ("loss", "gradient"):
                yield Case(
                    name=f"nonfinite_{part}_{choice}_{num_ranks}",
                    check=partial(_nonfinite, family=first, choice=choice, part=part, num_ranks=num_ranks),
                    num_ranks=num_ranks,
                )


def _idle(runner: Runner, family: str, kind: Idle) -> None:
    """One rank holds everything, the other nothing, or nothing that is asked for: both keep step."""
    job = runner.job(family)
    batch = BATCHES[0]
    expected = runner.reference(job)
    if kind == "masked":
        # The last sequence of every batch has an empty mask: alone on its rank it is all there is.
        shares = [batch[:-1], batch[-1:]]
        assert not bool(shares[1]["loss_mask"].any())
    else:
        shares = [batch, batch[:0]]
    answers = runner.run(probes.share, 2, job, shares)
    limits = runner.tolerances
    for rank, (loss, predictions, grads, norm) in enumerate(answers):
        check_number(f"loss on rank {rank}", loss, expected.losses[0], limits.loss)
        check_gradients(f"gradient on rank {rank}", grads, expected.first_grads, limits.gradient)
        check_number(f"gradient norm on rank {rank}", norm, expected.grad_norms[0], limits.norm)
        if len(predictions["logprobs"]) != len(shares[rank]["lengths"]):
            raise AssertionError(
                f"rank {rank} gave {len(shares[rank]['lengths'])} sequences and got "
                f"{len(predictions['logprobs'])} rows of predictions"
            )
        if kind == "masked" and rank == 1 and bool(predictions["logprobs"].any()):
            raise AssertionError(
                "predictions outside `loss_mask` must be zero, also where nothing is asked for"
            )
    check_tokens(
        "busy rank",
        answers[0][1],
        expected.predictions[: len(shares[0]["lengths"])],
        shares[0],
        limits.logprob,
    )


def _nonfinite(runner: Runner, family: str, choice: NonFinite, part: str, num_ranks: int) -> None:
    """One rank meets a number that is not finite: all stop or all skip, no weight moves, and the next step is good."""
    job = runner.job(family, on_nonfinite=choice)
    poisoned = probes.Job(
        engine=job.engine, config=job.config, loss_fn=PoisonedLoss(job.loss_fn, part == "gradient")
    )
    batch = BATCHES[0].clone()
    batch["input_ids"] = torch.where(batch["input_ids"] == POISON, POISON - 1, batch["input_ids"])
    halves = list(torch.arange(batch.batch_size[0]).chunk(num_ranks))
    good = [batch[rows] for rows in halves]
    bad = [share.clone() for share in good]
    bad[-1]["input_ids"][0, 0] = POISON
    faults: list[Fault] = runner.run(probes.meet_fault, num_ranks, poisoned, bad, good)
    for rank, fault in enumerate(faults):
        if choice is NonFinite.STOP and not fault.raised:
            raise AssertionError(
                f"rank {rank} should raise NonFiniteError, but stepped with norm {fault.norm}"
            )
        if choice is NonFinite.SKIP and (fault.raised or fault.norm is None or not math.isnan(fault.norm)):
            raise AssertionError(
                f"rank {rank} should skip the step and return a norm of NaN, got {fault.raised or fault.norm}"
            )
        check_tensors(f"weights of rank {rank} after the fault", fault.after, fault.before, 0.0)
        if fault.next_loss != faults[0].next_loss or not math.isfinite(fault.next_norm):
            raise AssertionError(
                f"the good step after the fault gave loss {fault.next_loss} and norm {fault.next_norm} on rank "
                f"{rank}, loss {faults[0].next_loss} on rank 0; gradients of the fault must not linger"
            )
