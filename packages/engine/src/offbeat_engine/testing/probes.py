"""What the conformance suite runs on the ranks: one module-level function per question, answered in plain tensors."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from offbeat_engine.batch import LossScale, StepContext, StepStats, WeightSpec
from offbeat_engine.config import Feature
from offbeat_engine.errors import NonFiniteError, StateError

if TYPE_CHECKING:
    from collections.abc import Generator

    from offbeat_engine.batch import LossFn, Predictions, TrainBatch
    from offbeat_engine.config import EngineConfig
    from offbeat_engine.interface import Engine
    from offbeat_engine.testing.compare import Named
    from offbeat_engine.toolkit.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Which engine, set up how, trained with what."""

    engine: type[Engine]
    config: EngineConfig
    loss_fn: LossFn


@dataclass(slots=True, kw_only=True)
class Record:
    """What a rank saw of a training run, one entry per step; `predictions` and `grads` are the first step's."""

    losses: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])
    rates: list[float] = field(default_factory=list[float])
    stats: list[StepStats] = field(default_factory=list[StepStats])
    predictions: Predictions | None = None
    grads: Named | None = None
    weights_after: dict[int, Named] = field(default_factory=dict[int, "Named"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """How a rank met a loss or gradient that is not finite, and what the next good step came to."""

    raised: str
    norm: float | None
    before: Named
    after: Named
    next_loss: float
    next_norm: float


@contextmanager
def running(world: World, job: Job) -> Generator[Engine]:
    """Give a built engine with the job's loss, and close it after."""
    torch.set_num_threads(1)
    engine = job.engine(job.config, world)
    try:
        engine.init_model()
        engine.set_loss_fn(job.loss_fn)
        yield engine
    finally:
        engine.close()


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """An own copy on the CPU, in the tensor's dtype: what an engine streams may be the live weight."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return copy_of(tensor).reshape(-1).view(torch.uint8)


def weights_of(engine: Engine) -> Named:
    """Return copies of all weights.

    Raises:
        AssertionError: a name comes twice, or a tensor changed after it was yielded.
    """
    named: Named = {}
    yielded: list[tuple[str, torch.Tensor]] = []
    for name, tensor in engine.named_weights():
        if name in named:
            raise AssertionError(f"`named_weights` yields `{name}` twice; each name must come once")
        named[name] = copy_of(tensor)
        yielded.append((name, tensor))
    for name, tensor in yielded:
        if not torch.equal(_bits(tensor), _bits(named[name])):
            raise AssertionError(
                f"`{name}` changed after `named_weights` had yielded it; each tensor needs memory of its own, which stays "
                "as it is until weights change"
            )
    return named


def blended(world: World, job: Job, batch: TrainBatch, keep: float) -> tuple[Named, Named, Named]:
    """Return the weights of an engine that trained a step, of one that did not, and of that one once it took them over."""
    with running(world, job) as trained, running(world, job) as other:
        with trained.train_mode():
            trained.optimizer_zero_grad()
            trained.forward_backward_step(trained.shard_data(batch))
            trained.optimizer_step()
        before = weights_of(other)
        other.take_weights(trained, keep)
        return weights_of(trained), before, weights_of(other)


def step_by(
    world: World, job: Job, batch: TrainBatch, rates: list[tuple[float, tuple[float, float]] | None]
) -> Named:
    """Return the weights after one step on `batch` by each of `rates`: a learning rate and betas, or what the config says."""
    with running(world, job) as engine, engine.train_mode():
        for lr, betas in [one or (None, None) for one in rates]:
            engine.optimizer_zero_grad()
            engine.forward_backward_step(engine.shard_data(batch))
            engine.optimizer_step(lr=lr, betas=betas)
        return weights_of(engine)


def _gradients(engine: Engine) -> Named | None:
    """Return what has been accumulated, None from an engine that does not hand it out."""
    if Feature.NAMED_GRADIENTS not in engine.capabilities().features:
        return None
    return {name: copy_of(grad) for name, grad in engine.named_gradients()}


def _step(engine: Engine, batch: TrainBatch, record: Record, parts: int = 1) -> None:
    """One optimizer step on `batch` (the same on all ranks), in `parts` calls of equal scale."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        scale = LossScale(num_tokens=int(batch["loss_mask"].sum()), num_sequences=batch.batch_size[0])
        is_first = not record.losses
        losses: list[float] = []
        for rows in torch.arange(batch.batch_size[0]).chunk(parts):
            ctx = StepContext(scale=scale) if parts > 1 else StepContext()
            mine, loss, ctx = engine.forward_backward_step(engine.shard_data(batch[rows]), ctx)
            losses.append(loss)
            if is_first and parts == 1:
                record.predictions = engine.unshard_data(mine).to("cpu")
            if ctx.stats is None:
                raise AssertionError("`forward_backward_step` left `ctx.stats` empty; fill it on every call")
            record.stats.append(ctx.stats)
        record.losses.append(sum(losses))
        if is_first:
            record.grads = _gradients(engine)
        record.norms.append(engine.optimizer_step())
        record.rates.append(engine.lr_scheduler_step())


def train(
    world: World, job: Job, batches: list[TrainBatch], keep_after: tuple[int, ...] = (), parts: int = 1
) -> Record:
    """Take one step on each of `batches`; `parts` > 1 spreads each over that many calls of fixed scale."""
    with running(world, job) as engine:
        record = Record()
        if 0 in keep_after:
            record.weights_after[0] = weights_of(engine)
        for number, batch in enumerate(batches, start=1):
            _step(engine, batch, record, parts)
            if number in keep_after:
                record.weights_after[number] = weights_of(engine)
        return record


def score(world: World, job: Job, batch: TrainBatch) -> Predictions:
    """Return the predictions of a forward-only call in `eval_mode`, whole and in the order of `batch`."""
    with running(world, job) as engine:
        with engine.eval_mode():
            share = engine.shard_data(batch)
            predictions, _ = engine.forward_backward_step(share, forward_only=True)
        return engine.unshard_data(predictions).to("cpu")


def refuse_training(world: World, job: Job) -> str:
    """Return what the engine says when it is to be trained, "" where it lets itself be."""
    with running(world, job) as engine:
        try:
            with engine.train_mode():
                return ""
        except StateError as error:
            return str(error)


def score_base(
    world: World, job: Job, batches: list[TrainBatch], batch: TrainBatch
) -> tuple[Predictions, Predictions, Predictions]:
    """Step on `batches`; return predictions of `batch` as trained, of the base (`base_mode`), and as trained again."""
    with running(world, job) as engine:
        for one in batches:
            _step(engine, one, Record())
        answers: list[Predictions] = []
        for mode in (engine.eval_mode, engine.base_mode, engine.eval_mode):
            with mode():
                predictions, _ = engine.forward_backward_step(engine.shard_data(batch), forward_only=True)
            answers.append(engine.unshard_data(predictions).to("cpu"))
        return answers[0], answers[1], answers[2]


def describe(world: World, job: Job) -> tuple[tuple[WeightSpec, ...], tuple[WeightSpec, ...]]:
    """Return the manifest, and what `named_weights` really yields in the same words."""
    with running(world, job) as engine:
        manifest = engine.weight_manifest()
        kind = manifest[0].kind  # not to be seen in a tensor
        seen = tuple(
            WeightSpec(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, kind=kind)
            for name, tensor in engine.named_weights()
        )
        return manifest, seen


def save(
    world: World, job: Job, batches: list[TrainBatch], folder: str, remote: str | None = None, keep: int | None = None
) -> Named:  # fmt: skip
    """Step on each of `batches`, writing a checkpoint after each; return the last one's weights."""
    with running(world, job) as engine:
        for number, batch in enumerate(batches, start=1):
            _step(engine, batch, Record())
            engine.save_checkpoint(folder, remote, global_step=number, max_ckpt_to_keep=keep)
        return weights_of(engine)


def save_and_go_on(world: World, job: Job, batches: list[TrainBatch], folder: str) -> Named:
    """Step on all but the last of `batches`, save in the background, step on; return the weights when `save` returned."""
    with running(world, job) as engine:
        for batch in batches[:-1]:
            _step(engine, batch, Record())
        handle = engine.save_checkpoint(folder, global_step=len(batches) - 1, block=False)
        saved = weights_of(engine)
        _step(engine, batches[-1], Record())
        handle.wait()
        return saved


def resume(
    world: World, job: Job, stale: list[TrainBatch], batches: list[TrainBatch], folder: str, remote: str | None = None
) -> tuple[int | None, Named, Record]:  # fmt: skip
    """Load the newest checkpoint over an engine that was trained on `stale`, then step on `batches`.

    Returns:
        The step found, the weights right after loading, and the record of the steps with the last weights.
    """
    with running(world, job) as engine:
        for batch in stale:
            _step(engine, batch, Record())
        found = engine.load_checkpoint(folder, remote)
        loaded, record = weights_of(engine), Record()
        for batch in batches:
            _step(engine, batch, record)
        record.weights_after[len(batches)] = weights_of(engine)
        return found, loaded, record


def export(world: World, job: Job, batches: list[TrainBatch], folder: str) -> Named:
    """Step on each of `batches`, write a Hugging Face folder, return the weights as streamed."""
    with running(world, job) as engine:
        for batch in batches:
            _step(engine, batch, Record())
        engine.export_huggingface(folder)
        return weights_of(engine)


def move(
    world: World, job: Job, batches: list[TrainBatch], keep_after: tuple[int, ...]
) -> tuple[Record, bool]:
    """Train as `train` does, but send everything away and back around each step; say whether weights stayed."""
    moves = ({}, {"model": False}, {"optimizer": False})
    with running(world, job) as engine:
        record, same = Record(), True
        for number, batch in enumerate(batches, start=1):
            _step(engine, batch, record)
            before = weights_of(engine)
            which = moves[number % len(moves)]
            engine.to("cpu", **which)
            same = same and _equal(before, weights_of(engine))
            engine.to(world.device, **which)
            same = same and _equal(before, weights_of(engine))
            if number in keep_after:
                record.weights_after[number] = before
        return record, same


def share(world: World, job: Job, shares: list[TrainBatch]) -> tuple[float, Predictions, Named | None, float]:
    """Train on the share of this rank's `data_rank`, as it is; return loss, this rank's predictions, gradients and their norm."""
    with running(world, job) as engine, engine.train_mode():
        engine.optimizer_zero_grad()
        predictions, loss, _ = engine.forward_backward_step(shares[engine.data_rank])
        grads = _gradients(engine)
        return loss, predictions.to("cpu"), grads, engine.optimizer_step()


def meet_fault(world: World, job: Job, shares: list[TrainBatch], good: list[TrainBatch]) -> Fault:
    """Train on poisoned `shares[rank]`, then take one step on `good[rank]`."""
    with running(world, job) as engine:
        before, raised, norm = weights_of(engine), "", None
        with engine.train_mode():
            try:
                engine.forward_backward_step(shares[engine.data_rank])
                norm = engine.optimizer_step()
            except NonFiniteError as error:
                raised = str(error)
            after = weights_of(engine)
            engine.optimizer_zero_grad()
            _, loss, _ = engine.forward_backward_step(good[engine.data_rank])
            return Fault(
                raised=raised, norm=norm, before=before, after=after, next_loss=loss, next_norm=engine.optimizer_step()
            )  # fmt: skip


def _equal(left: Named, right: Named) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
