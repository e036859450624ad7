"""What ran out, told so that a person can act on it: memory, room on a disk, open files."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat_recipes.settings.tree import RunConfig

# Not every library raises an OSError: tokenizers, SQLite and Ray put the system's words into errors of their own.
_ROOM = ("No space left on device", "Disk quota exceeded", "database or disk is full")
_FILES = ("Too many open files",)
_MEMORY = ("can't allocate memory", "Cannot allocate memory")


def describe_error(config: RunConfig, error: BaseException) -> str:
    """Say what ran out, where and what to do about it, if that is what `error` came of; else return nothing."""
    if _is_of(error, _ROOM, errno.ENOSPC, errno.EDQUOT):
        return (
            f"no room is left: {_where(error)}. Free bytes, or files where those ran out (df -h and df -i on "
            f"{config.folder.absolute()} and on the temporary folder tell), or choose another run_dir. What was saved is whole"
        )
    if _is_of(error, _FILES, errno.EMFILE, errno.ENFILE):
        return f"too many files are open: {_where(error)}. Allow more (ulimit -n 65536)"
    ran_out = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if not ran_out and not _is_of(error, _MEMORY, errno.ENOMEM):
        return ""
    return (
        f"memory ran out: {_where(error)}. What takes less: engine.micro_batch_tokens (now {config.engine.micro_batch_tokens}), "
        f"engine.activation_checkpointing=true, engine.offload_optimizer=true, more ranks (engine.num_ranks, now "
        f"{config.engine.num_ranks}), fewer replicas (rollout.num_replicas, now {config.rollout.num_replicas}) or less for each "
        "(rollout.gpu_memory_fraction, rollout.kv_cache_gib). A run may go on with any of these changed"
    )


def _is_of(error: BaseException, words: tuple[str, ...], *numbers: int) -> bool:
    return any(
        (isinstance(one, OSError) and one.errno in numbers) or any(word in str(one) for word in words)
        for one in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and what it came of, each once."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def _where(error: BaseException) -> str:
    said = str(error).strip()
    return "; ".join(
        [said.splitlines()[0] if said else type(error).__name__, *getattr(error, "__notes__", [])]
    )
