"""Checkpoints of training state that any engine reads: regions of named tensors, step counts, and what an engine says besides.

An engine hands over the pieces that a rank holds, and takes regions back; it knows nothing of files. What makes a run move between
layouts of ranks and between engines is names that mean the same everywhere: `WEIGHT`, `EXP_AVG` and `EXP_AVG_SQ` before the name
and in the shape that a weight has in the Hugging Face checkpoint of its family, whole, without what a layout pads or puts together.
Weights are the float32 masters; Adam's moments are cut and turned like their weights. `steps` counts, by the same names, the
updates that moments have seen (0: there are none yet).

In the folder: `rank_<r>_<n>.safetensors`, each rank its own; `index.json`, what of which tensor lies where; `engine.json`, what the
engine says, and size and digest of every file.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from offbeat_engine.batch import WeightShard
from offbeat_engine.errors import CheckpointError
from offbeat_engine.toolkit.collectives import gather
from offbeat_engine.toolkit.state import checkpoint_folders
from offbeat_engine.toolkit.state.checkpoint_folders import check_entries, entries_of, read_entries
from offbeat_engine.toolkit.state.saves import finish, on_rank_zero, together
from offbeat_engine.toolkit.state.slices import SliceReader, merge, read_index, said_of, write_slices

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    from offbeat_engine.toolkit.state.checkpoint_folders import Entry
    from offbeat_engine.toolkit.state.saves import Destination, SaveHandle, Saves
    from offbeat_engine.toolkit.state.slices import Index
    from offbeat_engine.toolkit.world import World


def taken(world: World) -> dict[str, torch.Tensor]:
    """Return this rank's random states, by name."""
    state = {_cpu(world): torch.get_rng_state()}
    if torch.cuda.is_available():
        state[_cuda(world)] = torch.cuda.get_rng_state()
    return state


def pieces(world: World) -> Iterator[WeightShard]:
    """Yield this rank's random states as a checkpoint takes them."""
    for name, state in taken(world).items():
        yield WeightShard(name=name, shape=tuple(state.shape), offsets=(0,), tensor=state)


def read(world: World, loaded: Loaded) -> dict[str, torch.Tensor]:
    """Return what this rank can use of a checkpoint's random states, by name.

    It is empty if the number of ranks has changed: saved states belong to ranks that no longer exist.
    """
    if loaded.meta["num_ranks"] != world.size:
        return {}
    usable = [_cpu(world), *([_cuda(world)] if torch.cuda.is_available() else [])]
    return {name: loaded.reader.read(name) for name in usable if name in loaded.index}


def restore(world: World, state: Mapping[str, torch.Tensor]) -> None:
    """Set this rank's generators to what there is of them in `state`; another one goes on as it is."""
    if _cpu(world) in state:
        torch.set_rng_state(state[_cpu(world)])
    if _cuda(world) in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state[_cuda(world)])


def _cpu(world: World) -> str:
    return f"random/cpu.rank_{world.rank}"


def _cuda(world: World) -> str:
    return f"random/cuda.rank_{world.rank}"


FORMAT = 3
INDEX = "index.json"
WEIGHT, EXP_AVG, EXP_AVG_SQ = "weight/", "exp_avg/", "exp_avg_sq/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What one rank has to save.

    `pieces` yields regions of named tensors that all ranks together hold once; it is iterated once, while nothing changes them.
    `steps` may be said by several ranks alike. `meta` is that of rank 0 and JSON-ready; `format` and `num_ranks` are added.
    """

    pieces: Callable[[], Iterable[WeightShard]]
    steps: Mapping[str, float]
    meta: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checkpoint whose files are what was written: `reader` gives regions, `steps` and `meta` are as they were saved."""

    reader: SliceReader
    steps: dict[str, float]
    meta: dict[str, Any]

    @property
    def index(self) -> Index:
        """All tensors that it holds."""
        return self.reader.index


def save(saves: Saves, saved: Saved, where: Destination, block: bool) -> SaveHandle:
    """Write a checkpoint, whole or not at all; a collective. Raises `CheckpointError` on all ranks together.

    Without `block` it returns as soon as this rank's part is copied to host memory; all else is done in a thread.
    """
    saves.finish_last()
    world = saves.world
    pieces = saved.pieces() if block else _copied(saved.pieces())
    # Live tensors are written before this returns: a wait that ends at its deadline leaves nobody reading them.
    written = _write(world, pieces, saved.steps, where.folder) if block else None

    def job() -> None:
        files = _write(world, pieces, saved.steps, where.folder) if written is None else written
        finish(world, where, {**saved.meta, "format": FORMAT, "num_ranks": world.size}, files)

    handle = saves.start(where.folder, job)
    if block:
        handle.wait()
    return handle


def _copied(pieces: Iterable[WeightShard]) -> list[WeightShard]:
    """Return copies in host memory: training may go on while these are written.

    What lies on a GPU goes to pinned memory, which is waited for once, and not after each tensor; the next save uses it again.
    """
    copies: list[WeightShard] = []
    for piece in pieces:
        tensor = piece.tensor.detach()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        host.copy_(tensor, non_blocking=True)
        copies.append(WeightShard(name=piece.name, shape=piece.shape, offsets=piece.offsets, tensor=host))
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return copies


def _write(
    world: World, pieces: Iterable[WeightShard], steps: Mapping[str, float], folder: Path
) -> dict[str, Entry]:
    """Write below the partial path of `folder`; return the entries of the files this rank has written."""
    partial = checkpoint_folders.partial_path(folder)
    failed = f"could not write {partial}"
    on_rank_zero(world, lambda: str(checkpoint_folders.start_folder(folder)), f"could not start {partial}")

    def write() -> tuple[dict[str, Any], dict[str, Entry]]:
        # A folder that is not shared is refused by rank 0, with its ranks.
        partial.mkdir(parents=True, exist_ok=True)
        index, entries = write_slices(partial, world.rank, pieces)
        return said_of(index), entries

    said, entries = together(world, write, failed)
    parts = gather(world, {"tensors": said, "steps": dict(steps)})

    def write_index() -> None:
        index = merge([part["tensors"] for part in parts], str(partial))
        text = json.dumps({"tensors": said_of(index), "steps": _all_steps([part["steps"] for part in parts])})
        (partial / INDEX).write_text(text)

    on_rank_zero(world, write_index, failed)
    return entries | (entries_of(partial, [INDEX]) if world.rank == 0 else {})


def _all_steps(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    steps: dict[str, float] = {}
    for part in parts:
        for name, step in part.items():
            if steps.setdefault(name, step) != step:
                raise CheckpointError(
                    f"ranks disagree on how many updates the moments of `{name}` have seen: {steps[name]:g} and {step:g}"
                )
    return steps


def load(
    saves: Saves,
    folder: Path,
    verified: bool,
    check: Callable[[Loaded], None],
    read: Callable[[Loaded], None],
) -> None:
    """Load the checkpoint `folder`; a collective that fails on all ranks together, or on none.

    Its files are compared with their digests first, each by one rank, unless that was done (`verified`). Then every rank calls
    `check`, which refuses what does not fit and changes nothing; and when all have agreed `read`, which takes what the rank holds.
    """
    world, failed = saves.world, f"could not load {folder}"

    def verify() -> tuple[dict[str, Any], Mapping[str, Entry]]:
        meta = checkpoint_folders.read_meta(folder)
        if meta.get("format") != FORMAT:
            raise CheckpointError(
                f"{folder} has format {meta.get('format')}, this version reads {FORMAT}; load it with the version that "
                "wrote it, and go on from the weights that `export_huggingface` writes there"
            )
        entries = read_entries(meta["files"], str(folder))
        names = sorted(entries)[world.rank :: world.size]
        check_entries(folder, {} if verified else {name: entries[name] for name in names}, str(folder))
        return meta, entries

    # All ranks must agree before anything is made of the files: each has compared a part of them.
    meta, entries = together(world, verify, failed)

    def opened() -> Loaded:
        index, steps = _read(folder, entries)
        loaded = Loaded(reader=SliceReader(folder, index), steps=steps, meta=meta)
        check(loaded)
        return loaded

    loaded = together(world, opened, failed)
    with closing(loaded.reader):
        together(world, lambda: read(loaded), failed)


def check_no_more(index: Index, known: Collection[str], source: str) -> None:
    """Make sure that all weights of `index` are `known`: else they are of a larger model, or of another head.

    Raises:
        CheckpointError: one is not.
    """
    extra = [name for name in index if name.startswith(WEIGHT) and name not in known]
    if extra:
        raise CheckpointError(
            f"{source} does not fit the model: it has `{extra[0]}`, which the model has not"
        )


def _read(folder: Path, entries: Mapping[str, Entry]) -> tuple[Index, dict[str, float]]:
    try:
        said = json.loads((folder / INDEX).read_text())
        tensors, steps = (
            dict(said["tensors"]),
            {str(name): float(step) for name, step in said["steps"].items()},
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{folder / INDEX} cannot be read ({type(error).__name__}: {error}); use another checkpoint"
        ) from error
    index = read_index(tensors, str(folder / INDEX))
    for name, described in index.items():
        described.check(name)
        for _, file in described.pieces:
            if file not in entries:
                raise CheckpointError(f"{folder} keeps `{name}` in {file!r}, which it does not list")
    return index, steps


def find(world: World, local_root: str, remote_root: str | None, step: int | None) -> tuple[int | None, bool]:
    """Make sure the wanted checkpoint lies under `local_root`; a collective.

    Returns:
        Its step (None when there is no checkpoint), and whether it was downloaded, and so compared with its digests.

    Raises:
        CheckpointError: `step` was asked for and is neither local nor remote.
    """

    def look() -> tuple[int | None, bool]:
        local = checkpoint_folders.whole_steps(local_root)
        remote = [] if remote_root is None else checkpoint_folders.remote_steps(remote_root)
        wanted = max([*local, *remote], default=None) if step is None else step
        if wanted is None or wanted in local:
            return wanted, False
        if wanted in remote and remote_root is not None:
            checkpoint_folders.download(remote_root, wanted, local_root)
            return wanted, True
        raise CheckpointError(f"no whole checkpoint of step {wanted}; found {sorted({*local, *remote})}")

    found, downloaded = on_rank_zero(world, look, f"could not find a checkpoint in {local_root}")
    return found, downloaded
