"""`Fsdp2Engine`: the training-engine interface over a sharded Hugging Face model."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from offbeat_engine.base import EngineBase
from offbeat_engine.config import require_config
from offbeat_engine.errors import ConfigError, EngineError, StateError
from offbeat_engine.fsdp2 import checkpoint, checks
from offbeat_engine.fsdp2.build import EngineState, build_state
from offbeat_engine.fsdp2.config import Fsdp2Config
from offbeat_engine.fsdp2.model.building import kernels
from offbeat_engine.fsdp2.self_check import find_difference, find_non_finite
from offbeat_engine.fsdp2.stepping import run_step, step_of
from offbeat_engine.fsdp2.weights import export as weights
from offbeat_engine.fsdp2.weights import lora
from offbeat_engine.toolkit.collectives import compute_dtype, first_said

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterator
    from contextlib import AbstractContextManager

    from offbeat_engine.batch import Predictions, StepContext, TrainBatch, WeightSpec
    from offbeat_engine.config import Capabilities, EngineConfig, Refusal
    from offbeat_engine.fsdp2.memory.updater import Updater
    from offbeat_engine.interface import Engine
    from offbeat_engine.toolkit.state.saves import Destination, SaveHandle
    from offbeat_engine.toolkit.step.micro_batches import StepRequest
    from offbeat_engine.toolkit.world import World


class Fsdp2Engine(EngineBase[EngineState]):
    """Hugging Face causal models on 1..N ranks with `fully_shard`, gloo on CPU and NCCL on GPU.

    One float32 rank runs unsharded (see `fsdp2.memory.sharding.shard`). On a CPU in float32, the same calls on the same
    data and number of ranks give the same bits.
    """

    Config = Fsdp2Config

    def __init__(self, config: EngineConfig, world: World) -> None:
        super().__init__(config, world)
        self._config = require_config(config, Fsdp2Config)
        self._failure = ""

    @classmethod
    def capabilities(cls) -> Capabilities:  # noqa: D102
        return checks.capabilities()

    @classmethod
    def check(cls, config: EngineConfig, num_ranks: int) -> list[Refusal]:  # noqa: D102
        return checks.refusals(require_config(config, Fsdp2Config), num_ranks, files=True)

    def init_model(self) -> None:
        """Build, shard and prepare everything.

        Raises:
            ConfigError: `check` refuses the config, or the folder holds no model that fits it.
            StateError: called twice, or other ranks exist and `World.join` was not called.
        """
        self._check_new()
        # Of the weights each rank finds out as it reads them: its folder may be another than that of its neighbour.
        refused = checks.refusals(self._config, self.world.size, files=False)
        checks.require(self._config, self.world, refused)
        self._state = build_state(self._config, self.world)
        difference = self._difference(self._state)
        if difference is not None:
            self.close()
            raise ConfigError(difference)

    def _difference(self, state: EngineState) -> str | None:
        """Return why this model must not be used here (see `self_check`), the same on all ranks, or None."""
        dropout = self.config.model.dropout or self.config.inference_only
        # Agreed on before the second: that is a collective.
        with state.weights.resident():
            failure = find_non_finite(state.scorer.hf)
        failure = first_said(self.world, failure)
        if failure is not None:
            return failure
        mine = find_difference(self, state, packed=self._config.packing, dropout=dropout)
        return first_said(self.world, mine)

    @contextmanager
    def base_mode(self) -> Generator[None]:  # noqa: D102
        with lora.left_out(self._ready().scorer.hf), self.eval_mode():
            yield

    def _updates(self) -> Updater:
        return self._ready().updater

    def _set_training(self, training: bool) -> None:
        self._ready().scorer.train(training)

    @contextmanager
    def _resident(self, optimizer: bool = False) -> Generator[None]:
        state = self._ready()
        with state.weights.resident(), state.moments.resident() if optimizer else nullcontext():
            yield

    def _borrowed(self) -> AbstractContextManager[None]:
        return kernels(self._config)

    def _run(self, request: StepRequest, batch: TrainBatch, ctx: StepContext) -> Predictions:
        state = self._ready()
        if self._failure:
            raise StateError(
                f"the model failed in an earlier training call ({self._failure}); make a new engine"
            )
        try:
            return run_step(step_of(state, self._config, request), batch, ctx)
        except EngineError:
            raise
        except Exception as error:
            if state.sharded and request.loss_fn is not None:  # FSDP keeps gradients of earlier micro-batches
                self._failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            state.routers.take(None)
            state.reshard()

    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        """Move what waits between the modes; inside one, this takes effect when it ends.

        On a CPU host memory is the device's own, so everything goes out and comes straight back.
        """
        state = self._ready()
        if device not in ("cpu", self.world.device):
            raise ConfigError(f'`device` must be "cpu" or "{self.world.device}", got {device!r}')
        for offloadable, wanted in ((state.weights, model), (state.moments, optimizer)):
            if wanted:
                offloadable.stay(in_host=device == "cpu")
                if device == self.world.device:
                    offloadable.stay(in_host=False)

    def _save(self, where: Destination, block: bool) -> SaveHandle:
        return checkpoint.save(self._saves, self._target(), where, block)

    def _load(self, folder: Path, verified: bool) -> None:
        checkpoint.load(self._saves, self._target(), folder, verified)

    def export_huggingface(self, path: str) -> None:  # noqa: D102
        state = self._ready()
        self._saves.finish_last()
        with state.weights.resident():
            weights.export_folder(
                self._saves.world,  # flushing tens of gigabytes may outlast the deadline of other calls
                Path(path),
                state.scorer.hf,
                self._sources(),
                compute_dtype(self._config),
                self._config.model.path,
            )

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight, one whole tensor at a time; it may share memory with the live weight."""
        dtype = compute_dtype(self._config)
        return self._ready().weights.handed_out(weights.stream(self._sources(), dtype))

    def named_weights_on(self, ranks: Collection[int]) -> Iterator[tuple[str, torch.Tensor | None]]:  # noqa: D102
        dtype, rank = compute_dtype(self._config), self.world.rank
        named = weights.stream_on(self._sources(), dtype, frozenset(ranks), rank)
        return self._ready().weights.handed_out(named)

    def weight_manifest(self) -> tuple[WeightSpec, ...]:  # noqa: D102
        return weights.specs(self._sources(), compute_dtype(self._config))

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:  # noqa: D102
        self._accumulation.check_gradients()
        gradients = weights.gradients(self._ready().scorer.hf, lora.kind_of(self._config.lora))
        return self._ready().weights.handed_out(weights.stream(gradients, torch.float32))

    def take_weights(self, other: Engine, keep: float = 0.0) -> None:  # noqa: D102
        self._check_trained()
        if not 0 <= keep <= 1:
            raise ConfigError(f"`keep` must lie in 0..1, got {keep}")
        if not isinstance(other, Fsdp2Engine):
            raise StateError(
                f"weights are taken over from another Fsdp2Engine, not from {type(other).__name__}"
            )
        own, others = (
            {name: weights.local(param.detach()) for name, param in engine._updates().params.items()}  # noqa: SLF001 one of us
            for engine in (self, other)
        )
        if {name: one.shape for name, one in own.items()} != {
            name: one.shape for name, one in others.items()
        }:
            raise StateError(
                "the other engine trains other weights, or has them cut otherwise: take the same model and ranks"
            )
        with self._resident(), other._resident():  # noqa: SLF001
            for name, shard in own.items():
                shard.lerp_(others[name], 1 - keep)

    def _sources(self) -> list[weights.Source]:
        return weights.exported(self._ready().scorer.hf, lora.kind_of(self._config.lora))

    def _target(self) -> checkpoint.Target:
        state = self._ready()
        return checkpoint.target_of(self.world, state.scorer, state.updater)
