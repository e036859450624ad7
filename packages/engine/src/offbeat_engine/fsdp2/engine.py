"""`Fsdp2Engine`: the training-engine interface over a sharded Hugging Face model."""

# FSDP's and transformers' modules are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, overload

import torch

from offbeat_engine.config import require_config
from offbeat_engine.errors import ConfigError, EngineError, StateError
from offbeat_engine.fsdp2 import checkpoint, checks, lora, model, weights
from offbeat_engine.fsdp2.build import Parts, build_parts
from offbeat_engine.fsdp2.compilation import kernels
from offbeat_engine.fsdp2.config import Fsdp2Config
from offbeat_engine.fsdp2.self_check import find_difference, find_non_finite
from offbeat_engine.fsdp2.stepping import names_of, run_step, step_of
from offbeat_engine.interface import Engine
from offbeat_engine.toolkit import checkpoint_folders, training_state
from offbeat_engine.toolkit.accumulation import Accumulation
from offbeat_engine.toolkit.collectives import gather
from offbeat_engine.toolkit.micro_batches import Asked
from offbeat_engine.toolkit.saves import Destination, Saves
from offbeat_engine.values import StepContext

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterator
    from contextlib import AbstractContextManager
    from typing import Literal

    from offbeat_engine.batch import TrainBatch
    from offbeat_engine.capabilities import Capabilities, Refusal
    from offbeat_engine.config import EngineConfig
    from offbeat_engine.saving import SaveHandle
    from offbeat_engine.values import (
        LossFn,
        PostprocessFn,
        Predictions,
        PreprocessFn,
        WeightShard,
        WeightSpec,
    )
    from offbeat_engine.world import World


class _Mode(Enum):
    NONE = "no mode"
    TRAIN = "train_mode"
    EVAL = "eval_mode"


class Fsdp2Engine(Engine):
    """Hugging Face causal models on 1..N ranks with `fully_shard`, gloo on CPU and NCCL on GPU.

    One float32 rank runs unsharded (see `fsdp2.sharding.shard`). On a CPU in float32, the same calls on the same
    data and number of ranks give the same bits.
    """

    Config = Fsdp2Config

    def __init__(self, config: EngineConfig, world: World) -> None:
        super().__init__(config, world)
        self._config = require_config(config, Fsdp2Config)
        self._parts: Parts | None = None
        self._loss_fn: LossFn | None = None
        self._mode = _Mode.NONE
        self._accumulation = Accumulation(config.on_nonfinite)
        self._saves = Saves(world, config.checkpoint_timeout_s)

    @classmethod
    def capabilities(cls) -> Capabilities:  # noqa: D102
        return checks.capabilities()

    @classmethod
    def check(cls, config: EngineConfig, num_ranks: int) -> list[Refusal]:  # noqa: D102
        fsdp2 = require_config(config, Fsdp2Config)
        return [*checks.refusals(fsdp2, num_ranks), *checks.refusals_of_weights(fsdp2)]

    def init_model(self) -> None:
        """Build, shard and prepare everything.

        Raises:
            ConfigError: `check` refuses the config, or the folder holds no model that fits it.
            StateError: called twice, or other ranks exist and `World.join` was not called.
        """
        if self._parts is not None:
            raise StateError("`init_model` was called before; make a new engine for another model")
        # Of the weights each rank finds out as it reads them: its folder may be another than that of its neighbour.
        checks.require(self._config, self.world, checks.refusals(self._config, self.world.size))
        self._parts = build_parts(self._config, self.world)
        difference = self._difference(self._parts)
        if difference is not None:
            self.close()
            raise ConfigError(difference)

    def _difference(self, parts: Parts) -> str | None:
        """Return why this model must not be used here (see `self_check`), the same on all ranks, or None."""
        dropout = self.config.model.dropout or self.config.inference_only
        # Agreed on before the second: that is a collective.
        with parts.weights.held():
            odd = find_non_finite(parts.scorer.hf)
        for each in gather(self.world, odd):
            if each is not None:
                return each
        mine = find_difference(self, parts.scorer, packed=self._config.packing, dropout=dropout)
        return next((each for each in gather(self.world, mine) if each is not None), None)

    def train_mode(self) -> AbstractContextManager[None]:
        """Train: the model is on the rank's device inside, and back where it was after; moments as they are stepped."""
        self._check_trained()
        return self._entered(_Mode.TRAIN)

    def eval_mode(self) -> AbstractContextManager[None]:
        """Forward only: the model is on the rank's device inside; the optimizer stays where it is."""
        return self._entered(_Mode.EVAL)

    @contextmanager
    def base_mode(self) -> Generator[None]:  # noqa: D102
        with lora.left_out(self._ready().scorer.hf), self._entered(_Mode.EVAL):
            yield

    @contextmanager
    def _entered(self, mode: _Mode) -> Generator[None]:
        parts, before = self._ready(), self._mode
        with parts.weights.held():
            parts.scorer.train(mode is _Mode.TRAIN)
            self._mode = mode
            try:
                yield
            finally:
                self._mode = before
                parts.scorer.train(before is _Mode.TRAIN)

    def set_loss_fn(self, loss_fn: LossFn) -> None:  # noqa: D102
        self._loss_fn = loss_fn

    @overload
    def forward_backward_step(
        self,
        batch: TrainBatch,
        ctx: StepContext | None = None,
        forward_only: Literal[False] = False,
        preprocess_fn: PreprocessFn | None = None,
        postprocess_fn: PostprocessFn | None = None,
        predict: bool = True,
    ) -> tuple[Predictions, float, StepContext]: ...

    @overload
    def forward_backward_step(
        self,
        batch: TrainBatch,
        ctx: StepContext | None = None,
        *,
        forward_only: Literal[True],
        preprocess_fn: PreprocessFn | None = None,
        postprocess_fn: PostprocessFn | None = None,
        predict: bool = True,
    ) -> tuple[Predictions, StepContext]: ...

    def forward_backward_step(  # noqa: D102
        self,
        batch: TrainBatch,
        ctx: StepContext | None = None,
        forward_only: bool = False,
        preprocess_fn: PreprocessFn | None = None,
        postprocess_fn: PostprocessFn | None = None,
        predict: bool = True,
    ) -> tuple[Predictions, StepContext] | tuple[Predictions, float, StepContext]:
        parts = self._ready()
        ctx = StepContext() if ctx is None else ctx
        self._check_mode(forward_only)
        asked = Asked.of(
            self,
            names=names_of(parts.scorer),
            loss_fn=None if forward_only else self._loss_fn,
            preprocess_fn=preprocess_fn,
            postprocess_fn=postprocess_fn,
            predict=predict,
        )
        try:
            with torch.set_grad_enabled(not forward_only), kernels(self._config):
                predictions = run_step(step_of(parts, self._config, asked), batch, ctx)
        except EngineError:
            self.optimizer_zero_grad()  # they are of half a mini-batch
            raise
        finally:
            parts.reshard()
        if forward_only:
            return predictions, ctx
        assert ctx.stats is not None
        self._accumulation.add(ctx.stats)
        return predictions, ctx.stats.loss, ctx

    def optimizer_zero_grad(self) -> None:  # noqa: D102
        self._ready().updater.zero_grad()
        self._accumulation.drop()

    def optimizer_step(self) -> float:
        """Clip, step, and return the gradient norm before clipping; it does not drop the gradients.

        Raises:
            NonFiniteError: the norm is not finite and the config says stop; weights are untouched.
            StateError: there is no gradient, or the engine is not in `train_mode`.
        """
        parts = self._ready()
        if self._mode is not _Mode.TRAIN:
            raise StateError("`optimizer_step` outside `train_mode`; use `with engine.train_mode():`")

        def update(norm: float) -> None:
            with kernels(self._config), parts.moments.held():
                parts.updater.step(norm)

        return self._accumulation.step(parts.updater.grad_norm, update)

    def lr_scheduler_step(self) -> float:  # noqa: D102
        self._check_trained()
        updater = self._ready().updater
        return updater.advance() if self._accumulation.advances else updater.set_num_steps(updater.num_steps)

    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        """Move what waits between the modes; inside one, this takes effect when it ends.

        On a CPU host memory is the device's own, so everything goes out and comes straight back.
        """
        parts = self._ready()
        if device not in ("cpu", self.world.device):
            raise ConfigError(f'`device` must be "cpu" or "{self.world.device}", got {device!r}')
        for offloadable, wanted in ((parts.weights, model), (parts.moments, optimizer)):
            if wanted:
                offloadable.settle(in_host=device == "cpu")
                if device == self.world.device:
                    offloadable.settle(in_host=False)

    def save_checkpoint(  # noqa: D102
        self,
        local_path: str,
        remote_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        block: bool = True,
    ) -> SaveHandle:
        where = Destination(local_path, remote_path, global_step, max_ckpt_to_keep)
        with self._all_held():
            return checkpoint.save(self._saves, self._target(), where, block)

    def load_checkpoint(  # noqa: D102
        self, local_path: str, remote_path: str | None = None, global_step: int | None = None
    ) -> int | None:
        self._saves.settle()
        step, verified = training_state.find(self._saves.world, local_path, remote_path, global_step)
        if step is not None:
            with self._all_held():
                folder = checkpoint_folders.step_path(local_path, step)
                checkpoint.load(self._saves, self._target(), folder, verified)
                self.optimizer_zero_grad()
        return step

    def export_huggingface(self, path: str) -> None:  # noqa: D102
        parts = self._ready()
        self._saves.settle()
        with parts.weights.held():
            weights.export_folder(
                self._saves.world,  # flushing tens of gigabytes may outlast the deadline of other calls
                Path(path),
                parts.scorer.hf,
                self._sources(),
                model.compute_dtype(self._config),
                self._config.model.path,
            )

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight, one whole tensor at a time; it may share memory with the live weight."""
        dtype = model.compute_dtype(self._config)
        return weights.handed_out(self._ready().weights, weights.stream(self._sources(), dtype))

    def named_weights_on(self, ranks: Collection[int]) -> Iterator[tuple[str, torch.Tensor | None]]:  # noqa: D102
        dtype, rank = model.compute_dtype(self._config), self.world.rank
        named = weights.stream_on(self._sources(), dtype, frozenset(ranks), rank)
        return weights.handed_out(self._ready().weights, named)

    def named_shards(self) -> Iterator[WeightShard]:  # noqa: D102
        shards = weights.shards(self._sources(), model.compute_dtype(self._config), self.world.rank)
        pieces = weights.handed_out(self._ready().weights, ((shard, shard.tensor) for shard in shards))
        return (replace(shard, tensor=tensor) for shard, tensor in pieces)

    def weight_manifest(self) -> tuple[WeightSpec, ...]:  # noqa: D102
        return weights.specs(self._sources(), model.compute_dtype(self._config))

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:  # noqa: D102
        self._accumulation.check_gradients()
        gradients = weights.gradients(self._ready().scorer.hf, lora.kind_of(self._config.lora))
        return weights.handed_out(self._ready().weights, weights.stream(gradients, torch.float32))

    def close(self) -> None:
        """End the save under way, forget model and optimizer; a process group stays until `World.leave`.

        Raises:
            CheckpointError: an earlier save failed, and nobody was told.
        """
        try:
            self._saves.close()
        finally:
            self._parts = None
            if self.world.device == "cuda":
                torch.cuda.empty_cache()

    def _ready(self) -> Parts:
        if self._parts is None:
            raise StateError("there is no model; call `init_model` first (and nothing after `close`)")
        return self._parts

    def _check_trained(self) -> None:
        if self._config.inference_only:
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

    def _sources(self) -> list[weights.Source]:
        return weights.exported(self._ready().scorer.hf, lora.kind_of(self._config.lora))

    def _target(self) -> checkpoint.Target:
        self._check_trained()
        parts = self._ready()
        return checkpoint.target_of(self.world, parts.scorer, parts.updater)

    @contextmanager
    def _all_held(self) -> Generator[None]:
        parts = self._ready()
        with parts.weights.held(), parts.moments.held():
            yield
