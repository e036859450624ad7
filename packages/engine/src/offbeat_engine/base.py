"""`EngineBase`: what engines of this interface share. Modes, losses, gradients, steps and saves go by the rules; the model is left."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import contextmanager, nullcontext
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch

from offbeat_engine.batch import StepContext
from offbeat_engine.errors import StateError
from offbeat_engine.interface import Engine
from offbeat_engine.toolkit.collectives import compute_device
from offbeat_engine.toolkit.state import checkpoint_folders, training_state
from offbeat_engine.toolkit.state.saves import Destination, Saves
from offbeat_engine.toolkit.step.micro_batches import StepRequest
from offbeat_engine.toolkit.step.schedules import step_rates
from offbeat_engine.toolkit.step.totals import Accumulation

if TYPE_CHECKING:
    from collections.abc import Generator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from offbeat_engine.batch import LossFn, PostprocessFn, Predictions, PreprocessFn, TrainBatch
    from offbeat_engine.config import EngineConfig
    from offbeat_engine.toolkit.state.saves import SaveHandle
    from offbeat_engine.toolkit.world import World

State = TypeVar("State")


class Updates(Protocol):
    """Optimizer and schedule of an engine, over the gradients that its calls accumulate."""

    num_steps: int  # scheduled so far

    def zero_grad(self) -> None:
        """Drop all gradients."""
        ...

    def grad_norm(self) -> float:
        """Return the L2 norm of the gradient over all parameters and ranks, the same on all ranks."""
        ...

    def step(self, grad_norm: float, lr: float, betas: tuple[float, float]) -> None:
        """Scale gradients of norm `grad_norm` to at most `max_grad_norm`, then take one step."""
        ...

    def set_num_steps(self, num_steps: int) -> float:
        """Jump to the learning rate of optimizer step `num_steps` and return it."""
        ...


class _Mode(Enum):
    NONE = "no mode"
    TRAIN = "train_mode"
    EVAL = "eval_mode"


class EngineBase(Engine, Generic[State]):
    """An engine that keeps what `init_model` made in `_state`, and refuses what comes before, after, or in the wrong mode.

    Left to an engine, beside what is abstract in `Engine`: the methods below that begin with an underscore and are
    abstract. The others have defaults for an engine whose weights stay on the device.
    """

    def __init__(self, config: EngineConfig, world: World) -> None:
        super().__init__(config, world)
        self._state: State | None = None
        self._loss_fn: LossFn | None = None
        self._mode = _Mode.NONE
        self._accumulation = Accumulation(config.on_nonfinite)
        self._saves = Saves(world, config.checkpoint_timeout_s)

    @abstractmethod
    def _updates(self) -> Updates:
        """Return optimizer and schedule; `StateError` before `init_model`."""

    @abstractmethod
    def _set_training(self, training: bool) -> None:
        """Set the model to train or to evaluate."""

    @abstractmethod
    def _run(self, request: StepRequest, batch: TrainBatch, ctx: StepContext) -> Predictions:
        """Run a whole mini-batch, fill `ctx`, and return predictions, detached: what `toolkit.step.micro_batches` is for."""

    @abstractmethod
    def _save(self, where: Destination, block: bool) -> SaveHandle:
        """Save: what `toolkit.state.training_state.save` is for."""

    @abstractmethod
    def _load(self, folder: Path, verified: bool) -> None:
        """Load the checkpoint `folder`: what `toolkit.state.training_state.load` is for."""

    def _names(self) -> tuple[str, ...]:
        """Return what the model predicts."""
        return ("values",) if self.config.model.head == "value" else ("logprobs", "entropy")

    def _request(self, **call: Any) -> StepRequest:  # noqa: ANN401 fields of `StepRequest`
        """Return `call` as a request to this rank."""
        return StepRequest(
            world=self.world,
            device=compute_device(self.world),
            names=self._names(),
            data_rank=self.data_rank,
            data_size=self.data_size,
            leads=self.is_leader,
            **call,
        )

    def _resident(self, optimizer: bool = False) -> AbstractContextManager[None]:
        """Have the weights on the rank's device inside, and the optimizer's state where it is wanted too."""
        return nullcontext()

    def _borrowed(self) -> AbstractContextManager[None]:
        """Be around every computation over gradients."""
        return nullcontext()

    def _ready(self) -> State:
        if self._state is None:
            raise StateError("there is no model; call `init_model` first (and nothing after `close`)")
        return self._state

    def _check_new(self) -> None:
        if self._state is not None:
            raise StateError("`init_model` was called before; make a new engine for another model")

    def _check_trained(self) -> None:
        if self.config.inference_only:
            raise StateError(
                "this engine is `inference_only`: it holds nothing to train, to save or to resume"
            )

    def _check_mode(self, forward_only: bool) -> None:
        if forward_only:
            if self._mode is _Mode.NONE:
                raise StateError("`forward_backward_step` outside a mode; use `with engine.eval_mode():`")
            return
        if self._mode is not _Mode.TRAIN:
            raise StateError(f"training in {self._mode.value}; use `with engine.train_mode():`")
        if self._loss_fn is None:
            raise StateError("training without a loss; call `set_loss_fn` first")

    def train_mode(self) -> AbstractContextManager[None]:
        """Train: the model is on the rank's device inside, and back where it was after; moments as they are stepped."""
        self._check_trained()
        return self._entered(_Mode.TRAIN)

    def eval_mode(self) -> AbstractContextManager[None]:
        """Forward only: the model is on the rank's device inside; the optimizer stays where it is."""
        return self._entered(_Mode.EVAL)

    @contextmanager
    def _entered(self, mode: _Mode) -> Generator[None]:
        self._ready()
        before = self._mode
        with self._resident():
            self._set_mode(mode)
            try:
                yield
            finally:
                self._set_mode(before)

    def _set_mode(self, mode: _Mode) -> None:
        self._set_training(mode is _Mode.TRAIN)
        self._mode = mode

    def set_loss_fn(self, loss_fn: LossFn) -> None:  # noqa: D102
        self._loss_fn = loss_fn

    def forward_backward_step(  # noqa: D102  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        batch: TrainBatch,
        ctx: StepContext | None = None,
        forward_only: bool = False,
        preprocess_fn: PreprocessFn | None = None,
        postprocess_fn: PostprocessFn | None = None,
        predict: bool = True,
    ) -> Any:  # noqa: ANN401 what `Engine` says, which has an overload for each
        self._ready()
        self._check_mode(forward_only)
        ctx = StepContext() if ctx is None else ctx
        if ctx.stats is not None:
            raise StateError(
                "this `StepContext` holds the counts of an earlier call; make a new one (`StepContext(scale=...)` for the same counts)"
            )
        request = self._request(
            loss_fn=None if forward_only else self._loss_fn,
            preprocess_fn=preprocess_fn,
            postprocess_fn=postprocess_fn,
            predict=predict,
        )
        try:
            with self._borrowed(), torch.set_grad_enabled(not forward_only):
                predictions = self._run(request, batch, ctx)
        except Exception:
            if not self.config.inference_only:
                self.optimizer_zero_grad()  # they are of half a mini-batch
            raise
        if forward_only:
            return predictions, ctx
        assert ctx.stats is not None
        self._accumulation.add(ctx.stats)
        return predictions, ctx.stats.loss, ctx

    def optimizer_zero_grad(self) -> None:  # noqa: D102
        with self._borrowed():
            self._updates().zero_grad()
        self._accumulation.drop()

    def optimizer_step(self, lr: float | None = None, betas: tuple[float, float] | None = None) -> float:
        """Clip, step, and return the gradient norm before clipping; it does not drop the gradients. See `Engine`.

        Raises:
            ConfigError: `lr` or `betas` is out of range.
            NonFiniteError: the norm is not finite and the config says stop; weights are untouched.
            StateError: there is no gradient, or the engine is not in `train_mode`.
        """
        updates = self._updates()
        if self._mode is not _Mode.TRAIN:
            raise StateError("`optimizer_step` outside `train_mode`; use `with engine.train_mode():`")
        rates = step_rates(self.config.optimizer, updates.num_steps, lr, betas)

        def update(norm: float) -> None:
            with self._resident(optimizer=True):
                updates.step(norm, *rates)

        with self._borrowed():
            return self._accumulation.step(updates.grad_norm, update)

    def lr_scheduler_step(self) -> float:  # noqa: D102
        self._check_trained()
        updates = self._updates()
        return updates.set_num_steps(updates.num_steps + int(self._accumulation.advances))

    def save_checkpoint(  # noqa: D102
        self,
        local_path: str,
        remote_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        block: bool = True,
    ) -> SaveHandle:
        self._check_trained()
        where = Destination(local_path, remote_path, global_step, max_ckpt_to_keep)
        with self._resident(optimizer=True):
            return self._save(where, block)

    def load_checkpoint(  # noqa: D102
        self, local_path: str, remote_path: str | None = None, global_step: int | None = None
    ) -> int | None:
        self._check_trained()
        self._saves.finish_last()
        step, verified = training_state.find(self._saves.world, local_path, remote_path, global_step)
        if step is not None:
            with self._resident(optimizer=True):
                self._load(checkpoint_folders.step_path(local_path, step), verified)
                self.optimizer_zero_grad()
        return step

    def close(self) -> None:
        """End the save under way, forget model and optimizer; process groups stay until `World.leave`.

        Raises:
            CheckpointError: an earlier save failed, and nobody was told.
        """
        try:
            self._saves.close()
        finally:
            self._state = None
            if self.world.device == "cuda":
                torch.cuda.empty_cache()
