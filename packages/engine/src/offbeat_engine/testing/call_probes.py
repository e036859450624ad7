"""What `cases_calls` runs on the ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from offbeat_engine.errors import StepError
from offbeat_engine.testing.probes import copy_of, running, weights_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat_engine.batch import TrainBatch
    from offbeat_engine.interface import Engine
    from offbeat_engine.testing.compare import Named
    from offbeat_engine.testing.probes import Job
    from offbeat_engine.values import LossOutput, LossScale, Predictions, StepContext
    from offbeat_engine.world import World

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
