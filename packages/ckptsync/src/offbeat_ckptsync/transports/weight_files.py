"""Safetensors files: the weights of a model folder by their headers, and the head of a file to be written.

The format is that of github.com/huggingface/safetensors ("Format").
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError, safe_open

from offbeat_ckptsync.errors import ManifestError
from offbeat_ckptsync.plan.manifest import dtype_of, num_bytes_of
from offbeat_ckptsync.values import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import torch

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
    """Return the specs of a model's weights in `folder`, by name; none where it has none as safetensors.

    What `model.safetensors` holds are those, else what the folder's index lists, as `from_pretrained` takes them: other files
    beside them (a second set of weights, adapters) are not the model's. Left out is what a folder lists and no trainer exports: rotary
    frequencies, which every model computes, and layers that predict further tokens.

    Raises:
        ManifestError: the index or a file of it is damaged.
    """
    try:
        aside = _left_out(folder)
        specs = [spec for file, names in _files(folder).items() for spec in _file_specs(folder / file, names)]
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ManifestError(
            f"{folder}: the safetensors files or their index cannot be read: {error!r}"
        ) from error
    return tuple(
        spec
        for spec in sorted(specs, key=lambda spec: spec.name)
        if not (spec.name.startswith(aside) or spec.name.endswith("rotary_emb.inv_freq"))
    )


def folder_tensor(folder: Path, name: str) -> torch.Tensor:
    """Return one of `folder_specs(folder)`, read from its file."""
    file = next(file for file, names in _files(folder).items() if names is None or name in names)
    with cast("Any", safe_open)(folder / file, framework="pt") as opened:
        return opened.get_tensor(name)


def _left_out(folder: Path) -> tuple[str, ...]:
    """Return how the names of layers begin that only predict further tokens."""
    about = folder / "config.json"
    config: dict[str, Any] = json.loads(about.read_text()) if about.is_file() else {}
    config = config.get("text_config", config)
    first = config.get("num_hidden_layers", 0)
    further = range(first, first + (config.get("num_nextn_predict_layers") or 0))
    return ("mtp.", *(f"model.layers.{layer}." for layer in further))


def _files(folder: Path) -> dict[str, list[str] | None]:
    """Return the files of the model with the names to take from each; None is all."""
    if (folder / "model.safetensors").is_file():
        return {"model.safetensors": None}
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return {}
    files: dict[str, list[str] | None] = {}
    for name, file in cast("dict[str, str]", json.loads(index.read_text())["weight_map"]).items():
        files[file] = [*(files.get(file) or ()), name]
    return files


def _file_specs(path: Path, names: list[str] | None) -> list[TensorSpec]:
    # The library's stub knows neither names nor slices.
    with cast("Any", safe_open)(path, framework="np") as file:
        return [_spec(name, file.get_slice(name)) for name in (file.keys() if names is None else names)]


def _spec(name: str, part: Any) -> TensorSpec:  # noqa: ANN401 -- a slice of the library's
    dtype = str(part.get_dtype())
    return TensorSpec(name=name, shape=tuple(part.get_shape()), dtype=_FROM_FORMAT.get(dtype, dtype))
