"""Reading what torch.distributed.checkpoint wrote without trusting it: its `.metadata` is a pickle.

A pickle can name any function and have it called. This one may name only the plain data classes that DCP itself puts
there; and what they say may only be tensors, in files that the checkpoint lists.
"""

# torch.distributed.checkpoint is typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from offbeat_engine.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Collection

METADATA = ".metadata"

_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    *(
        (f"{_DCP}.metadata", name)
        for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")
    ),
    *((f"{_DCP}.metadata", name) for name in ("TensorStorageMetadata", "ChunkStorageMetadata")),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),  # looks a name up among the layouts
    ("torch", "Size"),
    *(("pathlib", name) for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")),
}


class _Unpickler(pickle.Unpickler):
    """Finds the classes of DCP's metadata, torch's dtypes, and nothing else."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:  # noqa: ANN401
        named = (module_name, global_name)
        if named in _ALLOWED:
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(dtype := getattr(torch, global_name, None), torch.dtype):
            return dtype
        raise CheckpointError(
            f"the checkpoint's metadata asks for `{module_name}.{global_name}`, which has no place there: "
            "it was not written by this engine, or was tampered with; do not load it"
        )


class CheckedReader(FileSystemReader):
    """DCP's reader of a folder, with its metadata read as said above.

    `files` are the names that the checkpoint lists, None for one that was written before it did.
    """

    def __init__(self, folder: Path, files: Collection[str] | None) -> None:
        super().__init__(folder)
        self._folder = folder
        self._files = files

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:  # noqa: ANN401 DCP passes a rank that has no file here
        """Return DCP's metadata.

        Raises:
            CheckpointError: it is not DCP's, or speaks of anything but tensors in files of the checkpoint.
        """
        path = self._folder / METADATA
        try:
            metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
            self._check(metadata)
        except CheckpointError:
            raise
        # Whatever odd bytes make of an unpickler: it promises no particular exception.
        except Exception as error:
            raise CheckpointError(
                f"{path} cannot be read ({type(error).__name__}: {error}); use another checkpoint"
            ) from error
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def file_names(self) -> set[str]:
        """Return the files that hold tensors, as the metadata says."""
        return {info.relative_path for info in (self.read_metadata().storage_data or {}).values()}

    def _check(self, metadata: Any) -> None:  # noqa: ANN401 whatever was in the pickle
        if not isinstance(metadata, Metadata):
            raise CheckpointError(
                f"{self._folder / METADATA} should hold DCP's metadata, got {type(metadata)}"
            )
        for name, entry in metadata.state_dict_metadata.items():
            # DCP unpickles, without restriction, what is said to be bytes.
            if not isinstance(entry, TensorStorageMetadata):
                raise CheckpointError(f"{self._folder} holds something else than a tensor under {name!r}")
        for info in metadata.storage_data.values():
            name = info.relative_path
            if name != Path(name).name or (self._files is not None and name not in self._files):
                raise CheckpointError(f"{self._folder} keeps a tensor in {name!r}, which it does not list")
            if info.transform_descriptors:
                raise CheckpointError(f"{self._folder}/{name} was transformed, which this engine never does")
