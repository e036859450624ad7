"""Cases about calls: what is left out, what hooks add, what goes wrong on one rank, and weights for some ranks.

Cases about what goes wrong: ranks with nothing to do, and numbers that are not finite.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from offbeat_engine.batch import StepContext
from offbeat_engine.config import Feature, NonFinite, Schedule
from offbeat_engine.errors import StepError
from offbeat_engine.testing import probes
from offbeat_engine.testing.compare import (
    POISON,
    PoisonedLoss,
    UnitLoss,
    check_gradients,
    check_number,
    check_tensors,
    check_tokens,
)
from offbeat_engine.testing.probes import copy_of, running, weights_of
from offbeat_engine.testing.reference import Setup, reference_run
from offbeat_engine.testing.runner import BATCHES, Case

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from offbeat_engine.batch import LossOutput, LossScale, Predictions, TrainBatch
    from offbeat_engine.config import OptimizerConfig
    from offbeat_engine.interface import Engine
    from offbeat_engine.testing.compare import Named
    from offbeat_engine.testing.probes import Fault, Job
    from offbeat_engine.testing.runner import Options, Runner
    from offbeat_engine.toolkit.world import World


COMPLAINT = "planted by the conformance suite"


def unasked(world: World, job: Job, batch: TrainBatch) -> tuple[float, list[str], float]:
    """Return the loss and the keys of a training call without predictions, and the loss of one with them."""
    with running(world, job) as engine, engine.train_mode():
        share = engine.shard_data(batch)
        predictions, loss, _ = engine.forward_backward_step(share, predict=False)
        _, same, _ = engine.forward_backward_step(share)
        return loss, [str(key) for key in predictions.keys()], same  # noqa: SIM118 rows otherwise


def added_keys(world: World, job: Job, batch: TrainBatch) -> tuple[Predictions, str]:
    """Return what comes back, whole, of a call whose hook adds a key, and the device that it came back on."""

    def add(predictions: Predictions, micro: TrainBatch, ctx: StepContext) -> Predictions:
        return predictions.update({"conformance/tokens": micro["input_ids"]})

    with running(world, job) as engine:
        share = engine.shard_data(batch)
        with engine.eval_mode():
            predictions, _ = engine.forward_backward_step(share, forward_only=True, postprocess_fn=add)
        device = {str(predictions[key].device) for key in predictions.keys()} or {"cpu"}  # noqa: SIM118 rows otherwise
        return engine.unshard_data(predictions), "/".join(sorted(device))


def last_only(batch: TrainBatch, ctx: StepContext | None = None) -> TrainBatch:
    """Leave the last token of each sequence under the mask, if it was there."""
    position_T = torch.arange(batch["input_ids"].shape[1], device=batch["lengths"].device)
    last_BT = position_T[None] == batch["lengths"][:, None] - 1
    return batch.clone().update({"loss_mask": batch["loss_mask"] & last_BT})


def narrowed(world: World, job: Job, batch: TrainBatch) -> tuple[int, int]:
    """Return what the scale and the statistics count where a hook narrows the mask."""
    with running(world, job) as engine, engine.eval_mode():
        share = engine.shard_data(batch)
        _, ctx = engine.forward_backward_step(share, forward_only=True, preprocess_fn=last_only)
        assert ctx.scale is not None
        assert ctx.stats is not None
        return ctx.scale.num_tokens, ctx.stats.num_loss_tokens


def failing(world: World, job: Job, batch: TrainBatch) -> tuple[dict[str, str], float, float]:
    """Return what is raised where loss and hooks fail on the last rank, then the loss after it and of a new engine."""
    unwell = world.rank == world.size - 1

    def complain(batch: TrainBatch) -> None:
        if unwell and len(batch["lengths"]):
            raise LookupError(COMPLAINT)

    def before(batch: TrainBatch, ctx: StepContext) -> TrainBatch:
        complain(batch)
        return batch

    def after(predictions: Predictions, batch: TrainBatch, ctx: StepContext) -> Predictions:
        complain(batch)
        return predictions

    def loss_fn(predictions: Predictions, batch: TrainBatch, scale: LossScale) -> LossOutput:
        complain(batch)
        return job.loss_fn(predictions, batch, scale)

    errors: dict[str, str] = {}
    with running(world, job) as engine, engine.train_mode():
        share = engine.shard_data(batch)
        errors["preprocess_fn"] = _raised(lambda: engine.forward_backward_step(share, preprocess_fn=before))
        errors["postprocess_fn"] = _raised(lambda: engine.forward_backward_step(share, postprocess_fn=after))
        engine.set_loss_fn(loss_fn)
        errors["loss_fn"] = _raised(lambda: engine.forward_backward_step(share))
        engine.set_loss_fn(job.loss_fn)
        loss = _norm(engine, share)
    with running(world, replace(job)) as engine, engine.train_mode():
        return errors, loss, _norm(engine, share)


def _norm(engine: Engine, share: TrainBatch) -> float:
    """Return loss times gradient norm of one step: what an earlier failure would leave shows in one of them."""
    engine.optimizer_zero_grad()
    _, loss, _ = engine.forward_backward_step(share)
    return loss * engine.optimizer_step()


def _raised(call: Callable[[], object]) -> str:
    try:
        call()
    except StepError as error:
        return str(error)
    return ""


def empty(world: World, job: Job, batch: TrainBatch) -> tuple[float, Named, Named]:
    """Return the norm of a step without sequences after a real one, and the weights before and after it."""
    with running(world, job) as engine, engine.train_mode():
        _norm(engine, engine.shard_data(batch))
        before = weights_of(engine)
        engine.optimizer_zero_grad()
        engine.forward_backward_step(batch[:0])
        norm = engine.optimizer_step()
        return norm, before, weights_of(engine)


def weights_on(world: World, job: Job, chosen: int) -> tuple[Named, list[str], Named]:
    """Return the weights as every rank gets them, then names and tensors where only rank `chosen` does."""
    with running(world, job) as engine:
        everywhere = weights_of(engine)
        some = [
            (name, None if tensor is None else copy_of(tensor))
            for name, tensor in engine.named_weights_on({chosen})
        ]
        return (
            everywhere,
            [name for name, _ in some],
            {name: tensor for name, tensor in some if tensor is not None},
        )


def top_tokens(world: World, job: Job, batch: TrainBatch) -> Predictions:
    """Return what comes back, whole, of a call that asks for all tokens in order, and of one that names them as `again`."""
    with running(world, job) as engine, engine.eval_mode():
        share = engine.shard_data(batch)
        named, _ = engine.forward_backward_step(share, StepContext(top_k=1 << 20), forward_only=True)
        share["top_ids"] = named["top_ids"]
        again, _ = engine.forward_backward_step(share, forward_only=True)
        named["again"] = again["top_logprobs"]
        return engine.unshard_data(named)


def cases(options: Options) -> Iterator[Case]:
    """Yield the cases of this file."""
    yield from _fault_cases(options)
    first = options.families[0]
    checks = (_unasked, _added_keys, _narrowed, _failing, _empty, _units, _weights_on, _step_rates)
    special = {_take_weights: Feature.TAKE_WEIGHTS, _top_tokens: Feature.TOP_TOKENS}
    for check in (*checks, *special):
        for num_ranks in (1, 2):
            yield Case(
                name=f"calls{check.__name__}_{num_ranks}",
                check=partial(check, family=first, num_ranks=num_ranks),
                features=frozenset({special[check]} if check in special else ()),
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
    for loss, keys, same in runner.run(unasked, num_ranks, job, BATCHES[0]):
        if keys or loss != same:
            raise AssertionError(
                f"with `predict=False` a call should return no predictions and the same loss, {same}; got {keys}, {loss}"
            )


def _added_keys(runner: Runner, family: str, num_ranks: int) -> None:
    """A key that `postprocess_fn` adds is there on all ranks, also on those without a sequence."""
    one = BATCHES[0][:1]
    for rank, (whole, device) in enumerate(runner.run(added_keys, num_ranks, runner.job(family), one)):
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
    expected = int(last_only(BATCHES[0])["loss_mask"].sum())
    for counted in runner.run(narrowed, num_ranks, runner.job(family), BATCHES[0]):
        if counted != (expected, expected):
            raise AssertionError(
                f"`scale` and `num_loss_tokens` should count the {expected} tokens that `preprocess_fn` left, got {counted}"
            )


def _failing(runner: Runner, family: str, num_ranks: int) -> None:
    """What a loss or hook raises on the last rank is raised on all, and the next step is good."""
    job, last = runner.job(family), num_ranks - 1
    for rank, (errors, loss, fresh) in enumerate(runner.run(failing, num_ranks, job, BATCHES[0])):
        for where, said in errors.items():
            if COMPLAINT not in said:
                raise AssertionError(
                    f"`{where}` raised {COMPLAINT!r} on rank {last}; rank {rank} should raise `StepError` with "
                    f"these words, got {said or 'nothing'}"
                )
        if loss != fresh:
            raise AssertionError(
                f"after a failed step the loss of a good one is {loss} on rank {rank}, not {fresh}"
            )


def _empty(runner: Runner, family: str, num_ranks: int) -> None:
    """A mini-batch without sequences on any rank is a step that changes nothing."""
    for norm, before, after in runner.run(empty, num_ranks, runner.job(family), BATCHES[0]):
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
    answers = runner.run(weights_on, num_ranks, runner.job(family), last)
    for rank, (everywhere, names, chosen) in enumerate(answers):
        if names != list(everywhere):
            raise AssertionError(f"`named_weights_on` yields other names on rank {rank}, or another order")
        check_tensors(f"weights on rank {rank}", chosen, everywhere if rank == last else {}, 0.0)


def _step_rates(runner: Runner, family: str, num_ranks: int) -> None:
    """A step takes the learning rate and the betas that it is given, and the next one those of the config again."""
    job = runner.job(family)
    first = replace(job.config.optimizer, schedule=Schedule.CONSTANT, warmup_steps=0)
    then = replace(first, lr=first.lr * 3, beta1=0.5, beta2=0.7)
    weights = [
        runner.run(
            probes.step_by,
            num_ranks,
            replace(job, config=replace(job.config, optimizer=own)),
            BATCHES[0],
            rates,
        )
        for own, rates in ((then, [_rates(first), None]), (first, [None, _rates(then)]))
    ]
    for rank, (by_first, by_second) in enumerate(zip(*weights, strict=True)):
        check_tensors(f"weights of rank {rank} after steps by rates of their own", by_first, by_second, 0.0)


def _take_weights(runner: Runner, family: str, num_ranks: int) -> None:
    """Weights are taken over whole, or a share of them."""
    for keep in (0.0, 0.75):
        answers = runner.run(probes.blended, num_ranks, runner.job(family), BATCHES[0], keep)
        for rank, (trained, before, after) in enumerate(answers):
            expected = {name: keep * before[name] + (1 - keep) * trained[name] for name in trained}
            what = f"weights of rank {rank} that took over {1 - keep:g} of another engine's"
            check_tensors(what, after, expected, 1e-6 if keep else 0.0)


def _top_tokens(runner: Runner, family: str, num_ranks: int) -> None:
    """The likeliest tokens come in order, and log-probs of named tokens are those of the same distributions."""
    batch, close = BATCHES[0], runner.tolerances.logprob
    for whole in runner.run(top_tokens, num_ranks, runner.job(family), batch):
        mask_BT = batch["loss_mask"]
        top_MV, ids_MV, again_MV = (whole[key][mask_BT] for key in ("top_logprobs", "top_ids", "again"))
        own_M = top_MV[ids_MV == batch["input_ids"][mask_BT][:, None]]
        check_tensors(
            "log-probabilities of likeliest tokens",
            {"own": own_M, "total": top_MV.exp().sum(1), "named": again_MV, "sorted": top_MV},
            {
                "own": whole["logprobs"][mask_BT],
                "total": torch.ones(len(top_MV)),
                "named": top_MV,
                "sorted": top_MV.sort(descending=True).values,
            },
            close,
        )


def _rates(config: OptimizerConfig) -> tuple[float, tuple[float, float]]:
    return config.lr, (config.beta1, config.beta2)


def _gradients(runner: Runner, family: str) -> None:
    """Gradients are those of the reference."""
    job = runner.job(family)
    _, _, grads, _ = runner.run(probes.share, 1, job, [BATCHES[0]])[0]
    if grads is None:
        raise AssertionError("gradients are declared and not handed out")
    check_tensors("gradient", grads, runner.reference(job).first_grads, runner.tolerances.gradient)


Idle = Literal["empty", "masked"]


def _fault_cases(options: Options) -> Iterator[Case]:
    """Yield the cases of faults."""
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
