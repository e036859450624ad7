"""The plan of a run: who runs where, how the batch divides, what memory it takes, and why it cannot run.

A pure function of settings and facts. `offbeat plan` prints it; `offbeat train` obeys it before anything starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat_engine.config import Feature, Refusal
from offbeat_engine.interface import engine_class
from offbeat_recipes.planning.algorithm import algorithm_of
from offbeat_recipes.planning.memory import (
    GIB,
    MIB,
    Memory,
    batch_bytes,
    driver_memory,
    file_memory,
    host_memory,
    kv_bytes_per_token,
    rank_memory,
    replica_memory,
    staged_memory,
)
from offbeat_recipes.planning.placement import (
    Placed,
    device_refusals,
    gpu_peak,
    mode_refusals,
    num_devices,
    placed,
    shared_memory_refusals,
)
from offbeat_recipes.tasks.config import CharTaskConfig
from offbeat_trainer.config import KlEstimator, KlIn, PolicyLossConfig
from offbeat_trainer.data.types import version_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat_recipes.planning.facts import Facts
    from offbeat_recipes.settings.tree import RunConfig


_SETTING = "rollout.record_experts"
_NUMBER = 2  # bytes


def expert_refusals(config: RunConfig, facts: Facts) -> Iterator[Refusal]:
    """Refuse to record experts where there are none, or where nothing would replay them."""
    if not recorded(config):
        return
    if facts.model is not None and not facts.model.experts_per_token:
        yield Refusal(_SETTING, "the model has no experts to choose among", "leave it out")
    name = config.engine.name
    engine = engine_class(name).capabilities()
    if Feature.ROUTED_EXPERTS not in engine.features:
        why = engine.missing.get(Feature.ROUTED_EXPERTS, "it does not say them")
        yield Refusal(
            _SETTING,
            f"the engine {name} does not replay them: {why}",
            "leave it out, or take engine=fsdp2 or megatron",
        )
    elif getattr(config.engine, "compile", False):  # a setting that not every engine has
        yield Refusal(
            "engine.compile",
            "compiled layers choose experts themselves",
            "engine.compile=false, or record none",
        )


def expert_bytes(config: RunConfig, facts: Facts, tokens: int) -> int:
    """Return what the recorded experts of `tokens`, padding included, take: of every layer those of a token."""
    if facts.model is None or not recorded(config):
        return 0
    return _NUMBER * tokens * facts.model.experts_per_token


def expert_memory(config: RunConfig, facts: Facts, tokens: int) -> Memory | None:
    """Return what a step's recorded experts take where its batch is: on the driver, and on every rank."""
    num_bytes = expert_bytes(config, facts, tokens)
    if not num_bytes:
        return None
    return Memory(
        process="driver, and each training rank, in host memory",
        num=1 + config.engine.num_ranks,
        items=((f"experts of {tokens} tokens, two bytes each, at most", num_bytes),),
        certain=0,
    )


def recorded(config: RunConfig) -> bool:
    """Whether replicas run, and record."""
    return config.generates and config.rollout.record_experts


_LARGE_LR = 5e-4
"""Beyond it supervised training of a whole model forgets what that has learned; adapters take some 2e-4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The arithmetic of a step and of the run. Token counts are upper bounds, prompts included.

    `sequences_per_rank` is the even share; the engine balances tokens, so ranks may hold a few more or fewer.
    """

    prompts_per_step: int
    group_size: int
    completions_per_step: int
    updates_per_step: int
    sequences_per_update: int
    sequences_per_rank: int
    max_tokens_per_sequence: int
    max_tokens_per_step: int
    steps: int
    optimizer_steps: int
    final_version: int
    completions_in_all: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything worth knowing before a run. It may start when `refusals` is empty."""

    placement: tuple[Placed, ...]
    batch: BatchPlan
    memory: tuple[Memory, ...]
    num_params: int
    refusals: tuple[Refusal, ...]
    warnings: tuple[str, ...]


def plan_run(config: RunConfig, facts: Facts) -> Plan:
    """Return the plan of `config` on the machine that `facts` describe."""
    config = config.alone.counted(facts.num_train_prompts)
    batch = plan_batch(config, facts)
    broken = any(item.setting == "algorithm" for item in facts.refusals)
    memory = () if broken else _memory(config, facts, batch)
    refusals = [
        *facts.refusals,
        *device_refusals(config, facts),
        *([] if broken else algorithm_of(config).check()),
        *_batch(config, batch),
        *_lengths(config, facts),
        *_sampling_and_sync(config),
        *mode_refusals(config, facts),
        *_prompts(config, facts),
        *expert_refusals(config, facts),
        *_too_large(config, facts, memory),
    ]
    return Plan(
        placement=tuple(placed(config, facts)),
        batch=batch,
        memory=tuple(one for one in memory if one.num),
        num_params=0 if facts.model is None else facts.model.num_params,
        refusals=tuple(refusals),
        warnings=(
            *_warnings(config, facts, memory),
            *_off_policy(config, facts),
            *_object_store(config, facts, batch),
            *_staging(config, facts),
        ),
    )


def plan_batch(config: RunConfig, facts: Facts) -> BatchPlan:
    """Return the arithmetic of a step, rounded down where it does not divide (which the plan refuses)."""
    loop = config.trainer
    group_size = config.algorithm.written_rows or loop.group_size
    completions = loop.prompts_per_step * group_size
    per_update = completions // loop.updates_per_step
    longest = facts.max_prompt_tokens + config.max_new_tokens
    return BatchPlan(
        prompts_per_step=loop.prompts_per_step,
        group_size=group_size,
        completions_per_step=completions,
        updates_per_step=loop.updates_per_step,
        sequences_per_update=per_update,
        sequences_per_rank=-(-per_update * config.engine.model_parallel_size // config.engine.num_ranks),
        max_tokens_per_sequence=longest,
        max_tokens_per_step=completions * longest,
        steps=loop.steps,
        optimizer_steps=config.num_updates,
        final_version=version_of(loop.steps),
        completions_in_all=completions * loop.steps,
    )


def _batch(config: RunConfig, batch: BatchPlan) -> Iterator[Refusal]:
    loop = config.trainer
    ranks = config.engine.num_ranks // config.engine.model_parallel_size  # those share their rows
    if loop.steps < 1:
        yield Refusal("trainer.steps", "0: nothing would be trained", "set it to 1 or more")
    if not config.generates and loop.prompts_per_step % loop.updates_per_step:
        yield Refusal(
            "trainer.updates_per_step",
            f"{loop.prompts_per_step} prompts, whose completions stay together, are not divisible into "
            f"{loop.updates_per_step} equal mini-batches",
            "use a divisor of prompts_per_step",
        )
    elif batch.completions_per_step % loop.updates_per_step:
        yield Refusal(
            "trainer.updates_per_step",
            f"{loop.prompts_per_step} prompts x {batch.group_size} = {batch.completions_per_step} completions "
            f"are not divisible into {loop.updates_per_step} equal mini-batches",
            "use a divisor of prompts_per_step x group_size",
        )
    elif batch.sequences_per_update < ranks:
        yield Refusal(
            "engine.num_ranks",
            f"a mini-batch has {batch.sequences_per_update} sequences for {ranks} ranks: some would idle",
            "raise trainer.prompts_per_step or trainer.group_size, or lower trainer.updates_per_step",
        )
    if config.warmup.steps and config.warmup.batch_size < ranks:
        yield Refusal(
            "warmup.batch_size",
            f"{config.warmup.batch_size} examples for {ranks} ranks",
            f"use {ranks} or more",
        )


def _lengths(config: RunConfig, facts: Facts) -> Iterator[Refusal]:
    need, have = facts.max_prompt_tokens + config.max_new_tokens, config.rollout.max_model_len
    if need > have and config.generates:
        lower = f"{'environment' if config.turns else 'sampling'}.max_tokens"
        if hasattr(config.task, "max_prompt_tokens"):
            lower = f"task.max_prompt_tokens or {lower}"
        yield Refusal(
            "rollout.max_model_len",
            f"{facts.max_prompt_tokens} prompt tokens + {config.max_new_tokens} {'turn' if config.turns else 'completion'} tokens "
            f"are more than {have}",
            f"rollout.max_model_len={need}, or lower {lower}",
        )
    positions = 0 if facts.model is None else facts.model.max_positions
    if positions and have > positions:
        yield Refusal(
            "rollout.max_model_len",
            f"{have}, and the model was made for {positions} positions",
            f"use {positions} at most",
        )


def _sampling_and_sync(config: RunConfig) -> Iterator[Refusal]:
    if not config.generates:
        return
    if config.sampling.temperature < 0.01:
        why = "0 is greedy: all completions of a prompt would be one; no engine draws at less than 0.01"
        yield Refusal("sampling.temperature", why, "use 1")
    if config.sync.transport == "loopback":
        yield Refusal(
            "sync.transport",
            "loopback stays within one process, and replicas have their own",
            "sync=auto or sync=disk",
        )


def _prompts(config: RunConfig, facts: Facts) -> Iterator[Refusal]:
    if not facts.num_train_prompts:
        return
    if config.trainer.prompts_per_step > facts.num_train_prompts:
        yield Refusal(
            "trainer.prompts_per_step",
            f"{config.trainer.prompts_per_step} different prompts a step; the task has at most {facts.num_train_prompts}",
            "take fewer" + (", or raise task.level" if hasattr(config.task, "level") else ""),
        )


def _memory(config: RunConfig, facts: Facts, batch: BatchPlan) -> tuple[Memory, ...]:
    if facts.model is None:
        return ()
    return (
        rank_memory(config, facts, batch.max_tokens_per_sequence, batch.sequences_per_rank),
        replica_memory(config, facts.model, facts.gpu_gib),
        driver_memory(config),
        *filter(
            None,
            [
                host_memory(config, facts),
                *([staged_memory(config, facts), file_memory(config, facts)] if config.generates else []),
                expert_memory(config, facts, batch.max_tokens_per_step),
            ],
        ),
    )


def _too_large(config: RunConfig, facts: Facts, memory: tuple[Memory, ...]) -> Iterator[Refusal]:
    """Refuse what is certain not to fit; what may not fit is a warning."""
    elsewhere = bool(config.cluster.ray_address)
    if facts.model is None or not memory or (elsewhere and config.device == "cpu"):
        return
    if config.device == "cuda":
        rank, replica = memory[0], memory[1]
        weights = replica.items[0][1]
        if facts.gpu_gib and rank.certain > facts.gpu_gib * GIB:
            yield Refusal(
                "engine.num_ranks",
                f"weights, gradients and moments take {rank.certain / GIB:.1f} GiB a rank, "
                f"a GPU has {facts.gpu_gib:.1f}",
                "use more ranks or a smaller model",
            )
        if (
            config.generates
            and facts.gpu_gib
            and weights > config.rollout.gpu_memory_fraction * facts.gpu_gib * GIB
        ):
            yield Refusal(
                "rollout.tensor_parallel_size",
                f"weights of {weights / GIB:.1f} GiB leave no room for keys and values",
                "raise rollout.tensor_parallel_size or rollout.gpu_memory_fraction, or use a smaller model",
            )
        yield from shared_memory_refusals(config, facts, rank, replica)
        loading = host_memory(config, facts)
        if loading is not None and not elsewhere and loading.certain * loading.num > facts.ram_gib * GIB:
            yield Refusal(
                "model.path",
                f"without safetensors each of {loading.num} ranks loads the whole model into host memory, "
                f"{loading.certain * loading.num / GIB:.1f} GiB together; this machine has {facts.ram_gib:.1f}",
                "save it as safetensors (save_pretrained), of which a rank reads its part alone",
            )
        return
    certain = sum(item.certain * item.num for item in memory)
    if certain > facts.ram_gib * GIB:
        yield Refusal(
            "rollout.kv_cache_gib",
            f"all processes take {certain / GIB:.1f} GiB, this machine has {facts.ram_gib:.1f}",
            "lower rollout.kv_cache_gib or rollout.num_replicas, or use a smaller model",
        )
    one = config.rollout.max_model_len * kv_bytes_per_token(config, facts.model)
    if config.generates and config.rollout.kv_cache_gib * GIB < one:
        yield Refusal(
            "rollout.kv_cache_gib",
            f"{config.rollout.kv_cache_gib:g} GiB cannot hold one sequence of {config.rollout.max_model_len} tokens",
            f"use {one / GIB:.2g} or more",
        )


def _object_store(config: RunConfig, facts: Facts, batch: BatchPlan) -> Iterator[str]:
    """Say where the batch of a step may not fit into the object store of a Ray of our own, which then goes through files."""
    tokens, have = batch.max_tokens_per_step, config.cluster.object_store_mib * MIB
    need = batch_bytes(tokens) + expert_bytes(config, facts, tokens)
    if need > have and not config.cluster.ray_address:
        yield (
            f"the batch of a step may take {need / MIB:.0f} MiB, and the object store has {have / MIB:.0f}: what does not fit goes "
            f"through files in the temporary folder, which is slow; cluster.object_store_mib={-(-need // MIB)}"
        )


def _staging(config: RunConfig, facts: Facts) -> Iterator[str]:
    """Say where a replica's GPU has no room for new weights beside the old ones."""
    staged = staged_memory(config, facts) if config.generates else None
    if staged is not None:
        yield (
            f"new weights of {staged.total / GIB:.1f} GiB do not fit on a replica's GPU beside rollout.gpu_memory_fraction="
            f"{config.rollout.gpu_memory_fraction:g}: they go through host memory; a smaller fraction leaves them room"
        )


def _warnings(config: RunConfig, facts: Facts, memory: tuple[Memory, ...]) -> Iterator[str]:
    if facts.longest_answer_tokens > config.max_new_tokens:
        yield (
            f"{'environment' if config.turns else 'sampling'}.max_tokens={config.max_new_tokens} cuts off right answers: "
            f"the longest has {facts.longest_answer_tokens} tokens"
        )
    limit = (facts.gpu_gib if config.device == "cuda" else facts.ram_gib) * GIB
    shared = config.device == "cpu"
    worst = 0
    if memory and shared:
        worst = sum(item.total * item.num for item in memory)
    elif memory:
        worst = (
            gpu_peak(config, facts, memory[0], memory[1], certain=False)
            if config.generates
            else memory[0].total
        )
    if memory and not limit:
        yield "memory of a GPU is not known here, so nothing says whether this fits; cluster.device_memory_gib=80 does"
    if limit and worst > limit and not (shared and config.cluster.ray_address):
        yield f"memory may reach {worst / GIB:.1f} GiB of {limit / GIB:.1f}; lower engine.micro_batch_tokens"
    wanted = config.rollout.num_replicas * config.replica_threads(facts.num_cores)
    if shared and wanted > facts.num_cores and not config.cluster.ray_address:
        yield f"{wanted} generating threads share {facts.num_cores} cores; lower rollout.cpu_threads"
    if num_devices(config, facts) is None:
        yield "devices of the cluster at cluster.ray_address are not counted; cluster.num_devices says how many"
    lr = config.warmup.lr
    trained_before = (
        config.model.path and not config.model.random_init and not isinstance(config.task, CharTaskConfig)
    )
    if trained_before and config.warmup.steps and lr is not None and lr > _LARGE_LR:
        yield f"warmup.lr={lr:g} is large for a model that was trained before; leave it out for one that fits"
    if isinstance(config.task, CharTaskConfig) and not config.warmup.steps and not config.model.path:
        yield "an untrained model without warm-up is never right, and GRPO learns from differences: warmup.steps=250"


def _off_policy(config: RunConfig, facts: Facts) -> Iterator[str]:
    algorithm = config.algorithm
    if config.generates and config.mode.name != "sync" and not facts.reads_sampler:
        yield (
            f"mode={config.mode.name} trains tokens of older weights, and the loss of algorithm={algorithm.name} does not depend on "
            "`rollout_logprobs`: they count as if the newest had made them; weigh them (docs/algorithms.md), or mode=sync"
        )
    if (
        isinstance(algorithm, PolicyLossConfig)
        and algorithm.kl_coef
        and algorithm.kl_estimator is KlEstimator.K1
        and getattr(algorithm, "kl_in", KlIn.LOSS) is KlIn.LOSS
    ):
        yield "k1 in the loss has no gradient on average: it measures KL and does not bound it; k2 and k3 do"
