"""The one training-engine interface, and engines by name. Actor, critic and reference know nothing else.

The method names follow verl's training-engine RFC (github.com/volcengine/verl issue 1371), typed and completed.

Names are open to third parties through the entry-point group `offbeat.engines`. An engine's module may take seconds to import,
and its settings are read long before. So it may name its config class in a second group, `offbeat.engine_configs`, in a module
that imports little; one that does not is asked for its `Config`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, ClassVar, Literal, cast, overload

from offbeat_engine.config import EngineConfig, require_config
from offbeat_engine.errors import ConfigError, StateError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from contextlib import AbstractContextManager

    import torch
    from tensordict import TensorDict

    from offbeat_engine.batch import (
        LossFn,
        PostprocessFn,
        Predictions,
        PreprocessFn,
        StepContext,
        TrainBatch,
        WeightSpec,
    )
    from offbeat_engine.config import Capabilities, Refusal
    from offbeat_engine.toolkit.state.saves import SaveHandle
    from offbeat_engine.toolkit.world import World


class Engine(ABC):
    """A model, its optimizer and the ranks they live on, behind one interface.

    Every rank constructs one with the same config and calls the same methods in the same order: all methods
    but `capabilities`, `check`, `shard_data` and `weight_manifest` may be collectives.

    An engine with settings of its own says so with `Config`, a subclass of `EngineConfig`: what it is made with, what
    `check` is given, and what the recipes read `engine.*` by.
    """

    Config: ClassVar[type[EngineConfig]] = EngineConfig

    def __init__(self, config: EngineConfig, world: World) -> None:
        """Keep `config` and `world`; nothing heavy happens before `init_model`.

        Raises:
            ConfigError: `config` is not one of this engine's.
        """
        self.config = require_config(config, self.Config)
        self.world = world
        self._shards: list[list[int]] | None = None  # of the last `shard_data`: the rows of each data shard

    @property
    def data_size(self) -> int:
        """Into how many data shards `shard_data` cuts a batch. Ranks that work on the same sequences have the same one."""
        return self.world.size // self.config.model_parallel_size

    @property
    def data_rank(self) -> int:
        """Which of those data shards this rank has, from 0."""
        return self.world.rank // self.config.model_parallel_size

    @property
    def is_leader(self) -> bool:
        """Whether this rank leads the ranks of its data shard: exactly one does, and it holds the predictions."""
        return self.world.rank % self.config.model_parallel_size == 0

    @classmethod
    @abstractmethod
    def capabilities(cls) -> Capabilities:
        """Return what this engine can do, without importing a model or starting a process."""

    @classmethod
    @abstractmethod
    def check(cls, config: EngineConfig, num_ranks: int) -> list[Refusal]:
        """Return every reason why this engine cannot run `config` on `num_ranks` ranks; empty means it can."""

    @abstractmethod
    def init_model(self) -> None:
        """Build and shard model, optimizer and schedule. Call once, before anything else."""

    @abstractmethod
    def train_mode(self) -> AbstractContextManager[None]:
        """Context in which training is allowed: loads what is offloaded, sets the model to train."""

    @abstractmethod
    def eval_mode(self) -> AbstractContextManager[None]:
        """Context for forward-only use: loads the model (not the optimizer), sets it to eval."""

    def base_mode(self) -> AbstractContextManager[None]:
        """`eval_mode` in which the base answers without its adapters: the reference of a policy trained with LoRA.

        Raises:
            StateError: there are no adapters, or a value head is trained beside them.
        """
        raise StateError(f"{type(self).__name__} has no adapters to leave out; use `eval_mode`")

    @abstractmethod
    def set_loss_fn(self, loss_fn: LossFn) -> None:
        """Use `loss_fn` in every later training call."""

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

    @abstractmethod
    def forward_backward_step(
        self,
        batch: TrainBatch,
        ctx: StepContext | None = None,
        forward_only: bool = False,
        preprocess_fn: PreprocessFn | None = None,
        postprocess_fn: PostprocessFn | None = None,
        predict: bool = True,
    ) -> tuple[Predictions, StepContext] | tuple[Predictions, float, StepContext]:
        """Run forward (and backward) over this rank's whole mini-batch and accumulate gradients.

        The engine splits `batch` into micro-batches itself, by token budget. Ranks may hold different numbers of
        sequences, also none; all run equally many micro-batches, empty ones included. What goes wrong on one rank in
        its batch, a loss or a hook is raised on all of them. What the model itself raises (memory that runs out on a device) is
        raised on that rank alone: the others wait inside a collective until `EngineConfig.collective_timeout_s`, and the ranks have
        to be started again. Either way the gradients are dropped.

        Args:
            batch: this rank's sequences; an empty batch (B = 0) is allowed, on all ranks even.
            ctx: see `StepContext`; None makes a fresh one.
            forward_only: no loss, no gradient; returns `(predictions, ctx)`.
            preprocess_fn: see `PreprocessFn`.
            postprocess_fn: see `PostprocessFn`.
            predict: false leaves the predictions out: training rarely needs them, and gathering them costs.

        Returns:
            `(predictions, loss, ctx)`: detached predictions in the order and on the device of `batch`, the global loss
            (the same on all ranks) and the filled context; without the loss when `forward_only`. All ranks that hold
            outputs have the same keys; the others, leaders never among them, have none (`unshard_data` brings the
            predictions to all).

        Raises:
            BatchError: `batch`, or what `preprocess_fn` made of it, breaks the schema on some rank.
            NonFiniteError: the loss is not finite and the config says stop (all ranks raise together).
            StateError: no loss function was set, or the engine is not in `train_mode`.
            StepError: a loss or hook raised on some rank.
        """

    @abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Drop accumulated gradients."""

    @abstractmethod
    def optimizer_step(self, lr: float | None = None, betas: tuple[float, float] | None = None) -> float:
        """Clip, step, and return the global gradient norm before clipping.

        `lr` and `betas` are those of this step alone, the same on all ranks; None: what schedule and config say.

        NaN says that the step was skipped, 0.0 also that there was nothing to step on: where no rank had a token under its
        `loss_mask`, weights, moments and schedule stay as they are, untouched by momentum and weight decay.

        Raises:
            ConfigError: `lr` or `betas` is out of range; nothing was stepped.
        """

    @abstractmethod
    def lr_scheduler_step(self) -> float:
        """Advance the schedule by the optimizer step just taken and return the learning rate of the next one.

        After a step that was skipped, or had nothing to step on, it stays where it is: the schedule counts what the
        optimizer's own moments count.
        """

    def shard_data(self, data: TrainBatch) -> TrainBatch:
        """Return this rank's data shard of `data` (the same on all ranks), balanced by tokens, no communication.

        Ranks that work on the same sequences get the same shard, and must be given it whole.

        Raises:
            BatchError: `data` lacks a required key of the schema.
        """
        from offbeat_engine.toolkit.step.planning import (
            take_shard,  # imports torch, and names are looked up before
        )

        shard, self._shards = take_shard(data, self.data_rank, self.data_size)
        return shard

    def unshard_data(self, data: TensorDict) -> TensorDict:
        """Gather the leaders' rows back into the order of the last `shard_data`, on the CPU; the same on all ranks.

        Raises:
            StateError: `shard_data` was not called, or a leader's `data` has not as many rows as that gave it.
        """
        from offbeat_engine.toolkit.step.planning import gather_shards

        if self._shards is None:
            raise StateError("`unshard_data` before `shard_data`: there is no order to go back to")
        return gather_shards(data, self._shards, self.world, self.data_rank, leads=self.is_leader)

    @abstractmethod
    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        """Move parameters and gradients, optimizer state, or both, to `device` ("cpu" or the world's own).

        That is where they are outside the modes; inside one, it takes effect when the mode ends.
        """

    @abstractmethod
    def save_checkpoint(
        self,
        local_path: str,
        remote_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        block: bool = True,
    ) -> SaveHandle:
        """Write model, optimizer, schedule and random state as `local_path/step_<global_step>`, atomically.

        Whoever finds the folder finds it whole: it is written beside and renamed last. Older checkpoints beyond
        `max_ckpt_to_keep` are removed after the new one is whole: those written first, whatever their step.

        Without `block` an engine may return as soon as what it saves can change no more (copied to host memory, say), and
        write it in the background; one that cannot blocks. Two saves never overlap: the next save, a load, an export and
        `close` wait for the one under way, and raise what went wrong unless `SaveHandle.wait` did.

        Args:
            local_path: folder of all checkpoints of this engine, shared by all ranks.
            remote_path: any fsspec URL (s3://, hdfs://, file://); the finished folder is copied there too.
            global_step: the number in the folder's name.
            max_ckpt_to_keep: None keeps all; at least 1.
            block: return only when the checkpoint is whole, copied, and older ones are pruned.

        Raises:
            CheckpointError: it, or the one before, could not be written; nothing half-written is left under the final name.
            ConfigError: `max_ckpt_to_keep` is less than 1.
        """

    @abstractmethod
    def load_checkpoint(
        self, local_path: str, remote_path: str | None = None, global_step: int | None = None
    ) -> int | None:
        """Load the checkpoint of `global_step`, or the whole one of the highest step, onto any number of ranks.

        Its files are compared with what was written before anything is made of them.

        Returns:
            Its step, or None when there is no whole checkpoint and no step was asked for.

        Raises:
            CheckpointError: the step asked for is not there, or what is there is damaged or does not fit the model.
        """

    @abstractmethod
    def export_huggingface(self, path: str) -> None:
        """Write config, tokenizer and full weights as a Hugging Face safetensors folder, atomically.

        With adapters exported alone (`LoraExport.ADAPTER`) it is a folder that peft loads over the base.

        Raises:
            CheckpointError: it could not be written, or the folder there holds no model, or is the one this model was read from.
        """

    @abstractmethod
    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight in the order of `weight_manifest`: Hugging Face name, full tensor, compute dtype.

        What is no parameter (a buffer) may leave in another dtype, as its spec says.
        A collective: every rank iterates to the end. Tied weights appear once, under the name that
        `save_pretrained` keeps. With LoRA these are the base's weights with the adapter merged in, or the adapter
        alone, as the config says and each spec's `kind` repeats.

        What was yielded stays as it is until the next call that changes weights or moves them: whoever sends them reads
        several at a time, and some of them after the last has come. A tensor may be the live weight, never memory that a
        later one is gathered in.
        """

    def named_weights_on(self, ranks: Collection[int]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """As `named_weights`, for those of `ranks` alone: the others take part, and get None in place of each tensor.

        A collective: every rank iterates to the end, and is given the same `ranks`. An engine that holds shards spares the
        others the whole tensors. Here, for engines that know no better, these come to every rank and are let go of at once.
        """
        here = self.world.rank in ranks
        return ((name, tensor if here else None) for name, tensor in self.named_weights())

    @abstractmethod
    def weight_manifest(self) -> tuple[WeightSpec, ...]:
        """Return names, shapes and dtypes of `named_weights`, the same on all ranks, moving nothing.

        Where no rank knows them all, the ranks tell each other in `init_model`, once.
        """

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the accumulated gradient of every trained parameter: its name, full tensor, float32.

        Where `Feature.NAMED_GRADIENTS` is declared. A collective: every rank iterates to the end. The sum over all ranks and
        micro-batches since `optimizer_zero_grad`, before clipping; names as in `named_weights` where a parameter is
        exported, peft's for adapters. For debugging and for the conformance suite, not for training.

        Raises:
            StateError: nothing has been accumulated, or the engine does not have them.
        """
        raise StateError(f"{type(self).__name__} does not hand out gradients (`Feature.NAMED_GRADIENTS`)")

    def take_weights(self, other: Engine, keep: float = 0.0) -> None:
        """Let every trained weight be `keep` (0 to 1) of what it is and 1 - `keep` of what `other` has, in float32.

        Where `Feature.TAKE_WEIGHTS` is declared. A collective. `other` is an engine of the same kind, model and ranks, and stays as it
        is; so do moments and schedule here. 0 copies; repeated with 0.99, say, this is the moving average of `other`.

        Raises:
            ConfigError: `keep` is out of range.
            StateError: `other` has other weights, or this engine cannot.
        """
        del other, keep
        raise StateError(f"{type(self).__name__} does not take weights over (`Feature.TAKE_WEIGHTS`)")

    @abstractmethod
    def close(self) -> None:
        """Release device memory and leave nothing running; safe to call twice."""


ENTRY_POINT_GROUP = "offbeat.engines"
CONFIG_GROUP = "offbeat.engine_configs"


def engine_names() -> list[str]:
    """Return the names of all installed engines, sorted."""
    return sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)})


def engine_class(name: str) -> type[Engine]:
    """Return the engine registered as `name`, importing its module now and not before.

    Raises:
        ConfigError: nothing is registered under that name.
    """
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            return cast("type[Engine]", point.load())
    raise ConfigError(
        f"no training engine named {name!r}; installed: {', '.join(engine_names())}. "
        f"A package adds one through the entry-point group {ENTRY_POINT_GROUP!r}."
    )


def engine_config_class(name: str) -> type[EngineConfig]:
    """Return the class that the settings of engine `name` are read by, importing as little as the engine lets.

    Raises:
        ConfigError: nothing is registered under that name.
    """
    for point in entry_points(group=CONFIG_GROUP):
        if point.name == name:
            return cast("type[EngineConfig]", point.load())
    return engine_class(name).Config
