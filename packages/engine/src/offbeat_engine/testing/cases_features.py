"""Cases of single features that need more than another way to run the same training.

Cases of experts that come with the batch: replayed as they are, or refused.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from offbeat_engine.batch import WeightKind
from offbeat_engine.config import Dtype, Feature, LoraConfig, LoraExport
from offbeat_engine.errors import BatchError
from offbeat_engine.testing import probes
from offbeat_engine.testing.cases_training import check_agreement, check_training, check_weights
from offbeat_engine.testing.compare import (
    check_gradients,
    check_number,
    check_tensors,
    check_tokens,
    relative_error,
)
from offbeat_engine.testing.models import FAMILIES, OPTIMIZER
from offbeat_engine.testing.reference import Setup, reference_run, with_drawn_experts
from offbeat_engine.testing.runner import BATCHES, KEPT, STEPS, Case

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from offbeat_engine.batch import TrainBatch
    from offbeat_engine.testing.compare import Named
    from offbeat_engine.testing.probes import Job, Record
    from offbeat_engine.testing.reference import Reference
    from offbeat_engine.testing.runner import Options, Runner
    from offbeat_engine.toolkit.world import World


LORA = LoraConfig(rank=4, alpha=8.0, export=LoraExport.ADAPTER)
_TARGETS = replace(LORA, targets=("q_proj", "down_proj"))
# Half a unit in the last of bfloat16's eight bits: what rounding the answer alone may cost.
_ROUNDING = 2.0**-8
# A step of this size is lost when added to a bfloat16 weight.
_SMALL_LR = 1e-6


def cases(options: Options) -> Iterator[Case]:
    """Yield the cases of this file."""
    yield from _routing_cases(options)
    first = options.families[0]
    yield Case(
        name="deterministic_bits",
        check=partial(_same_bits, family=first, num_ranks=options.fit(2)),
        features=frozenset({Feature.DETERMINISTIC}),
        num_ranks=options.fit(2),
    )
    low = frozenset({Feature.BFLOAT16})
    # Two precisions may send a token to different experts: mixtures are given theirs, see `_routing_cases`.
    for family in (name for name in options.families if FAMILIES[name].dense):
        for num_ranks in (1, 2):
            check = partial(_bfloat16, family=family, num_ranks=num_ranks)
            name = f"bfloat16_{family}_{num_ranks}"
            yield Case(name=name, check=check, features=low, num_ranks=num_ranks, deep=family != first)
    yield Case(name="bfloat16_masters", check=partial(_masters, family=first), features=low)
    adapters = frozenset({Feature.LORA})
    seen: set[bool] = set()  # dense families and mixtures
    for family in options.families:
        check, dense = (
            partial(_lora, family=family, config=LORA, num_ranks=options.fit(2)),
            FAMILIES[family].dense,
        )
        name, again = f"lora_{family}", dense in seen
        yield Case(name=name, check=check, features=adapters, num_ranks=options.fit(2), deep=again)
        seen.add(dense)
    for name, config in (("targets", _TARGETS), ("one_rank", LORA)):
        num_ranks = 1 if name == "one_rank" else options.fit(2)
        check = partial(_lora, family=first, config=config, num_ranks=num_ranks)
        yield Case(name=f"lora_{name}", check=check, features=adapters, num_ranks=num_ranks)


def _same_bits(runner: Runner, family: str, num_ranks: int) -> None:
    """Two runs of the same come to the same bits."""
    job = runner.job(family, deterministic=True)
    first: Record = runner.run(probes.train, num_ranks, job, BATCHES, KEPT)[0]
    again: Record = runner.run(probes.train, num_ranks, job, BATCHES, KEPT)[0]
    if first.losses != again.losses or first.norms != again.norms:
        raise AssertionError(
            f"two runs differ: losses {first.losses} and {again.losses}, norms {first.norms} and {again.norms}"
        )
    assert first.predictions is not None
    assert again.predictions is not None
    check_tokens("second run", again.predictions, first.predictions, BATCHES[0], 0.0)
    check_gradients("gradient of the second run", again.grads, first.grads or {}, 0.0)
    for step, weights in first.weights_after.items():
        check_tensors(
            f"weights of the second run after {step} steps", again.weights_after[step], weights, 0.0
        )


def _bfloat16(runner: Runner, family: str, num_ranks: int) -> None:
    """The engine strays from float32 hardly more than a plain bfloat16 model with float32 master weights does."""
    job = runner.job(family, dtype=Dtype.BFLOAT16)
    check_bfloat16(runner, runner.run(probes.train, num_ranks, job, BATCHES, KEPT)[0], job)


def check_bfloat16(runner: Runner, record: Record, job: Job) -> None:
    """Compare a run over `BATCHES` in bfloat16 with plain models in float32 and in bfloat16."""
    compare_bfloat16(runner, record, runner.reference(job), runner.reference(job, bfloat16=True))


def compare_bfloat16(runner: Runner, record: Record, exact: Reference, plain: Reference) -> None:
    """Compare `record` with `exact`, where it may be as far from that as `plain` (a bfloat16 model) is, and no further."""
    limit = partial(_limit, factor=runner.tolerances.bfloat16)
    assert record.predictions is not None
    for name in ("logprobs", "entropy"):
        error = float((plain.predictions[name] - exact.predictions[name]).abs().max())
        one = exact.predictions.select(name)
        check_tokens("bfloat16 against float32", record.predictions, one, BATCHES[0], limit(error))
        if float((record.predictions[name] - exact.predictions[name]).abs().max()) < 0.05 * error:
            raise AssertionError(f"`{name}` is as exact as float32; the engine does not compute in bfloat16")
    for step in range(STEPS):
        error = abs(plain.losses[step] - exact.losses[step]) / abs(exact.losses[step])
        check_number(
            f"bfloat16 loss of step {step + 1}", record.losses[step], exact.losses[step], limit(error)
        )
    if record.grads is not None:
        _check_no_worse("bfloat16 gradient", record.grads, exact.first_grads, plain.first_grads, limit)
    for step in (1, STEPS):
        weights = record.weights_after[step]
        wrong = {name: tensor.dtype for name, tensor in weights.items() if tensor.dtype != torch.bfloat16}
        if wrong:
            raise AssertionError(f"`named_weights` should yield the compute dtype bfloat16, got {wrong}")
        rounded = {name: tensor.bfloat16() for name, tensor in plain.weights_after[step].items()}
        _check_no_worse(
            f"bfloat16 weights after {step} steps", weights, exact.weights_after[step], rounded, limit
        )


def _limit(plain_error: float, factor: float) -> float:
    return factor * plain_error + _ROUNDING


def _check_no_worse(
    what: str, got: Named, exact: Named, plain: Named, limit: Callable[[float], float]
) -> None:
    for name, tensor in exact.items():
        allowed = limit(relative_error(plain[name], tensor))
        check_tensors(what, {name: got[name].float()} if name in got else {}, {name: tensor}, allowed)


def _masters(runner: Runner, family: str) -> None:
    """A step too small for bfloat16 weights is kept in the float32 ones, which a checkpoint holds."""
    small = replace(OPTIMIZER, lr=_SMALL_LR)
    job = runner.job(family, dtype=Dtype.BFLOAT16, optimizer=small)
    exact = runner.job(family, optimizer=small)
    folder = runner.folder()
    runner.run(probes.save, 1, job, BATCHES[:1], folder)
    _, loaded, _ = runner.run(probes.resume, 1, exact, [], BATCHES[:1], folder)[0]
    reference = runner.reference(exact)
    start, after = reference.weights_after[0], reference.weights_after[1]
    moved = {name: after[name] - start[name] for name in after}
    check_tensors("master weights after one small bfloat16 step", loaded, after, 0.5, moved)


def _lora(runner: Runner, family: str, config: LoraConfig, num_ranks: int) -> None:
    """Adapters train as the plain formula says, the base stays, and both exports say so."""
    job = runner.job(family, lora=config)
    records: list[Record] = runner.run(probes.train, num_ranks, job, BATCHES, KEPT)
    adapter = records[0].weights_after[0]
    check_training(runner, records[0], runner.reference(job, adapter=adapter))
    check_agreement(records)
    _check_kind(runner, job, WeightKind.ADAPTER)
    merged_job = runner.job(family, lora=replace(config, export=LoraExport.MERGED))
    record: Record = runner.run(probes.train, num_ranks, merged_job, BATCHES, KEPT)[0]
    _check_kind(runner, merged_job, WeightKind.FULL)
    # The same seed draws the same adapter, whatever is exported.
    _check_merged(runner, record, runner.reference(merged_job, adapter=adapter))


def _check_kind(runner: Runner, job: probes.Job, kind: WeightKind) -> None:
    manifest, _ = runner.run(probes.describe, 1, job)[0]
    wrong = {spec.name: spec.kind for spec in manifest if spec.kind is not kind}
    if wrong:
        raise AssertionError(f"the manifest should say {kind!r} of every weight, got {wrong}")


def _check_merged(runner: Runner, record: Record, reference: Reference) -> None:
    for step, (got, expected) in enumerate(zip(record.losses, reference.losses, strict=True), start=1):
        check_number(f"loss of step {step}, merged export", got, expected, runner.tolerances.later_loss)
    check_weights(runner, record.weights_after, reference)


def _routing_cases(options: Options) -> Iterator[Case]:
    """Yield a case for each mixture; an engine that does not declare the feature must refuse the key."""
    mixtures = [name for name in options.families if not FAMILIES[name].dense]
    num_ranks = options.fit(2)
    for family in mixtures:
        yield Case(
            name=f"routed_experts_{family}",
            check=partial(_replayed, family=family, num_ranks=num_ranks),
            features=frozenset({Feature.ROUTED_EXPERTS}),
            num_ranks=num_ranks,
            deep=family != mixtures[0],
        )
        yield Case(
            name=f"routed_experts_bfloat16_{family}",
            check=partial(_replayed_bfloat16, family=family, num_ranks=num_ranks),
            features=frozenset({Feature.ROUTED_EXPERTS, Feature.BFLOAT16}),
            num_ranks=num_ranks,
            deep=family != mixtures[0],
        )
    check = partial(_refused, family=options.families[0], num_ranks=num_ranks)
    yield Case(name="routed_experts_refused", check=check, num_ranks=num_ranks)


def _replayed(runner: Runner, family: str, num_ranks: int) -> None:
    check_replay(runner, runner.job(family), num_ranks)


def check_replay(runner: Runner, job: Job, num_ranks: int) -> None:
    """Train a mixture on experts that were drawn, beside a plain model whose routers are made to take the same.

    Raises:
        AssertionError: predictions, gradients or weights differ, or are those of the routers' own choice.
    """
    batches = _drawn(job)
    setup = Setup(path=job.config.model.path, optimizer=job.config.optimizer)
    expected = reference_run(setup, batches, job.loss_fn, KEPT)
    records = runner.run(probes.train, num_ranks, job, batches, KEPT)
    check_training(runner, records[0], expected)
    check_agreement(records)
    given: torch.Tensor = expected.predictions["logprobs"]
    own: torch.Tensor = runner.reference(job).predictions["logprobs"]
    apart = float((given - own).abs().max())
    assert apart > 100 * runner.tolerances.logprob, (
        "the drawn experts answer as the chosen ones do; draw others"
    )


def _drawn(job: Job, *, for_all: bool = False) -> list[TrainBatch]:
    config = json.loads((Path(job.config.model.path) / "config.json").read_text())
    shape = {
        "num_layers": config["num_hidden_layers"],
        "num_experts": config.get("num_experts", config.get("num_local_experts")),
        "top_k": config["num_experts_per_tok"],
    }
    return [with_drawn_experts(batch, **shape, for_all=for_all) for batch in BATCHES]


def _replayed_bfloat16(runner: Runner, family: str, num_ranks: int) -> None:
    """With the same experts, a mixture strays from float32 hardly more in bfloat16 than a plain model of it does."""
    job = runner.job(family, dtype=Dtype.BFLOAT16)
    batches = _drawn(job, for_all=True)  # rounding decides between near ties of a router's own choice
    setup = Setup(path=job.config.model.path, optimizer=job.config.optimizer)
    exact, plain = (
        reference_run(replace(setup, bfloat16=low), batches, job.loss_fn, KEPT) for low in (False, True)
    )
    compare_bfloat16(runner, runner.run(probes.train, num_ranks, job, batches, KEPT)[0], exact, plain)


def _refused(runner: Runner, family: str, num_ranks: int) -> None:
    """What an engine cannot replay, or a dense model has no use for, is refused on all ranks, and not left aside."""
    if Feature.ROUTED_EXPERTS in runner.features and not FAMILIES[family].dense:
        return
    batch = with_drawn_experts(BATCHES[0], 2, 4, 2)
    for said in runner.run(_what_it_says, num_ranks, runner.job(family), batch):
        if "routed_experts" not in said:
            raise AssertionError(f"a batch with `routed_experts` should be refused by name, got {said!r}")


def _what_it_says(world: World, job: Job, batch: TrainBatch) -> str:
    with probes.running(world, job) as engine, engine.eval_mode():
        try:
            engine.forward_backward_step(engine.shard_data(batch), forward_only=True)
        except BatchError as error:
            return str(error)
    return ""
