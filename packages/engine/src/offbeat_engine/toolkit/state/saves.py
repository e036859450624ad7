"""Saves that go on beside the training: one at a time, agreed on by all ranks over a group of their own.

The handle of a checkpoint that may still be on its way to disk.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from offbeat_engine.errors import CheckpointError
from offbeat_engine.toolkit.collectives import compute_device, first_failure, from_rank_zero, gather
from offbeat_engine.toolkit.state import checkpoint_folders

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from offbeat_engine.toolkit.state.checkpoint_folders import Entry
    from offbeat_engine.toolkit.world import World


# A network file system may show another host's new file this much later.
VISIBLE_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a checkpoint goes, and how many of those there stay: what `Engine.save_checkpoint` is told, in its order."""

    local_path: str
    remote_path: str | None = None
    global_step: int = 0
    max_ckpt_to_keep: int | None = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` where no checkpoint would be kept."""
        checkpoint_folders.check_keep(self.max_ckpt_to_keep)

    @property
    def folder(self) -> Path:
        """The folder of this checkpoint."""
        return checkpoint_folders.step_path(self.local_path, self.global_step)


class Saves:
    """The saves of one engine: each ends in a thread, and the next one waits for it.

    `world` is the engine's with a group of its own, whose deadline is that of a whole save or load: what rank 0 does
    alone (flush, copy, prune) may take longer than any collective of the training.
    """

    def __init__(self, world: World, timeout_s: float) -> None:
        """Save for the ranks of `world`; a whole save, with its copy, takes at most `timeout_s`."""
        self._shared = world
        self._timeout_s = timeout_s
        self._own: World | None = None
        self._newest: SaveHandle | None = None

    @property
    def world(self) -> World:
        """The world of saves and loads; asked for the first time, a collective."""
        if self._own is None:
            self._own = self._shared.apart(self._timeout_s)
        return self._own

    def start(self, folder: Path, job: Callable[[], None]) -> SaveHandle:
        """Run `job`, which makes `folder` whole, in a thread of its own; only after `finish_last`.

        The thread may use `world`, and nobody else until it has ended. It holds up the end of the process, so that a
        program that ends after a save has its checkpoint, but no longer than the deadline.
        """
        assert self._newest is None or self._newest.done
        handle = self._newest = SaveHandle(folder, self._timeout_s)

        def run() -> None:
            error: BaseException | None = None
            try:
                if self._shared.device == "cuda":
                    # A new thread's device is the first one: copies through it would take memory there on every rank.
                    torch.cuda.set_device(compute_device(self._shared))
                job()
            except Exception as caught:  # noqa: BLE001 raised by `SaveHandle.wait` or the engine's next call
                error = caught
            handle.end(error)
            atexit.unregister(handle_exit)

        thread = threading.Thread(target=run, name=f"save {folder.name}", daemon=True)

        def handle_exit() -> None:
            thread.join(self._timeout_s)

        atexit.register(handle_exit)
        thread.start()
        return handle

    def finish_last(self) -> None:
        """Wait for the save under way, and raise on all ranks what went wrong if it was not told; a collective.

        Raises:
            CheckpointError: an earlier save failed, or has not ended within its deadline.
        """
        newest, error = self._newest, None
        if newest is None:
            return
        try:
            self._wait(newest)
        except CheckpointError as caught:
            error = caught
        if newest.done:
            self._newest = None
        failure = first_failure(self._shared, error)
        if failure is not None:
            raise CheckpointError(f"an earlier save failed: {failure}") from error

    def close(self) -> None:
        """Wait for the save under way and give up the group; no collective, since a rank may close alone.

        Raises:
            CheckpointError: as `finish_last`.
        """
        newest, self._newest = self._newest, None
        try:
            if newest is not None:
                self._wait(newest)
        finally:
            if self._own is not None:
                self._own.rejoin()
                self._own = None

    def _wait(self, handle: SaveHandle) -> None:
        if not handle.done or handle.untold is not None:
            handle.wait()


def together(world: World, act: Callable[[], Any], failed: str) -> Any:
    """Run `act` on every rank and return its result; if it fails on any, all raise `CheckpointError`."""
    result, error = None, None
    try:
        result = act()
    except Exception as caught:  # noqa: BLE001 whatever failed on one rank must be raised on all of them
        error = caught
    failure = first_failure(world, error)
    if failure is not None:
        raise CheckpointError(f"{failed}: {failure}") from error
    return result


def on_rank_zero(world: World, act: Callable[[], Any], failed: str) -> Any:
    """Run `act` on rank 0 and return its result (what JSON can say) on every rank; all raise if it fails."""
    result = together(world, act if world.rank == 0 else lambda: None, failed)
    return from_rank_zero(world, result)


def finish(world: World, where: Destination, meta: dict[str, Any], files: dict[str, Entry]) -> None:
    """Make a written checkpoint whole, copy it, and prune; a collective, in which rank 0 works.

    Args:
        world: that of the saves.
        where: where it goes; every rank has written its files below the folder's partial path.
        meta: what the engine has to say of it; goes to `engine.json` with the order of writing and all files' entries.
        files: size and digest of each file that this rank has written, by name.

    Raises:
        CheckpointError: on all ranks together; before the folder has its name if `local_path` is not shared.
    """
    folder, reports = where.folder, gather(world, files)

    def make_whole() -> None:
        partial = checkpoint_folders.partial_path(folder)
        _check_visible(partial, reports)
        entries = {name: entry for report in reports for name, entry in report.items()}
        order = checkpoint_folders.next_order(where.local_path)
        (partial / checkpoint_folders.META).write_text(
            json.dumps({**meta, "order": order, "files": entries}, indent=2)
        )
        checkpoint_folders.finish_folder(folder)

    def copy_and_prune() -> None:
        if where.remote_path is not None:
            checkpoint_folders.upload(folder, where.remote_path)
        if where.max_ckpt_to_keep is not None:
            checkpoint_folders.prune(where.local_path, where.max_ckpt_to_keep)
            if where.remote_path is not None:
                checkpoint_folders.prune_remote(where.remote_path, where.max_ckpt_to_keep)

    on_rank_zero(world, make_whole, f"could not finish {folder}")
    on_rank_zero(world, copy_and_prune, f"{folder} is whole, but could not be copied or pruned")


def _check_visible(partial: Path, reports: list[dict[str, Entry]]) -> None:
    """Refuse a folder in which rank 0 does not find what the others wrote, waiting a little for slow file systems."""
    sizes = {(rank, name): entry[0] for rank, report in enumerate(reports) for name, entry in report.items()}
    give_up = time.monotonic() + VISIBLE_WITHIN_S
    while missing := [key for key, size in sizes.items() if _size(partial / key[1]) != size]:
        if time.monotonic() > give_up:
            ranks = sorted({rank for rank, _ in missing})
            shown = ", ".join(f"{name} ({sizes[rank, name]} bytes)" for rank, name in missing[:4])
            raise CheckpointError(
                f"`local_path` must be a folder that all ranks share: rank 0 does not find in {partial} what rank"
                f"{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} wrote there: {shown}"
                f"{', ...' if len(missing) > 4 else ''}; use a shared file system"
            )
        time.sleep(0.2)


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


class SaveHandle:
    """What `Engine.save_checkpoint` returns: one checkpoint, whole or under way. Nothing of it is a collective."""

    def __init__(self, folder: Path, timeout_s: float) -> None:
        """Of the checkpoint `folder`, which should be whole, copied and counted within `timeout_s` from now."""
        self.folder = folder
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._told = False

    @classmethod
    def ended(cls, folder: Path) -> SaveHandle:
        """Return the handle of a checkpoint that is whole already: of an engine that saves while its caller waits."""
        handle = cls(folder, 0.0)
        handle.end()
        return handle

    def end(self, error: BaseException | None = None) -> None:
        """Say (once, from the engine) that the save has ended, well or with `error`."""
        self._error = error
        self._ended.set()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not; `wait` returns or raises at once then."""
        return self._ended.is_set()

    @property
    def untold(self) -> BaseException | None:
        """Return what went wrong if nobody has been told by `wait`; for the engine's next call."""
        return None if self._told else self._error

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the checkpoint is whole, copied to its remote path, and older ones are pruned.

        Args:
            timeout_s: the longest to wait; None for what is left of the engine's own deadline.

        Raises:
            CheckpointError: it could not be written or copied (all ranks are told the same), or it was still under way
                at the deadline; then it goes on, and can be waited for again.
        """
        left = max(0.0, self._deadline - time.monotonic()) if timeout_s is None else timeout_s
        if not self._ended.wait(left):
            raise CheckpointError(
                f"{self.folder} was not whole and copied after {self._timeout_s if timeout_s is None else timeout_s:g} s; "
                "it goes on in the background: wait longer, or raise `checkpoint_timeout_s`"
            )
        self._told = True
        if self._error is not None:
            raise CheckpointError(str(self._error)) from self._error
