"""The safetensors of a Hugging Face folder: names and shapes at once, values by rows."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable
    from pathlib import Path

    import torch

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PART_BYTES = 32 << 20


class Read(Protocol):
    """What `WeightFiles.opened` gives."""

    def __call__(
        self, name: str, start: int = 0, stop: int | None = None, columns: slice | None = None
    ) -> torch.Tensor:
        """Return rows `start` to `stop` (None: the end) of the weight `name`, of them `columns` (None: all)."""
        ...


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Which tensor lies in which file, and its shape there."""

    files: dict[str, Path]
    shapes: dict[str, tuple[int, ...]]

    @classmethod
    def find(cls, folder: Path) -> WeightFiles | None:
        """Read the headers of what `from_pretrained` would read; None where the folder has no safetensors.

        Raises:
            OSError: a file that the index names is not there.
            ValueError: one is cut off or damaged.
        """
        from safetensors import SafetensorError, safe_open

        if (folder / _SINGLE).is_file():
            names = [_SINGLE]
        elif (folder / _INDEX).is_file():
            names = sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
        else:
            return None
        files: dict[str, Path] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for name in names:
            try:
                with safe_open(folder / name, framework="pt") as opened:
                    for key in opened.keys():  # noqa: SIM118 a safetensors file is no dictionary
                        files[key] = folder / name
                        shapes[key] = tuple(opened.get_slice(key).get_shape())
            except SafetensorError as error:
                raise ValueError(
                    f"{name} is cut off or damaged ({error}): copy or download it again"
                ) from error
        return cls(files, shapes)

    @contextmanager
    def opened(self, names: Iterable[str]) -> Generator[Read]:
        """Give a function that reads rows, or some columns of them.

        What it returns is a view of the file, valid inside only. Files are opened for a few tensors at a time because
        pages that were read stay in a process's memory until their file is closed.
        """
        from safetensors import safe_open

        with ExitStack() as stack:
            paths = {self.files[name] for name in names}
            readers: dict[Path, Any] = {
                path: stack.enter_context(safe_open(path, framework="pt")) for path in paths
            }

            def read(
                name: str, start: int = 0, stop: int | None = None, columns: slice | None = None
            ) -> torch.Tensor:
                reader = readers[self.files[name]]
                if not self.shapes[name]:
                    return reader.get_tensor(name)
                part = reader.get_slice(name)
                return part[start:stop] if columns is None else part[start:stop, columns]

            yield read

    def non_finite(self, max_bytes: int = 1 << 30) -> dict[str, Path]:
        """Return the tensors that hold NaN or infinity, with the file of each; integers hold neither.

        Files of more than `max_bytes` together are read in part: of every tensor the first rows, the same share of each. Ranks
        look at the rest as they load it.
        """
        paths = {*self.files.values()}
        share = min(1.0, max_bytes / max(1, sum(path.stat().st_size for path in paths)))
        odd: dict[str, Path] = {}
        for path in sorted(paths):
            names = [name for name, file in self.files.items() if file == path]
            with self.opened(names) as read:
                odd |= {name: path for name in names if _holds_odd(read, name, self.shapes[name], share)}
        return odd


def _holds_odd(read: Read, name: str, shape: tuple[int, ...], share: float) -> bool:
    import torch

    if 0 in shape:
        return False
    rows = math.ceil(shape[0] * share) if shape else 1
    step = max(1, _PART_BYTES // (4 * math.prod(shape[1:])))
    for start in range(0, rows, step):
        part = read(name, start, min(rows, start + step))
        if not part.is_floating_point():
            return False
        if part.dtype.itemsize == 1:  # of which torch knows no sum
            part = part.to(torch.float32)
        # A sum is not finite if one of its numbers is not: one pass, and no memory. A large one may be infinite by itself.
        if not part.sum(dtype=torch.float32).isfinite() and not part.isfinite().all():
            return True
    return False
