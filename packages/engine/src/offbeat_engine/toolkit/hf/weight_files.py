"""The safetensors of a Hugging Face folder: names and shapes at once, values by rows."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from offbeat_engine.errors import CheckpointError
from offbeat_engine.toolkit.state import checkpoint_folders
from offbeat_engine.toolkit.state.saves import on_rank_zero, together

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator
    from pathlib import Path

    from offbeat_engine.batch import WeightSpec
    from offbeat_engine.toolkit.world import World


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


MAX_FILE_BYTES = 4 << 30
_CONFIGS = ("config.json", "adapter_config.json")
# Copied beside the weights when the source folder has them: a tokenizer in any form, and how to generate.
_BESIDE = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "sentencepiece.bpe.model", "tiktoken.model", "tekken.json",
    "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip


def export_folder(world: World, final: Path, origin: Path, write: Callable[[Path | None], None]) -> None:
    """Let `write` make the folder `final`, whole or not at all; a collective, in which rank 0 alone is given a folder to write to.

    An older model in its place is replaced.

    Raises:
        CheckpointError: it could not be written; or what is there is no model, or `origin`, which this one was read from. On all ranks
            together.
    """
    folder = checkpoint_folders.partial_path(final) if world.rank == 0 else None

    def start() -> str:
        if final.exists() and final.samefile(origin):
            raise CheckpointError("this folder is the one that the model was read from; export to another")
        if final.exists() and not any((final / name).is_file() for name in _CONFIGS) and any(final.iterdir()):
            raise CheckpointError(
                "what is there is no model and would be lost; export to a folder of its own"
            )
        return str(checkpoint_folders.start_folder(final))

    on_rank_zero(world, start, f"could not start {final}")
    together(world, lambda: write(folder), f"could not write {final}")
    on_rank_zero(world, lambda: checkpoint_folders.finish_folder(final), f"could not finish {final}")


def plan_files(weights: tuple[WeightSpec, ...], max_bytes: int = MAX_FILE_BYTES) -> list[list[str]]:
    """Fill safetensors files in order, each with at most `max_bytes` (or a single larger tensor)."""
    files: list[list[str]] = []
    used = 0
    for spec in weights:
        num_bytes = _num_bytes(spec)
        if not files or used + num_bytes > max_bytes:
            files.append([])
            used = 0
        files[-1].append(spec.name)
        used += num_bytes
    return files


def named_files(planned: tuple[WeightSpec, ...]) -> dict[str, list[str]]:
    """Return what `plan_files` says by the names that transformers gives its files."""
    files = plan_files(planned)
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {
        f"model-{number:05}-of-{len(files):05}.safetensors": names for number, names in enumerate(files, 1)
    }


def _num_bytes(spec: WeightSpec) -> int:
    return torch.Size(spec.shape).numel() * spec.dtype.itemsize


def write_files(
    folder: Path | None,
    files: dict[str, list[str]],
    specs: tuple[WeightSpec, ...],
    named: Iterator[tuple[str, torch.Tensor | None]],
) -> None:
    """Write `named`, described by `specs`, as `files` (file to names); a collective, in which only the rank with a `folder` writes.

    It holds at most one file's tensors in memory at a time. A file that cannot be written is raised when all weights have
    passed: until then the other ranks wait for this one.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    failed: Exception | None = None
    for file_name, names in files.items():
        held: dict[str, torch.Tensor] = {}
        for _ in names:
            name, tensor = next(named)
            if tensor is not None and failed is None:
                held[name] = tensor.contiguous().cpu()
        if folder is not None and failed is None:
            try:
                save_file(held, folder / file_name, metadata={"format": "pt"})
            except (OSError, SafetensorError) as error:
                failed = error
    if failed is not None:
        raise failed
    if folder is not None and len(files) > 1:
        index = {name: file_name for file_name, names in files.items() for name in names}
        total = sum(map(_num_bytes, specs))
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        (folder / "model.safetensors.index.json").write_text(text)


def copy_beside(folder: Path, source: Path) -> None:
    """Copy the tokenizer, how to generate, and code of its own, where `source` has them."""
    for name in _BESIDE:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    # A model with code of its own, and its tokens.
    for found in (*source.glob("*.py"), *source.glob("*.tiktoken")):
        shutil.copyfile(found, folder / found.name)
