"""The Hugging Face folder of a trained model: its weights, the config it came with, and what lies beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat_engine.toolkit import weight_folders
from offbeat_engine.toolkit.weight_folders import copy_beside, named_files, write_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from offbeat_engine.values import WeightSpec
    from offbeat_engine.world import World


def export_folder(
    world: World,
    final: Path,
    specs: tuple[WeightSpec, ...],
    named: Iterator[tuple[str, torch.Tensor | None]],
    origin: str,
) -> None:
    """Write the Hugging Face folder `final` on rank 0, whole or not at all; a collective.

    Raises:
        CheckpointError: it could not be written; on all ranks together.
    """

    def write(folder: Path | None) -> None:
        write_files(folder, named_files(specs), specs, named)
        if folder is not None:
            _write_config(folder, Path(origin), str(specs[0].dtype).removeprefix("torch."))
            copy_beside(folder, Path(origin))

    weight_folders.export_folder(world, final, Path(origin), write)


def _write_config(folder: Path, origin: Path, dtype: str) -> None:
    config = json.loads((origin / "config.json").read_text())
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
