"""The settings of a run: one frozen tree, composed of the packages' own settings.

Sections extend the dataclass of the package they are for, so no field is written twice; where a plug-in brings a class of
its own, `offbeat_recipes.settings.sections` extends that. A field that is derived from another setting says so in its metadata and
cannot be set: `model.dtype` decides the precision of engine and replicas. `offbeat_recipes.settings.reading` reads and checks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import ConfigDict, Field

from offbeat_ckptsync.toolkit.config import SyncConfig
from offbeat_engine.config import Dtype, EngineConfig, LoraExport, ModelConfig, bounded
from offbeat_engine.interface import engine_config_class
from offbeat_recipes.tasks.config import CharTaskConfig, TaskConfig
from offbeat_rollout.config import LoraConfig, RolloutConfig
from offbeat_rollout.toolkit.registry import rollout_config_class
from offbeat_trainer.config import (
    AlgorithmConfig,
    AsyncConfig,
    ClusterConfig,
    EnvironmentConfig,
    LoopConfig,
    OnFailure,
    Placement,
    RewardConfig,
    RewardFrom,
    SamplingConfig,
    WarmupConfig,
)
from offbeat_trainer.rollouts.own import scores_itself


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncMode:
    """Generate and train in turns, on fresh weights. What `AsyncConfig` has else is its nature."""

    name: Literal["sync"] = "sync"  # how generation and training take turns
    over_sampling: float = bounded(0.0, at_least=0)  # share of groups begun beyond those a step takes


@dataclass(frozen=True, slots=True, kw_only=True)
class OneStepOffMode:
    """Generate the next step's groups while this one trains. What `AsyncConfig` has else is its nature."""

    name: Literal["one_step_off"] = "one_step_off"  # how generation and training take turns
    over_sampling: float = bounded(0.0, at_least=0)  # share of groups begun beyond those a step takes


@dataclass(frozen=True, slots=True, kw_only=True)
class FullyAsyncMode(AsyncConfig):
    """Generate as far ahead as `max_staleness` allows."""

    name: Literal["fully_async"] = "fully_async"
    max_attempts: int = field(default=3, metadata={"derived": "reward.max_attempts, and is one more"})


ModeConfig: TypeAlias = Annotated[SyncMode | OneStepOffMode | FullyAsyncMode, Field(discriminator="name")]


Device: TypeAlias = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection(ModelConfig):
    """Which model is trained. An empty `path` means that the task makes one.

    `path` is a Hugging Face folder, or "owner/name" or "owner/name@revision" of a model that is in the hub's cache on this machine.
    """

    path: str = ""
    seed: int = field(default=0, metadata={"derived": "seed"})
    head: Literal["lm", "value"] = field(default="lm", metadata={"derived": "the role"})
    dtype: Dtype = Dtype.FLOAT32  # precision in which ranks and replicas compute; master weights are float32


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSection(EngineConfig):
    """The training engine and how many ranks it has. `threads_per_rank` 0 shares the cores among the ranks.

    Ranks wait for each other for `trainer.step_timeout_s`; a checkpoint may take six times that.

    The rest are settings of the engine itself: `offbeat_recipes.settings.sections` adds those that `name` has of its own.
    """

    name: str = "fsdp2"  # training engine: an installed one, or the path of a class
    num_ranks: int = bounded(1, at_least=1, speed=True)  # processes that train, a device each on GPU
    threads_per_rank: int = bounded(0, at_least=0, speed=True)
    model: ModelConfig = field(
        default_factory=lambda: ModelConfig(path=""), metadata={"derived": "the section `model`"}
    )
    dtype: Dtype = field(default=Dtype.FLOAT32, metadata={"derived": "model.dtype"})
    device: Device = field(default="cpu", metadata={"derived": "device"})
    max_sequence_tokens: int = field(default=0, metadata={"derived": "rollout.max_model_len"})
    inference_only: bool = field(default=False, metadata={"derived": "the role"})
    collective_timeout_s: float = field(default=600.0, metadata={"derived": "trainer.step_timeout_s"})
    checkpoint_timeout_s: float = field(default=3600.0, metadata={"derived": "trainer.step_timeout_s"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSection(RolloutConfig):
    """The generation engine and how many replicas of it run.

    `cpu_threads` 0: colocated, the cores are shared among the replicas, as they are among the ranks; else one each. The
    rest are settings of the adapter itself: `offbeat_recipes.settings.sections` adds those that `name` has of its own.
    """

    name: str = "vllm"  # adapter of the generation engine
    num_replicas: int = bounded(1, at_least=1, speed=True)  # copies of the generation engine
    cpu_threads: int = bounded(0, at_least=0, speed=True)
    model_path: str = field(default="", metadata={"derived": "model.path"})
    trust_remote_code: bool = field(default=False, metadata={"derived": "model.trust_remote_code"})
    dtype: Literal["float32", "bfloat16"] = field(default="float32", metadata={"derived": "model.dtype"})
    device: Device = field(default="cpu", metadata={"derived": "device"})
    lora: LoraConfig = field(default_factory=LoraConfig, metadata={"derived": "engine.lora"})
    start_timeout_s: float = field(default=300.0, metadata={"derived": "trainer.step_timeout_s"})
    request_timeout_s: float = field(default=600.0, metadata={"derived": "trainer.step_timeout_s"})
    stop_strings: bool = field(default=False, metadata={"derived": "sampling.stop"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSection(AlgorithmConfig):
    """What is learned. `name` is an installed algorithm, or the path of a class (`mine.py:Mine`); the rest are its settings."""

    name: str = "grpo"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSection(TaskConfig):
    """Where prompts and rewards come from: an installed task, or the path of a class (`reverse.py:Reverse`); the rest are its settings."""

    name: str = "arithmetic"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoEnvironment:
    """One turn a prompt, or what `rollout` makes of it: what a run has that names no `environment.path`."""

    name: Literal["none"] = field(default="none", metadata={"derived": "environment.path"})
    rollout: str = ""  # class of your own that makes scored groups of prompts, "package.module:Name" or "folder/file.py:Name"
    args: dict[str, Any] = field(
        default_factory=dict[str, Any], metadata={"free": True}
    )  # what `rollout` is made with, beside its setup


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSection(EnvironmentConfig):
    """Several turns, in the environment that `path` names. How long a call of it may take, how many run at a time and what follows a failure, the section `reward` says."""

    name: Literal["own"] = field(default="own", metadata={"derived": "environment.path"})
    timeout_s: float = field(default=60.0, metadata={"derived": "reward.timeout_s"})
    concurrency: int = field(
        default=2, metadata={"derived": "reward.concurrency and the cores of this machine"}
    )
    max_attempts: int = field(default=2, metadata={"derived": "reward.max_attempts"})
    on_failure: OnFailure = field(default=OnFailure.DROP, metadata={"derived": "reward.on_failure"})


EnvironmentChoice: TypeAlias = Annotated[NoEnvironment | EnvironmentSection, Field(discriminator="name")]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSection(SyncConfig):
    """How new weights reach the replicas: by where the processes are, unless a `transport` is named.

    Of the deadlines of its phases `transfer_timeout_s` is one; a flip may take a fifth of it, the others a tenth.
    """

    transport: str = "auto"
    host: str = field(default="127.0.0.1", metadata={"derived": "cluster.rendezvous_host"})
    secret: str = field(default="", repr=False, metadata={"derived": "the run, which makes one"})
    device: Device = field(default="cpu", metadata={"derived": "device"})
    begin_timeout_s: float = field(default=30.0, metadata={"derived": "sync.transfer_timeout_s"})
    verify_timeout_s: float = field(default=30.0, metadata={"derived": "sync.transfer_timeout_s"})
    flip_timeout_s: float = field(default=60.0, metadata={"derived": "sync.transfer_timeout_s"})
    commit_timeout_s: float = field(default=30.0, metadata={"derived": "sync.transfer_timeout_s"})
    silent: Literal["fence", "fail"] = field(
        default="fence", metadata={"derived": "the run, which goes on without a replica that says nothing"}
    )
    allow_cast: bool = field(default=False, metadata={"derived": "model.dtype, which all have"})
    disk_path: str = field(default="", metadata={"derived": "run_dir"})
    canary_tolerance: float = field(default=0.05, metadata={"derived": "sync.canary"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSection(ClusterConfig):
    """Machines and processes. In `health_timeout_s` they are asked for their health twelve times.

    `device_memory_gib` is what one GPU has there, for a plan that is made where there is none; 0: what this machine's GPUs have.
    """

    device_memory_gib: float = bounded(0.0, at_least=0)
    start_timeout_s: float = field(default=300.0, metadata={"derived": "trainer.step_timeout_s"})
    health_period_s: float = field(default=5.0, metadata={"derived": "cluster.health_timeout_s"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSection(LoopConfig):
    """How long a run is, and of what a step is made.

    `epochs` counts in place of `steps`: one is as many steps as the prompts of the task fill, each prompt once. 0: `steps` says.
    """

    epochs: int = bounded(0, at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupSection(WarmupConfig):
    """Supervised training, before reinforcement learning or alone. Its rate rises for 20 steps, or half of few."""

    lr_warmup_steps: int = field(default=20, metadata={"derived": "warmup.steps"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    """Where a run tells what is going on, besides its JSONL files.

    `trackers` are any of "tensorboard", "wandb" (sent later, with `wandb sync`), "wandb_online", "trackio", which stays on this machine,
    and those of others, see `offbeat_recipes.run.reporting`. "trajectories" keeps all that each step trained, to be read,
    "trajectories_<n>" that of n prompts a step. The project of W&B is that of the variable WANDB_PROJECT; Trackio's is "offbeat".
    """

    console: bool = True  # whether the terminal shows progress
    trackers: tuple[str, ...] = ("tensorboard",)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything a run is told.

    `resume` "auto" goes on from the newest whole checkpoint of the run folder. `device` is where training and generation run. `replay`
    is the folder of an asynchronous run whose recorded schedule this one follows, docs/asynchrony.md.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str = ""  # what the run is called; by default as its task
    run_dir: str = ""  # folder of the run; by default runs/<name>, with a number where that is taken
    seed: int = bounded(0, at_least=0, at_most=2**63 - 1)  # what vLLM and torch both take
    resume: Literal["never", "auto"] = "never"
    replay: str = ""
    device: Device = "cpu"
    mode: ModeConfig = field(default_factory=SyncMode)
    task: TaskConfig = field(default_factory=TaskSection)
    model: ModelSection = field(default_factory=ModelSection)
    trainer: TrainerSection = field(default_factory=TrainerSection)
    warmup: WarmupSection = field(default_factory=WarmupSection)
    reward: RewardConfig = field(default_factory=RewardConfig)
    environment: EnvironmentChoice = field(default_factory=NoEnvironment)
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    engine: EngineSection = field(default_factory=EngineSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    sync: SyncSection = field(default_factory=SyncSection)
    cluster: ClusterSection = field(default_factory=ClusterSection)
    report: ReportConfig = field(default_factory=ReportConfig)

    def model_config(self, path: str) -> ModelConfig:
        """Return what an engine is told of the model in folder `path`."""
        derived: dict[str, Any] = {"path": path, "seed": self.seed}
        return ModelConfig(**{**_as(ModelConfig, self.model), **derived})

    @property
    def shared_task(self) -> TaskConfig:
        """The task, whose model, if it makes one, has heads that the ranks of a layer can share out."""
        if not isinstance(self.task, CharTaskConfig):
            return self.task
        names = ("tensor_parallel_size", "sequence_parallel_size")
        sharing = [getattr(section, name, 1) for section in (self.engine, self.rollout) for name in names]
        return self.task.shaped(*sharing)

    @property
    def folder(self) -> Path:
        """The run folder: `run_dir`, or runs/<name>."""
        return Path(self.run_dir or f"runs/{self.name or self.task.name.rpartition(':')[2]}")

    @property
    def asynchrony(self) -> AsyncConfig:
        """What the loop is told of running ahead; the rest is the nature of `sync` and `one_step_off`."""
        attempts = self.reward.max_attempts + 1
        if isinstance(self.mode, FullyAsyncMode):
            return replace(self.mode, max_attempts=attempts)
        return AsyncConfig(over_sampling=self.mode.over_sampling, max_attempts=attempts)

    @property
    def max_new_tokens(self) -> int:
        """The most tokens that follow a prompt: of one turn, or of all turns with an environment, what it says included."""
        return self.sampling.max_tokens if self.turns is None else self.turns.max_tokens

    @property
    def own_rollout(self) -> str:
        """The path of the rollout that the user brings, or ""."""
        return self.environment.rollout if isinstance(self.environment, NoEnvironment) else ""

    @property
    def scored_apart(self) -> bool:
        """Whether the environment or the user's rollout says what completions are worth, and the task need not."""
        if self.turns is None:
            return scores_itself(self.own_rollout)
        return self.turns.reward_from is RewardFrom.ENVIRONMENT

    @property
    def turns(self) -> EnvironmentConfig | None:
        """The environment that is acted in; None where a prompt has one turn."""
        if not isinstance(self.environment, EnvironmentSection):
            return None
        told = self.reward
        return replace(
            self.environment,
            timeout_s=told.timeout_s,
            concurrency=min(told.concurrency, len(os.sched_getaffinity(0))),
            max_attempts=told.max_attempts,
            on_failure=told.on_failure,
        )

    def counted(self, num_prompts: int) -> RunConfig:
        """Return the same run by `trainer.steps` alone: `trainer.epochs`, if any, over `num_prompts` of the task; 0: it has no number."""
        loop = self.trainer
        if not loop.epochs or not num_prompts:
            return self
        steps = loop.epochs * (num_prompts // loop.prompts_per_step)
        return replace(self, trainer=replace(loop, steps=steps, epochs=0))

    @property
    def num_updates(self) -> int:
        """Optimizer steps of the whole run, the warm-up not counted."""
        return self.trainer.steps * self.trainer.updates_per_step

    def engine_config(self, path: str) -> EngineConfig:
        """Return the settings of a training engine for the model in folder `path`.

        They are of the engine's own class. `optimizer.total_steps` is the number of optimizer steps of the run.
        """
        optimizer = self.engine.optimizer
        derived: dict[str, Any] = {
            "model": self.model_config(path),
            "dtype": self.model.dtype,
            "device": self.device,
            "max_sequence_tokens": self.rollout.max_model_len,
            "collective_timeout_s": self.trainer.step_timeout_s,
            "checkpoint_timeout_s": 6 * self.trainer.step_timeout_s,
            "optimizer": replace(optimizer, total_steps=self.num_updates),
        }
        cls = engine_config_class(self.engine.name)
        return cls(**{**_as(cls, self.engine), **derived})

    @property
    def generates(self) -> bool:
        """Whether the algorithm learns from what replicas generate; else nothing is generated, and no replica runs."""
        return not self.algorithm.written_rows

    @property
    def alone(self) -> RunConfig:
        """The same run with the replicas that it starts: none where nothing is generated, whatever the settings say."""
        if self.generates:
            return self
        separate = replace(self.cluster, placement=Placement.SEPARATE)
        none = replace(self.rollout, num_replicas=0, cpu_threads=1)
        return replace(self, rollout=none, cluster=separate, mode=SyncMode())

    @property
    def supervised(self) -> WarmupConfig:
        """What supervised training is told: the section `warmup`, with a learning rate that fits where none was given."""
        drawn = self.model.random_init or not self.model.path
        fitting = 1e-3 if drawn else 1e-4 if self.engine.lora.rank else 1e-5
        return replace(self.warmup, lr=fitting if self.warmup.lr is None else self.warmup.lr)

    @property
    def colocated(self) -> bool:
        """Whether training and generation take turns on the same devices."""
        return self.cluster.placement is Placement.COLOCATED

    @property
    def start_timeout_s(self) -> float:
        """How long the start of a process may take: `trainer.step_timeout_s`, and five minutes where that is less."""
        return max(300.0, self.trainer.step_timeout_s)

    def replica_threads(self, num_cores: int) -> int:
        """Return how many of `num_cores` each process of a replica computes with, on a CPU."""
        rollout = self.rollout
        if rollout.cpu_threads or not self.colocated:
            return rollout.cpu_threads or 1
        return max(1, num_cores // (rollout.num_replicas * rollout.tensor_parallel_size))

    def rollout_config(self, path: str, num_cores: int = 1) -> RolloutConfig:
        """Return the adapter's settings of one replica for the model in folder `path`, on `num_cores` for all."""
        derived: dict[str, Any] = {
            "model_path": path,
            "trust_remote_code": self.model.trust_remote_code,
            "dtype": self.model.dtype.value,
            "device": self.device,
            "cpu_threads": self.replica_threads(num_cores),
            "lora": self._lora,
            "start_timeout_s": self.start_timeout_s,
            "request_timeout_s": max(600.0, self.trainer.step_timeout_s),  # of work without a token
            "stop_strings": bool(self.sampling.stop),
        }
        cls = rollout_config_class(self.rollout.name)
        if "updates_by" in cls.__dataclass_fields__:  # SGLang
            ways = {"cuda_ipc": "tensors", "broadcast": "group"} if self.device == "cuda" else {}
            derived["updates_by"] = ways.get(self.sync.transport, "files")
        return cls(**{**_as(cls, self.rollout), **derived})

    @property
    def sends_adapter_alone(self) -> bool:
        """Whether replicas hold the base weights and get no more than the adapter over them."""
        return bool(self.engine.lora.rank) and self.engine.lora.export is LoraExport.ADAPTER

    @property
    def _lora(self) -> LoraConfig:
        lora = self.engine.lora
        if not self.sends_adapter_alone:
            return LoraConfig()
        return LoraConfig(rank=lora.rank, alpha=lora.alpha, targets=lora.targets)

    def sync_config(self) -> SyncConfig:
        """Return the settings of the weight sync; files go to the run folder."""
        transfer_s = self.sync.transfer_timeout_s
        derived: dict[str, Any] = {
            **dict.fromkeys(("begin_timeout_s", "verify_timeout_s", "commit_timeout_s"), transfer_s / 10),
            "flip_timeout_s": transfer_s / 5,
            "host": self.cluster.rendezvous_host or "127.0.0.1",
            "device": self.device,
            "disk_path": str((self.folder / "sync").absolute()),
        }
        return SyncConfig(**{**_as(SyncConfig, self.sync), **derived})


def _as(cls: type[Any], section: object) -> dict[str, Any]:
    """Return the fields of `section` that `cls` knows."""
    return {item.name: getattr(section, item.name) for item in fields(cls)}
