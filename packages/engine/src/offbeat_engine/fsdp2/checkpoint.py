"""Checkpoints of the whole training state through torch.distributed.checkpoint, for any number of ranks."""

# torch.distributed.checkpoint is typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import warnings
from collections.abc import Generator  # noqa: TC003
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from offbeat_engine.errors import CheckpointError
from offbeat_engine.fsdp2 import lora
from offbeat_engine.fsdp2.weights import held
from offbeat_engine.toolkit import checkpoint_folders, random_state, remote_folders
from offbeat_engine.toolkit.dcp_reader import METADATA, CheckedReader
from offbeat_engine.toolkit.file_entries import check_entries, entries_of, read_entries
from offbeat_engine.toolkit.saves import finish, on_rank_zero, together

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat_engine.fsdp2.optimizers import Moments
    from offbeat_engine.fsdp2.scorer import Scorer
    from offbeat_engine.fsdp2.updater import Updater
    from offbeat_engine.saving import SaveHandle
    from offbeat_engine.toolkit.file_entries import Entry
    from offbeat_engine.toolkit.saves import Destination, Saves
    from offbeat_engine.world import World

FORMAT = 2


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


def save(saves: Saves, target: Target, where: Destination, block: bool) -> SaveHandle:
    """Write a checkpoint, whole or not at all; a collective. Raises `CheckpointError` on all ranks together.

    Without `block` it returns as soon as this rank's part is copied to host memory; all else is done in a thread.
    """
    saves.settle()
    world, meta = saves.world, _meta(target, where.global_step)
    state = _state(target) if block else _copied(_state(target))
    # Live tensors are written before this returns: a wait that ends at its deadline leaves nobody reading them.
    written = _write(world, state, where.folder) if block else None

    def job() -> None:
        files = _write(world, state, where.folder) if written is None else written
        partial = checkpoint_folders.partial_path(where.folder)
        named = CheckedReader(partial, None).file_names() if world.rank == 0 else ()
        finish(world, where, meta, files, named)

    handle = saves.start(where.folder, job)
    if block:
        handle.wait()
    return handle


def _meta(target: Target, step: int) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": step,
        "scheduled_steps": target.updater.num_steps,
        "num_ranks": target.world.size,
        "has_moments": bool(target.updater.moments()),
        "base": target.base,
        "adapters": target.adapters,
    }


def _write(world: World, state: dict[str, torch.Tensor], folder: Path) -> dict[str, Entry]:
    """Write tensors below the partial path of `folder`; return the entries of the files this rank has written."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemWriter

    partial = checkpoint_folders.partial_path(folder)
    on_rank_zero(world, lambda: str(checkpoint_folders.start_folder(folder)), f"could not start {partial}")

    def write() -> dict[str, Entry]:
        writer = FileSystemWriter(partial, single_file_per_rank=True, sync_files=True)
        with _quiet():
            dcp.save(state, storage_writer=writer, process_group=world.group, no_dist=world.size == 1)
        mine = [path.name for path in partial.glob(f"__{world.rank}_*.distcp")]
        return entries_of(partial, [*mine, METADATA] if world.rank == 0 else mine)

    return together(world, write, f"could not write {partial}")


def _copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a copy of this rank's part in host memory: training may go on while that is written."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}


def load(saves: Saves, target: Target, folder: Path, verified: bool) -> None:
    """Load `folder` in place, resharding if it was written by another number of ranks; a collective.

    Its files are compared with their digests first, each by one rank, unless that was done (`verified`).
    """
    import torch.distributed.checkpoint as dcp

    world, updater = saves.world, target.updater

    def verify() -> tuple[dict[str, Any], CheckedReader]:
        meta = checkpoint_folders.read_meta(folder)
        if meta.get("format") not in (1, FORMAT):
            raise CheckpointError(
                f"{folder} has format {meta.get('format')}, this version reads 1 to {FORMAT}"
            )
        if meta["format"] == 1:  # from before there were digests
            return meta, CheckedReader(folder, None)
        entries = read_entries(meta["files"], str(folder))
        names = sorted(entries)[world.rank :: world.size]
        check_entries(folder, {} if verified else {name: entries[name] for name in names}, str(folder))
        return meta, CheckedReader(folder, entries.keys())

    # All ranks must agree before anything is unpickled: each has compared a part of the files.
    meta, reader = together(world, verify, f"could not load {folder}")

    def prepare() -> tuple[Moments, dict[str, torch.Tensor]]:
        # First: an adapted weight of the base has another name than one that is not, which says less.
        _check_adapters(target.adapters, meta.get("adapters", {}), folder)
        _check_base(target.base, meta.get("base", {}), folder)
        moments = updater.empty_moments() if meta["has_moments"] else {}
        state = _tensors(target, moments)
        written = reader.read_metadata().state_dict_metadata
        _check_fit(state, written, folder)
        return moments, state | random_state.empty(world, written, meta["num_ranks"])

    # All ranks must agree before the first collective inside DCP: one that fails before would leave them waiting.
    moments, state = together(world, prepare, f"could not load {folder}")

    def read() -> None:
        with _quiet():
            dcp.load(state, storage_reader=reader, process_group=world.group, no_dist=world.size == 1)
        updater.set_moments(moments)
        updater.set_num_steps(meta["scheduled_steps"])
        random_state.restore(world, state)

    together(world, read, f"could not load {folder}")


def find(world: World, local_root: str, remote_root: str | None, step: int | None) -> tuple[int | None, bool]:
    """Make sure the wanted checkpoint lies under `local_root`; a collective.

    Returns:
        Its step (None when there is no checkpoint), and whether it was downloaded, and so compared with its digests.

    Raises:
        CheckpointError: `step` was asked for and is neither local nor remote.
    """

    def look() -> tuple[int | None, bool]:
        local = checkpoint_folders.whole_steps(local_root)
        remote = [] if remote_root is None else remote_folders.remote_steps(remote_root)
        wanted = max([*local, *remote], default=None) if step is None else step
        if wanted is None or wanted in local:
            return wanted, False
        if wanted in remote and remote_root is not None:
            remote_folders.download(remote_root, wanted, local_root)
            return wanted, True
        raise CheckpointError(f"no whole checkpoint of step {wanted}; found {sorted({*local, *remote})}")

    found, downloaded = on_rank_zero(world, look, f"could not find a checkpoint in {local_root}")
    return found, downloaded


@contextmanager
def _quiet() -> Generator[None]:
    """Without the remark that one process saves for one process, which is what we asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _state(target: Target) -> dict[str, torch.Tensor]:
    state = _tensors(target, target.updater.moments())
    return state | random_state.taken(target.world)


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
    """Wrap this rank's shard of a moment, which has the rows of its parameter, as that is sharded, sharing memory."""
    if not isinstance(param, DTensor):
        return shard
    shape = torch.Size((param.shape[0], *shard.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        shard, param.device_mesh, param.placements, run_check=False, shape=shape, stride=stride
    )


def _check_fit(state: dict[str, torch.Tensor], written: dict[str, Any], folder: Path) -> None:
    for name, tensor in state.items():
        size = getattr(written.get(name), "size", None)
        if size is None or tuple(size) != tuple(tensor.shape):
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
