"""`MegatronEngine`: the training-engine interface over megatron-core."""

# megatron-core is untyped.
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
from offbeat_engine.interface import Engine
from offbeat_engine.megatron import checkpoint, checks, export
from offbeat_engine.megatron.build import Parts, build_parts
from offbeat_engine.megatron.config import MegatronConfig
from offbeat_engine.megatron.model import compute_dtype
from offbeat_engine.megatron.self_check import find_difference
from offbeat_engine.megatron.stepping import Step, names_of, run_step
from offbeat_engine.megatron.updater import Updater, gradient
from offbeat_engine.toolkit import checkpoint_folders, training_state
from offbeat_engine.toolkit.accumulation import Accumulation
from offbeat_engine.toolkit.collectives import first_failure
from offbeat_engine.toolkit.micro_batches import Asked
from offbeat_engine.toolkit.saves import Destination, Saves
from offbeat_engine.toolkit.throughput import peak_flops
from offbeat_engine.values import StepContext

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterator
    from contextlib import AbstractContextManager
    from typing import Any, Literal

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


class MegatronEngine(Engine):
    """Hugging Face causal models on megatron-core's local layers, gloo on CPU and NCCL on GPU.

    Of `num_ranks` ranks neighbours share a tensor, then come the copies, and the stages of a pipeline lie furthest apart
    (megatron-core's own order). Outputs are on the last stage, whose first rank of a tensor speaks.
    """

    Config = MegatronConfig

    def __init__(self, config: EngineConfig, world: World) -> None:
        super().__init__(config, world)
        self._config = require_config(config, MegatronConfig)
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
        return checks.refusals(require_config(config, MegatronConfig), num_ranks)

    @property
    def _neighbours(self) -> int:
        return self._config.tensor_parallel_size * self._config.context_parallel_size

    @property
    def data_rank(self) -> int:  # noqa: D102
        return self.world.rank // self._neighbours % self.data_size

    @property
    def is_speaker(self) -> bool:  # noqa: D102
        stage = self.world.rank // (self._neighbours * self.data_size)
        last = stage == self._config.pipeline_parallel_size - 1
        return last and self.world.rank % self._neighbours == 0

    def init_model(self) -> None:
        """Build, fill and prepare everything.

        Raises:
            ConfigError: `check` refuses the config, or the folder holds no model that fits it.
            StateError: called twice, or other ranks exist and `World.join` was not called.
        """
        if self._parts is not None:
            raise StateError("`init_model` was called before; make a new engine for another model")
        if self.world.size > 1:
            self.world.ensure_group(self._config.collective_timeout_s)
        refused = "; ".join(map(str, self.check(self._config, self.world.size)))
        error = ConfigError(refused) if refused else None
        failure = first_failure(self.world, error)
        if failure is not None:
            raise error or ConfigError(f"another rank refuses the settings: {failure}")
        self._parts = build_parts(self._config, self.world)
        difference = self._difference(self._parts)
        if difference is not None:
            self.close()
            raise ConfigError(difference)

    def _difference(self, parts: Parts) -> str | None:
        """Return why this model must not be used here (see `self_check`), the same on all ranks, or None."""
        with self._entered(_Mode.EVAL):
            # Reading a large model layer by layer may outlast the deadline of other calls.
            return find_difference(self._step(parts, self._asked(None)), parts, self._saves.world)

    def train_mode(self) -> AbstractContextManager[None]:  # noqa: D102
        self._updater()
        return self._entered(_Mode.TRAIN)

    def eval_mode(self) -> AbstractContextManager[None]:  # noqa: D102
        return self._entered(_Mode.EVAL)

    @contextmanager
    def _entered(self, mode: _Mode) -> Generator[None]:
        parts, before = self._ready(), self._mode
        self._set_mode(parts, mode)
        try:
            yield
        finally:
            self._set_mode(parts, before)

    def _set_mode(self, parts: Parts, mode: _Mode) -> None:
        self._mode = mode
        for chunk in parts.chunks:
            chunk.wrapped.train(mode is _Mode.TRAIN)

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
        asked = self._asked(
            None if forward_only else self._loss_fn,
            preprocess_fn=preprocess_fn,
            postprocess_fn=postprocess_fn,
            predict=predict,
        )
        step = self._step(parts, asked)
        try:
            with parts.groups.lent(), torch.set_grad_enabled(not forward_only):
                predictions = run_step(step, batch, ctx)
        except EngineError:
            if parts.updater is not None:
                self.optimizer_zero_grad()  # they are of half a mini-batch
            raise
        if forward_only:
            return predictions, ctx
        assert ctx.stats is not None
        self._accumulation.add(ctx.stats)
        return predictions, ctx.stats.loss, ctx

    def _asked(self, loss_fn: LossFn | None, **hooks: Any) -> Asked:  # noqa: ANN401 fields of `Asked`
        return Asked.of(self, names=names_of(self._config), loss_fn=loss_fn, **hooks)

    def _step(self, parts: Parts, asked: Asked) -> Step:
        peak = peak_flops(asked.device, compute_dtype(self._config))
        return Step(
            asked=replace(asked, cost=parts.cost, peak_flops=peak),
            config=self._config,
            chunks=parts.chunks,
            shape=parts.shape,
            groups=parts.groups,
            sequence_limit=parts.sequence_limit,
        )

    def optimizer_zero_grad(self) -> None:  # noqa: D102
        with self._ready().groups.lent():
            self._updater().zero_grad()
        self._accumulation.drop()

    def optimizer_step(self) -> float:
        """Clip, step, and return the gradient norm before clipping; it does not drop the gradients.

        Raises:
            NonFiniteError: the norm is not finite and the config says stop; weights are untouched.
            StateError: there is no gradient, or the engine is not in `train_mode`.
        """
        updater = self._updater()
        if self._mode is not _Mode.TRAIN:
            raise StateError("`optimizer_step` outside `train_mode`; use `with engine.train_mode():`")
        with self._ready().groups.lent():
            return self._accumulation.step(updater.grad_norm, updater.step)

    def lr_scheduler_step(self) -> float:  # noqa: D102
        updater = self._updater()
        return updater.advance() if self._accumulation.advances else updater.set_num_steps(updater.num_steps)

    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:  # noqa: D102
        if device != self.world.device:
            raise ConfigError(f"the Megatron engine stays on {self.world.device!r}; got {device!r}")

    def save_checkpoint(  # noqa: D102
        self,
        local_path: str,
        remote_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        block: bool = True,
    ) -> SaveHandle:
        where = Destination(local_path, remote_path, global_step, max_ckpt_to_keep)
        return checkpoint.save(self._saves, self._ready().held, self._updater(), where, block)

    def load_checkpoint(  # noqa: D102
        self, local_path: str, remote_path: str | None = None, global_step: int | None = None
    ) -> int | None:
        updater = self._updater()
        self._saves.settle()
        step, verified = training_state.find(self._saves.world, local_path, remote_path, global_step)
        if step is not None:
            folder = checkpoint_folders.step_path(local_path, step)
            checkpoint.load(self._saves, self._ready().held, updater, folder, verified)
            self.optimizer_zero_grad()
        return step

    def export_huggingface(self, path: str) -> None:  # noqa: D102
        parts, dtype = self._ready(), compute_dtype(self._config)
        self._saves.settle()
        named = parts.leaving.whole(dtype, {0}, _itself)
        # Flushing tens of gigabytes may outlast the deadline of other calls.
        world, specs = self._saves.world, parts.leaving.specs(dtype)
        export.export_folder(world, Path(path), specs, named, self._config.model.path)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight, one whole tensor at a time, in memory of its own."""
        for name, tensor in self.named_weights_on(range(self.world.size)):
            assert tensor is not None
            yield name, tensor

    def named_weights_on(self, ranks: Collection[int]) -> Iterator[tuple[str, torch.Tensor | None]]:  # noqa: D102
        return self._ready().leaving.whole(compute_dtype(self._config), ranks, _itself)

    def named_shards(self) -> Iterator[WeightShard]:  # noqa: D102
        return self._ready().leaving.shards(compute_dtype(self._config))

    def weight_manifest(self) -> tuple[WeightSpec, ...]:  # noqa: D102
        return self._ready().leaving.specs(compute_dtype(self._config))

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:  # noqa: D102
        self._accumulation.check_gradients()
        parts, updater = self._ready(), self._updater()
        with parts.groups.lent():
            updater.bring_together(everywhere=True)
        every = range(self.world.size)
        for name, tensor in parts.leaving.whole(torch.float32, every, gradient, names=parts.trained):
            assert tensor is not None
            yield name, tensor

    def close(self) -> None:
        """End the save under way, forget model and optimizer; process groups stay until `World.leave`.

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

    def _updater(self) -> Updater:
        updater = self._ready().updater
        if updater is None:
            raise StateError(
                "this engine is `inference_only`: it holds nothing to train, to save or to resume"
            )
        return updater

    def _check_mode(self, forward_only: bool) -> None:
        if forward_only:
            if self._mode is _Mode.NONE:
                raise StateError("`forward_backward_step` outside a mode; use `with engine.eval_mode():`")
            return
        if self._mode is not _Mode.TRAIN:
            raise StateError(f"training in {self._mode.value}; use `with engine.train_mode():`")
        if self._loss_fn is None:
            raise StateError("training without a loss; call `set_loss_fn` first")
        self._updater().check_open()


def _itself(param: torch.nn.Parameter) -> torch.Tensor:
    return param
