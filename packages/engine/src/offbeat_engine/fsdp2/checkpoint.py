"""Checkpoints of the whole training state through torch.distributed.checkpoint, for any number of ranks."""

# torch.distributed.checkpoint is typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Generator  # noqa: TC003
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from offbeat_engine.errors import CheckpointError
from offbeat_engine.fsdp2 import lora
from offbeat_engine.fsdp2.weights import held
from offbeat_engine.toolkit import checkpoint_folders
from offbeat_engine.toolkit.collectives import first_failure, from_rank_zero, gather

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat_engine.fsdp2.optimizers import Moments
    from offbeat_engine.fsdp2.scorer import Scorer
    from offbeat_engine.fsdp2.updater import Updater
    from offbeat_engine.world import World

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a checkpoint is taken of: trained and untrained weights, optimizer, schedule, random state.

    `base` are fingerprints (see `lora.fingerprint`) of the weights that a checkpoint does not hold, `adapters` says
    what its matrices A and B mean (see `lora.described`).
    """

    world: World
    updater: Updater
    untrained: dict[str, torch.Tensor]
    base: dict[str, int]
    adapters: dict[str, Any]


def target_of(world: World, scorer: Scorer, updater: Updater) -> Target:
    """Return what there is to save of `scorer`, which `updater` steps."""
    untrained = {
        name: tensor
        for name, tensor in held(scorer.hf).items()
        if name not in updater.params and name not in scorer.base
    }
    return Target(
        world=world,
        updater=updater,
        untrained=untrained,
        base=scorer.base,
        adapters=lora.described(scorer.hf),
    )


def save(target: Target, folder: Path, step: int) -> None:
    """Write `folder` whole or not at all; a collective. Raises `CheckpointError` on all ranks together."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemWriter

    world = target.world
    partial = checkpoint_folders.partial_path(folder)
    on_rank_zero(world, lambda: str(checkpoint_folders.start_folder(folder)), f"could not start {partial}")

    def write() -> None:
        writer = FileSystemWriter(partial, single_file_per_rank=True, sync_files=True)
        with _quiet():
            dcp.save(_state(target), storage_writer=writer, no_dist=world.size == 1)

    _together(world, write, f"could not write {partial}")

    def finish() -> None:
        meta = {
            "format": FORMAT,
            "step": step,
            "scheduled_steps": target.updater.num_steps,
            "num_ranks": world.size,
            "has_moments": bool(target.updater.moments()),
            "base": target.base,
            "adapters": target.adapters,
        }
        (partial / checkpoint_folders.META).write_text(json.dumps(meta, indent=2))
        checkpoint_folders.finish_folder(folder)

    on_rank_zero(world, finish, f"could not finish {folder}")


def load(target: Target, folder: Path) -> None:
    """Load `folder` in place, resharding if it was written by another number of ranks; a collective."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemReader

    world, updater = target.world, target.updater

    def prepare() -> tuple[dict[str, Any], Moments, dict[str, torch.Tensor]]:
        meta = json.loads((folder / checkpoint_folders.META).read_text())
        if meta["format"] != FORMAT:
            raise CheckpointError(f"{folder} has format {meta['format']}, this version reads {FORMAT}")
        # First: an adapted weight of the base has another name than one that is not, which says less.
        _check_adapters(target.adapters, meta.get("adapters", {}), folder)
        _check_base(target.base, meta.get("base", {}), folder)
        moments = updater.empty_moments() if meta["has_moments"] else {}
        state = _tensors(target, moments)
        if meta["num_ranks"] == world.size:
            state[_rng_key(world)] = torch.empty_like(_random_state())
        _check_fit(state, FileSystemReader(folder).read_metadata().state_dict_metadata, folder)
        return meta, moments, state

    # All ranks must agree before the first collective inside DCP: one that fails before would leave them waiting.
    meta, moments, state = _together(world, prepare, f"could not load {folder}")

    def read() -> None:
        with _quiet():
            dcp.load(state, storage_reader=FileSystemReader(folder), no_dist=world.size == 1)
        updater.set_moments(moments)
        updater.set_num_steps(meta["scheduled_steps"])
        if _rng_key(world) in state:
            _set_random_state(state[_rng_key(world)])

    _together(world, read, f"could not load {folder}")


def find(world: World, local_root: str, remote_root: str | None, step: int | None) -> int | None:
    """Make sure the wanted checkpoint lies under `local_root`; return its step, the same on all ranks.

    Raises:
        CheckpointError: `step` was asked for and is neither local nor remote.
    """

    def look() -> int | None:
        local = checkpoint_folders.whole_steps(local_root)
        remote = [] if remote_root is None else checkpoint_folders.remote_steps(remote_root)
        wanted = max([*local, *remote], default=None) if step is None else step
        if wanted is None or wanted in local:
            return wanted
        if wanted in remote and remote_root is not None:
            checkpoint_folders.download(remote_root, wanted, local_root)
            return wanted
        raise CheckpointError(f"no whole checkpoint of step {wanted}; found {sorted({*local, *remote})}")

    return on_rank_zero(world, look, f"could not find a checkpoint in {local_root}")


def on_rank_zero(world: World, act: Callable[[], Any], failed: str) -> Any:  # noqa: ANN401
    """Run `act` on rank 0 and return its result on every rank; all raise `CheckpointError` if it fails."""
    result = _together(world, act if world.rank == 0 else lambda: None, failed)
    return from_rank_zero(world, result)


def _together(world: World, act: Callable[[], Any], failed: str) -> Any:  # noqa: ANN401
    from torch.distributed.checkpoint.api import CheckpointException

    result, error = None, None
    try:
        result = act()
    # Whatever failed on one rank must be raised on all of them. DCP's own exception is not an `Exception`.
    except (Exception, CheckpointException) as caught:  # noqa: BLE001
        error = caught
    failure = first_failure(world, error)
    if failure is not None:
        raise CheckpointError(f"{failed}: {failure}") from error
    return result


@contextmanager
def _quiet() -> Generator[None]:
    """Without the remark that one process saves for one process, which is what we asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _state(target: Target) -> dict[str, torch.Tensor]:
    state = _tensors(target, target.updater.moments())
    state[_rng_key(target.world)] = _random_state()
    return state


def _tensors(target: Target, moments: Moments) -> dict[str, torch.Tensor]:
    """Flatten to name and tensor, DTensors where the parameters are: DCP cuts and joins them as needed."""
    params, cut = target.updater.params, target.updater.sharded_moments
    state = {f"model.{name}": param.detach() for name, param in params.items()}
    state |= {f"model.{name}": tensor.detach() for name, tensor in target.untrained.items()}
    for name, entry in moments.items():
        for key, tensor in entry.items():
            state[f"optimizer.{name}.{key}"] = (
                _like(tensor, params[name]) if cut and key != "step" else tensor
            )
    return state


def _like(shard: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Wrap this rank's shard of a moment as its parameter is sharded, sharing memory."""
    if not isinstance(param, DTensor):
        return shard
    return DTensor.from_local(
        shard, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def _check_fit(state: dict[str, torch.Tensor], written: dict[str, Any], folder: Path) -> None:
    for name, tensor in state.items():
        size = getattr(written.get(name), "size", None)
        if size is None or (tuple(size) != tuple(tensor.shape) and not name.startswith("random.")):
            raise CheckpointError(
                f"{folder} does not fit the model: `{name}` should be {list(tensor.shape)}, "
                f"got {'nothing' if size is None else list(size)}"
            )
    extra = [name for name in written if name.startswith("model.") and name not in state]
    if extra:
        raise CheckpointError(f"{folder} does not fit the model: it has {extra[0]}, which the model has not")


def _check_base(here: dict[str, int], there: dict[str, int], folder: Path) -> None:
    odd = sorted({*here.items()} ^ {*there.items()})
    if odd:
        name = odd[0][0]
        what = "has other values" if name in here and name in there else "is frozen in only one of the two"
        raise CheckpointError(
            f"{folder} holds adapters of another base: `{name}` {what}; load the model they were trained on"
        )


def _check_adapters(here: dict[str, Any], there: dict[str, Any], folder: Path) -> None:
    """Refuse matrices of another meaning: another alpha fits every shape and scales the adapter otherwise."""
    # A checkpoint that does not describe its adapters was written before there was a description.
    for setting in sorted(here.keys() & there.keys()):
        if here[setting] != there[setting]:
            raise CheckpointError(
                f"{folder} holds adapters of `lora.{setting}` {_said(there[setting])}, and this engine has "
                f"{_said(here[setting])}; set it back, or train new adapters"
            )


def _said(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _rng_key(world: World) -> str:
    return f"random.rank_{world.rank}"


def _random_state() -> torch.Tensor:
    """Return torch's CPU generator state, followed by this rank's CUDA generator state where there is one."""
    parts = [torch.get_rng_state()]
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_rng_state())
    return torch.cat(parts)


def _set_random_state(state: torch.Tensor) -> None:
    num_cpu = torch.get_rng_state().numel()
    torch.set_rng_state(state[:num_cpu])
    if torch.cuda.is_available() and state.numel() > num_cpu:
        torch.cuda.set_rng_state(state[num_cpu:])


def barrier(world: World) -> None:
    """Wait for every rank."""
    gather(world, None)
