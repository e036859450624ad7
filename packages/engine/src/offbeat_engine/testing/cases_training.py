"""Cases that train five steps and compare with the plain reference: every family, every way to compute the same.

Cases of models that are only asked: a reference of its own, and the base under the adapters of a policy.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from offbeat_engine.config import Dtype, Feature, LoraConfig
from offbeat_engine.testing import probes
from offbeat_engine.testing.compare import (
    Named,
    check_gradients,
    check_names,
    check_number,
    check_tensors,
    check_tokens,
)
from offbeat_engine.testing.models import VARIANTS, Variant
from offbeat_engine.testing.runner import BATCHES, KEPT, STEPS, Case

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat_engine.interface import Predictions
    from offbeat_engine.testing.probes import Job, Record
    from offbeat_engine.testing.reference import Reference
    from offbeat_engine.testing.runner import Options, Runner


def cases(options: Options) -> Iterator[Case]:
    """Yield a case for each family and variant, and those of order and accumulation.

    Not deep are all variants of the first family and, of each other, the first and every so manieth, another each time.
    """
    yield from _inference_cases(options)
    for index, family in enumerate(options.families):
        for number, variant in enumerate((*VARIANTS, *options.extra_variants)):
            deep = index > 0 and number > 0 and number % len(options.families) != index
            if deep and family not in options.crossed:
                continue
            if variant.families is None or family in variant.families:
                num_ranks = variant.num_ranks if variant.exact else options.fit(variant.num_ranks)
                yield Case(
                    name=f"training_{family}_{variant.name}",
                    check=partial(_training, family=family, variant=variant, num_ranks=num_ranks),
                    features=variant.features,
                    num_ranks=num_ranks,
                    slow=variant.slow,
                    deep=deep,
                )
    first = options.families[0]
    for num_ranks in (1, 2):
        where = {"family": first, "num_ranks": num_ranks}
        ranks = "one_rank" if num_ranks == 1 else "two_ranks"
        yield Case(name=f"order_{ranks}", check=partial(_order, **where), num_ranks=num_ranks)
        yield Case(name=f"accumulation_{ranks}", check=partial(_accumulation, **where), num_ranks=num_ranks)
        yield Case(name=f"scoring_{ranks}", check=partial(_scoring, **where), num_ranks=num_ranks)


def check_agreement(records: list[Record]) -> None:
    """Raise `AssertionError` unless all ranks report the same numbers, predictions and weights, to the bit."""
    first = records[0]
    for rank, other in enumerate(records[1:], start=1):
        for name in ("losses", "norms", "rates", "stats"):
            if getattr(first, name) != getattr(other, name):
                raise AssertionError(
                    f"ranks disagree on `{name}`: rank 0 has {getattr(first, name)}, rank {rank} {getattr(other, name)}"
                )
        for step, weights in first.weights_after.items():
            check_tensors(
                f"weights of rank {rank} after {step} steps, against rank 0's",
                other.weights_after[step],
                weights,
                0.0,
            )


def check_training(runner: Runner, record: Record, reference: Reference) -> None:
    """Compare a run over `BATCHES` with the reference: tokens, loss, gradients, norm, rate, weights, counts."""
    limits = runner.tolerances
    assert record.predictions is not None
    check_tokens("first step", record.predictions, reference.predictions, BATCHES[0], limits.logprob)
    check_number("loss of step 1", record.losses[0], reference.losses[0], limits.loss)
    check_gradients("gradient of step 1", record.grads, reference.first_grads, limits.gradient)
    check_number("gradient norm of step 1", record.norms[0], reference.grad_norms[0], limits.norm)
    for step, (rate, expected) in enumerate(zip(record.rates, reference.rates[1:], strict=False), start=1):
        check_number(f"learning rate after step {step}", rate, expected, 1e-6)
    check_weights(runner, record.weights_after, reference)
    for step in range(1, STEPS):
        check_number(
            f"loss of step {step + 1}", record.losses[step], reference.losses[step], limits.later_loss
        )
    for step, (stats, batch) in enumerate(zip(record.stats, BATCHES, strict=True), start=1):
        seen = (stats.num_tokens, stats.num_loss_tokens)
        expected_counts = (int(batch["lengths"].sum()), int(batch["loss_mask"].sum()))
        if seen != expected_counts:
            raise AssertionError(
                f"tokens and loss tokens of step {step}: expected {expected_counts}, got {seen}"
            )


def check_weights(runner: Runner, weights_after: dict[int, Named], reference: Reference) -> None:
    """Compare weights after so many steps; errors are relative to how far each tensor moved."""
    start = reference.weights_after[0]
    for step, weights in weights_after.items():
        expected = reference.weights_after[step]
        if step == 0:
            check_tensors("weights at the start", weights, expected, 0.0)
            continue
        check_names(f"weights after {step} steps", weights, expected)
        moved = {name: expected[name] - start[name] for name in expected}
        still = {name: tensor for name, tensor in expected.items() if not bool(moved[name].any())}
        check_tensors(
            f"untrained weights after {step} steps", {name: weights[name] for name in still}, still, 0.0
        )
        check_tensors(f"weights after {step} steps", weights, expected, runner.tolerances.step_weight, moved)


def _training(runner: Runner, family: str, variant: Variant, num_ranks: int) -> None:
    job = runner.job(family, variant.head, **variant.changes)
    records = runner.run(probes.train, num_ranks, job, BATCHES, KEPT)
    check_training(runner, records[0], runner.reference(job))
    check_agreement(records)


def _order(runner: Runner, family: str, num_ranks: int) -> None:
    """The order of samples changes nothing but the order of the answers."""
    job = runner.job(family)
    order = torch.randperm(BATCHES[0].batch_size[0], generator=torch.Generator().manual_seed(5))
    back = order.argsort()
    record: Record = runner.run(probes.train, num_ranks, job, [batch[order] for batch in BATCHES], KEPT)[0]
    assert record.predictions is not None
    record.predictions = record.predictions[back]
    check_training(runner, record, runner.reference(job))


def _accumulation(runner: Runner, family: str, num_ranks: int) -> None:
    """Two calls of a fixed scale come to the same as one."""
    job = runner.job(family)
    record: Record = runner.run(probes.train, num_ranks, job, BATCHES, KEPT, 2)[0]
    reference = runner.reference(job)
    limits = runner.tolerances
    check_number("summed loss of two calls", record.losses[0], reference.losses[0], limits.loss)
    check_gradients(
        "gradient accumulated over two calls", record.grads, reference.first_grads, limits.gradient
    )
    check_weights(runner, record.weights_after, reference)


def _scoring(runner: Runner, family: str, num_ranks: int) -> None:
    """A forward-only call in `eval_mode` predicts what training predicts."""
    job: Job = runner.job(family)
    expected = runner.reference(job).predictions
    for predictions in runner.run(probes.score, num_ranks, job, BATCHES[0]):
        check_tokens("forward only", predictions, expected, BATCHES[0], runner.tolerances.logprob)


_LORA = LoraConfig(rank=4, alpha=8.0)


def _inference_cases(options: Options) -> Iterator[Case]:
    """Yield the cases without a loss."""
    alone = frozenset({Feature.INFERENCE_ONLY})
    first = options.families[0]
    for family in options.families:
        check = partial(_inference_only, family=family, dtype=Dtype.FLOAT32, num_ranks=options.fit(2))
        name, again = f"inference_only_{family}", family != first
        yield Case(name=name, check=check, features=alone, num_ranks=options.fit(2), deep=again)
    for num_ranks in (1, 2):
        check = partial(_inference_only, family=first, dtype=Dtype.BFLOAT16, num_ranks=num_ranks)
        both = alone | {Feature.BFLOAT16}
        yield Case(
            name=f"inference_only_bfloat16_{num_ranks}", check=check, features=both, num_ranks=num_ranks
        )
    for num_ranks in (1, 2):
        check = partial(_base, family=first, num_ranks=num_ranks)
        yield Case(
            name=f"lora_base_{num_ranks}",
            check=check,
            features=frozenset({Feature.LORA}),
            num_ranks=num_ranks,
        )


def _inference_only(runner: Runner, family: str, dtype: Dtype, num_ranks: int) -> None:
    """It answers as the engine that could be trained does, bit for bit, and does not let itself be trained."""
    alone = runner.job(family, dtype=dtype, inference_only=True)
    got: Predictions = runner.run(probes.score, num_ranks, alone, BATCHES[0])[0]
    expected: Predictions = runner.run(probes.score, num_ranks, runner.job(family, dtype=dtype), BATCHES[0])[
        0
    ]
    check_tokens("inference only", got, expected, BATCHES[0], 0.0)
    if not runner.run(probes.refuse_training, num_ranks, alone)[0]:
        raise AssertionError("`train_mode` of an engine that is `inference_only` should raise StateError")


def _base(runner: Runner, family: str, num_ranks: int) -> None:
    """Without its adapters a trained policy is the model it began with, and with them again what it was before."""
    batch, limit = BATCHES[0], runner.tolerances.logprob
    job = runner.job(family, lora=_LORA)
    trained, base, again = runner.run(probes.score_base, num_ranks, job, BATCHES, batch)[0]
    expected: Predictions = runner.run(probes.score, num_ranks, runner.job(family), batch)[0]
    check_tokens("the base of a policy with adapters", base, expected, batch, limit)
    check_tokens("the policy after its base was asked", again, trained, batch, 0.0)
    if float((trained["logprobs"] - base["logprobs"]).abs().max()) < 10 * limit:
        raise AssertionError("five steps should move the log-probs away from those of the base")
