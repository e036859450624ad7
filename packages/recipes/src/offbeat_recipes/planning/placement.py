"""Who runs where: devices, threads and the memory of shared devices; a part of the plan, as pure as the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat_engine.config import Refusal
from offbeat_recipes.planning.memory import GIB
from offbeat_trainer.config import Partial, check_async
from offbeat_trainer.errors import PlanRefused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat_recipes.planning.facts import Facts
    from offbeat_recipes.planning.memory import Memory
    from offbeat_recipes.settings.tree import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One process and where it runs."""

    process: str
    where: str


def placed(config: RunConfig, facts: Facts) -> Iterator[Placed]:
    """Yield every process of the run."""
    ranks, width = config.engine.num_ranks, config.rollout.tensor_parallel_size
    cuda, cores = config.device == "cuda", facts.num_cores
    share = f"{config.engine.threads_per_rank or default_threads(config, cores)} thread(s) on {cores} cores"
    if config.cluster.ray_address and not config.engine.threads_per_rank:
        share = "its share of the cores of its machine"
    yield Placed(process="driver", where="this machine: loop, task and rewards")
    for rank in range(ranks):
        place = "one GPU" if cuda else share
        yield Placed(process=f"training rank {rank} ({config.engine.name})", where=place)
    for replica in range(config.rollout.num_replicas):
        place = f"{width} GPU(s)" if cuda else f"{config.replica_threads(cores)} of {cores} cores"
        if config.colocated:
            first, last = replica * width, (replica + 1) * width - 1
            owners = f"rank {first}" if first == last else f"ranks {first} to {last}"
            place = f"the GPU(s) of {owners}, in turns" if cuda else f"{place}, in turns with training"
        yield Placed(process=f"replica {replica} ({config.rollout.name})", where=place)


def default_threads(config: RunConfig, num_cores: int) -> int:
    """Return the threads of a training rank that the settings leave open: its even share of the cores.

    In turns, training and generation may each use all of them. Side by side on a CPU, the replicas have theirs.
    """
    return max(1, (num_cores - taken_cores(config, num_cores)) // config.engine.num_ranks)


def taken_cores(config: RunConfig, num_cores: int) -> int:
    """Return how many cores replicas keep busy while ranks compute: none in turns, none of a CPU where they are on GPUs."""
    if config.mode.name == "sync" or config.device != "cpu":
        return 0
    rollout = config.rollout
    return rollout.num_replicas * rollout.tensor_parallel_size * config.replica_threads(num_cores)


def num_devices(config: RunConfig, facts: Facts) -> int | None:
    """Return how many devices there are: cores or GPUs; None when they are another machine's and not said."""
    if config.cluster.num_devices:
        return config.cluster.num_devices
    if config.cluster.ray_address:
        return None
    return facts.num_cores if config.device == "cpu" else facts.num_gpus


def mode_refusals(config: RunConfig, facts: Facts) -> Iterator[Refusal]:
    """Refuse what the mode cannot do with the other settings."""
    if config.colocated and config.mode.name != "sync":
        yield Refusal(
            "cluster.placement",
            f"colocated: training and generation have the same devices in turns, and mode={config.mode.name} "
            "runs them at the same time",
            "mode=sync, or cluster.placement=separate",
        )
    if config.mode.name == "fully_async":
        try:
            check_async(config.asynchrony)
        except PlanRefused as error:
            yield Refusal("mode", str(error), "see docs/asynchrony.md")
        yield from _interruption(config, facts)


def _interruption(config: RunConfig, facts: Facts) -> Iterator[Refusal]:
    partial = config.asynchrony.partial
    if partial is Partial.RECOMPUTE and not facts.recomputes:
        yield Refusal(
            "mode.partial",
            f"{config.rollout.name} cannot compute keys and values of running completions again",
            "mode.partial=keep or abort",
        )
    if config.sampling.stop and partial is Partial.ABORT:
        yield Refusal(
            "sampling.stop",
            "mode.partial=abort goes on with an interrupted completion in a new request, in which a text that was begun "
            "before the interruption is not seen to be complete",
            "mode.partial=keep or wait, or end completions at tokens",
        )


def device_refusals(config: RunConfig, facts: Facts) -> Iterator[Refusal]:
    """Refuse more processes than there are devices. Shared devices count once."""
    have = num_devices(config, facts)
    if config.device == "cuda":
        yield from _shared_gpus(config) if config.colocated else ()
        yield from () if have is None else _gpus(config, have)
    elif have is not None:
        yield from _cores(config, have)


def _gpus(config: RunConfig, have: int) -> Iterator[Refusal]:
    ranks, width = config.engine.num_ranks, config.rollout.tensor_parallel_size
    generating = config.rollout.num_replicas * width
    need = ranks if config.colocated else ranks + generating
    shared = " on the devices of the ranks" if config.colocated else ""
    if have == 0:
        yield Refusal("device", "cuda, and no GPU is visible", "device=cpu, or run where a GPU is")
    elif need > have:
        yield Refusal(
            "engine.num_ranks",
            f"{ranks} ranks + {config.rollout.num_replicas} replicas x {width}{shared} need {need} GPUs; {have} there",
            "lower engine.num_ranks, rollout.num_replicas or rollout.tensor_parallel_size",
        )


def _shared_gpus(config: RunConfig) -> Iterator[Refusal]:
    ranks, width = config.engine.num_ranks, config.rollout.tensor_parallel_size
    generating = config.rollout.num_replicas * width
    if generating > ranks:
        yield Refusal(
            "rollout.num_replicas",
            f"{config.rollout.num_replicas} replicas x {width} share the GPUs of {ranks} ranks",
            f"rollout.num_replicas={ranks // width} at most, or cluster.placement=separate",
        )
    if config.sync.transport == "broadcast":
        yield Refusal(
            "sync.transport",
            "broadcast is NCCL here, which takes no two processes of one GPU, and replicas share the ranks'",
            "sync=auto or sync=disk",
        )


def _cores(config: RunConfig, have: int) -> Iterator[Refusal]:
    ranks, width = config.engine.num_ranks, config.rollout.tensor_parallel_size
    generating = config.rollout.num_replicas * width
    if ranks > have:
        yield Refusal(
            "engine.num_ranks", f"{ranks} ranks on {have} cores", f"engine.num_ranks={have} at most"
        )
    if generating > have:
        yield Refusal(
            "rollout.num_replicas",
            f"{generating} generating processes on {have} cores",
            f"rollout.num_replicas={max(1, have // width)} at most",
        )


def gpu_peak(config: RunConfig, facts: Facts, rank: Memory, replica: Memory, *, certain: bool) -> int:
    """Return the most bytes that one GPU must hold at a time; with `certain`, of what is arithmetic.

    On a shared GPU that is who works beside what the other leaves there while it rests: nothing if it can move to host
    memory (a replica that sleeps, an engine that offloads), else what it has.
    """
    rank_bytes, replica_bytes = (one.certain if certain else one.total for one in (rank, replica))
    if not config.colocated:
        return max(rank_bytes, replica_bytes)
    training = rank_bytes + (0 if facts.sleeps else replica_bytes)
    generating = replica_bytes + (0 if facts.offloads else rank.certain)
    return max(training, generating)


def shared_memory_refusals(
    config: RunConfig, facts: Facts, rank: Memory, replica: Memory
) -> Iterator[Refusal]:
    """Refuse what is certain not to fit on GPUs that training and generation share, or beside them in host memory."""
    if not (config.colocated and config.device == "cuda"):
        return
    peak = gpu_peak(config, facts, rank, replica, certain=True)
    fits_apart = max(rank.certain, replica.certain) <= facts.gpu_gib * GIB
    if facts.gpu_gib and fits_apart and peak > facts.gpu_gib * GIB:
        stays = config.engine.name if not facts.offloads else config.rollout.name
        yield Refusal(
            "cluster.placement",
            f"colocated: {stays} keeps its memory while the other works, {peak / GIB:.1f} GiB together; a GPU has "
            f"{facts.gpu_gib:.1f}",
            "lower rollout.gpu_memory_fraction, use more ranks, or cluster.placement=separate",
        )
    away = rank.certain * rank.num * facts.offloads + replica.items[0][1] * replica.num * facts.sleeps
    if away > facts.ram_gib * GIB:
        yield Refusal(
            "cluster.placement",
            f"colocated: who rests waits in host memory, {away / GIB:.1f} GiB; the machine has {facts.ram_gib:.1f}",
            "use a smaller model, or cluster.placement=separate",
        )
