"""Names, shapes and dtypes of a model folder's weights, read from safetensors headers alone.

A safetensors file begins with eight bytes, the little-endian length of a JSON header that follows
(huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from offbeat_rollout.errors import ConfigError

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
_MAX_HEADER_BYTES = 100_000_000  # the format's own bound


def folder_specs(model_path: str, served_dtype: str) -> list[tuple[str, tuple[int, ...], str]]:
    """Return (name, shape, dtype name) of every weight in a Hugging Face folder, in name order.

    Floating-point weights are named in `served_dtype`: the engine casts them when it loads.

    Raises:
        ConfigError: there is no config.json, no safetensors file, or one that is damaged.
    """
    folder = Path(model_path)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{model_path!r} holds no config.json; `model_path` must be a local Hugging Face folder"
        )
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{model_path!r} holds no *.safetensors; write weights there first (`save_pretrained` does), random ones too"
        )
    specs: dict[str, tuple[str, tuple[int, ...], str]] = {}
    for file in files:
        for name, entry in _header(file).items():
            dtype = _DTYPES.get(entry["dtype"], str(entry["dtype"]).lower())
            specs[name] = (name, tuple(entry["shape"]), served_dtype if dtype in _FLOATS else dtype)
    return [specs[name] for name in sorted(specs)]


def _header(file: Path) -> dict[str, dict[str, Any]]:
    with file.open("rb") as handle:
        start = handle.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 0 < length <= _MAX_HEADER_BYTES:
            raise ConfigError(f"{str(file)!r} is no safetensors file: its header claims {length} bytes")
        try:
            header: dict[str, dict[str, Any]] = json.loads(handle.read(length))
        except ValueError as error:
            raise ConfigError(f"{str(file)!r} has a damaged header: {error}") from error
    header.pop("__metadata__", None)
    return header
