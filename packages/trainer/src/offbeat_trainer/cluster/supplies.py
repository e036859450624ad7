"""The model's folder for replicas on machines that do not have it: its files, piece by piece, from the driver's."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat_trainer.cluster.waits import answer
from offbeat_trainer.errors import PlanRefused

if TYPE_CHECKING:
    from collections.abc import Iterator

PIECE_BYTES = 16 << 20


class Supplies:
    """Brings `folder` to a machine once, however many replicas run there."""

    def __init__(self, folder: str, timeout_s: float) -> None:
        """Each piece has `timeout_s`."""
        self._folder = Path(folder)
        self._timeout_s = timeout_s
        self._one_at_a_time: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def bring(self, name: str, handle: Any, node: str) -> None:  # noqa: ANN401
        """Let replica `name`, on machine `node`, find the folder under the path that it has here; moves nothing if it does."""
        async with self._one_at_a_time[node]:
            if not await self._ask(name, handle.lacks_model.remote(), "look for the model"):
                return
            pieces = _pieces(self._folder)
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                await self._ask(name, handle.take_piece.remote(*piece), f"take {piece[0]} of the model")
            await self._ask(name, handle.take_piece.remote("", None), "put the model in place")

    async def _ask(self, name: str, call: Any, what: str) -> Any:  # noqa: ANN401
        return await answer(call, owner=name, what=what, timeout_s=self._timeout_s)


def take_piece(folder: Path, name: str, piece: bytes | None) -> None:
    """Append `piece` to file `name` of what will be `folder`; without a name it begins, and with None it is put in place.

    What somebody else has put in its place stays. What a process of this id left, which was killed as it took pieces, goes.

    Raises:
        PlanRefused: it cannot be written here.
    """
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        if piece is None:
            if folder.exists():
                shutil.rmtree(beside)
            else:
                beside.rename(folder)
            return
        if not name:
            shutil.rmtree(beside, ignore_errors=True)
            return
        target = beside / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("ab") as file:
            file.write(piece)
    except OSError as error:
        raise PlanRefused(
            f"the model in {folder} is not on this machine and could not be brought here ({error}): put it there, or use a "
            "folder that all machines share"
        ) from error


def _pieces(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the beginning, then (relative name, bytes) of every file, in order; a file without bytes has one piece."""
    yield "", b""
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        with path.open("rb") as file:
            piece = file.read(PIECE_BYTES)
            yield str(path.relative_to(folder)), piece
            while piece := file.read(PIECE_BYTES):
                yield str(path.relative_to(folder)), piece
