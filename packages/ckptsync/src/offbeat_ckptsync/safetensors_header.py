"""Headers of safetensors files (github.com/huggingface/safetensors, "Format"): specs without reading tensors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

from offbeat_ckptsync.errors import ManifestError
from offbeat_ckptsync.manifest import dtype_of, num_bytes_of
from offbeat_ckptsync.types import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

# The format's own names.
_TO_FORMAT = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32",
    "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip
_FROM_FORMAT = {name: dtype for dtype, name in _TO_FORMAT.items()}


def write_header(specs: Iterable[TensorSpec]) -> tuple[bytes, list[int]]:
    """Return the head of a file that holds `specs`, and where the bytes of each start in that file.

    Tensors lie by falling element size, so that each is aligned to its own elements.

    Raises:
        ManifestError: the format has no such dtype.
    """
    ordered = list(specs)
    table: dict[str, object] = {}
    offsets = [0] * len(ordered)
    end = 0
    for index in sorted(range(len(ordered)), key=lambda i: (-dtype_of(ordered[i].dtype).itemsize, i)):
        spec = ordered[index]
        if spec.dtype not in _TO_FORMAT:
            raise ManifestError(
                f"safetensors has no dtype {spec.dtype} ({spec.name!r}); use another transport"
            )
        offsets[index] = end
        end += num_bytes_of(spec)
        table[spec.name] = {
            "dtype": _TO_FORMAT[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offsets[index], end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, [len(head) + offset for offset in offsets]


def folder_specs(folder: Path) -> tuple[TensorSpec, ...]:
    """Return the specs of every tensor in the safetensors files of `folder`, by name; none where it has no file."""
    specs = {spec.name: spec for path in sorted(folder.glob("*.safetensors")) for spec in _file_specs(path)}
    return tuple(specs[name] for name in sorted(specs))


def _file_specs(path: Path) -> list[TensorSpec]:
    from safetensors import safe_open

    # The library's stub knows neither names nor slices.
    with cast("Any", safe_open)(path, framework="pt") as file:
        names: list[str] = list(file.keys())
        return [_spec(name, file.get_slice(name)) for name in names]


def _spec(name: str, part: Any) -> TensorSpec:  # noqa: ANN401 -- a slice of the library's
    dtype = str(part.get_dtype())
    return TensorSpec(name=name, shape=tuple(part.get_shape()), dtype=_FROM_FORMAT.get(dtype, dtype))
