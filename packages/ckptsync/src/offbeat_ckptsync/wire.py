"""The wire values as JSON: plain text both ways, strict about every field, no pickle."""

from __future__ import annotations

import copy
import dataclasses
import json
import types
from enum import Enum
from functools import cache, lru_cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from offbeat_ckptsync import errors
from offbeat_ckptsync.errors import SyncError, WireError
from offbeat_ckptsync.values import Manifest

_Value = TypeVar("_Value")
Json = dict[str, object]
"""A JSON object, decoded."""


def encode(value: object) -> Json:
    """Return a wire value (a dataclass of `types`) as a JSON object, not to be changed."""
    if isinstance(value, Manifest):
        return _encode_manifest(value)
    return _encode(value)


@lru_cache(maxsize=4)  # weights keep their names and shapes: the same manifest goes out with every sync
def _encode_manifest(manifest: Manifest) -> Json:
    return _encode(manifest)


def _encode(value: object) -> Json:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        raise WireError(f"only values of offbeat_ckptsync.values travel, got {type(value).__name__}")
    return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}


def decode(kind: type[_Value], data: object) -> _Value:
    """Return the value of type `kind` that `encode` made `data` from.

    Raises:
        WireError: a field is unknown, missing, or not of its type; the message names it.
    """
    return cast("_Value", _decode(kind, data, kind.__name__))


def decode_as(kind: object, data: object, where: str) -> Any:  # noqa: ANN401 -- of the type `kind` says
    """Return the value of type `kind`, which may be a list or a dictionary of wire values, that `plain` made `data` from.

    Raises:
        WireError: it is not of its type; the message begins with `where`.
    """
    return _decode(kind, data, where)


def dumps(value: object) -> str:
    """Return a wire value as JSON text."""
    return json.dumps(encode(value), separators=(",", ":"))


def loads(kind: type[_Value], text: str | bytes) -> _Value:
    """Return the wire value in JSON text; raises `WireError` as `decode` does."""
    try:
        data: object = json.loads(text)
    except ValueError as error:
        raise WireError(f"{kind.__name__}: not JSON: {error}") from error
    return decode(kind, data)


def encode_error(error: BaseException) -> Json:
    """Return an exception as a JSON object: its type's name and its message."""
    return {"type": type(error).__name__, "message": str(error) or repr(error)}


def decode_error(data: object, *, where: str) -> SyncError:
    """Return the error of `encode_error` as an exception of this package, its message beginning with `where`."""
    if not isinstance(data, dict):
        raise WireError(f"{where}: expected an error object, got {data!r}")
    told = cast("dict[str, object]", data)
    name, message = str(told.get("type")), str(told.get("message"))
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, SyncError):
        return kind(f"{where}: {message}")
    return SyncError(f"{where}: {name}: {message}")


def plain(value: object) -> object:
    """Return a wire value, or lists and dictionaries of them, as JSON."""
    if dataclasses.is_dataclass(value):
        return encode(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in cast("tuple[object, ...]", value)]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in cast("dict[str, object]", value).items()}
    return value


def _decode(kind: object, data: object, where: str) -> object:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _decode_union(get_args(kind), data, where)
    if origin is Literal:
        if data not in get_args(kind):
            raise WireError(f"{where}: expected one of {get_args(kind)}, got {data!r}")
        return data
    if origin in (tuple, list):
        item_kind = get_args(kind)[0]  # only tuple[X, ...] is used
        given = cast("list[object]", _require(list, data, where))
        items = [_decode(item_kind, item, f"{where}[{i}]") for i, item in enumerate(given)]
        return tuple(items) if origin is tuple else items
    if origin is dict:
        item_kind = get_args(kind)[1]
        table = cast("dict[str, object]", _require(dict, data, where))
        return {key: _decode(item_kind, item, f"{where}.{key}") for key, item in table.items()}
    if kind is Manifest:
        return _last_manifest.decode(data, where)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_dataclass(kind, data, where)
    if kind is float and type(data) is int:
        return float(data)  # JSON writes 1.0 as it likes
    return _require(cast("type", kind), data, where)


class _LastManifest:
    """The manifest that came last, and the data it was made from: it comes again with every sync, thousands of specs long."""

    def __init__(self) -> None:
        self._known: tuple[object, object] = (None, None)

    def decode(self, data: object, where: str) -> object:
        known, manifest = self._known
        if known is None or known != data:
            manifest = _decode_dataclass(Manifest, data, where)
            self._known = copy.deepcopy(data), manifest
        return manifest


_last_manifest = _LastManifest()


def _decode_dataclass(kind: type, data: object, where: str) -> object:
    table = cast("dict[str, object]", _require(dict, data, where))
    hints, fields = _shape_of(kind)
    for name in table:
        if name not in fields:
            raise WireError(f"{where}: unknown field {name!r}; expected {', '.join(fields)}")
    for name, item in fields.items():
        optional = item.default is not dataclasses.MISSING or item.default_factory is not dataclasses.MISSING
        if name not in table and not optional:
            raise WireError(f"{where}: field {name!r} is missing")
    values = {name: _decode(hints[name], item, f"{where}.{name}") for name, item in table.items()}
    try:
        return kind(**values)
    except ValueError as error:
        raise WireError(f"{where}: {error}") from error


@cache
def _shape_of(kind: type) -> tuple[dict[str, Any], dict[str, dataclasses.Field[Any]]]:
    """Return types and fields of a dataclass; asked for once per tensor of a manifest, and slow to find out."""
    return get_type_hints(kind), {item.name: item for item in dataclasses.fields(kind)}


def _decode_union(kinds: tuple[object, ...], data: object, where: str) -> object:
    if type(data) in kinds or (data is None and type(None) in kinds):
        return data
    values = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
    if isinstance(data, dict) and len(values) == 1:
        return _decode(values[0], cast("object", data), where)
    raise WireError(f"{where}: expected one of {', '.join(str(kind) for kind in kinds)}, got {data!r}")


def _require(kind: type, data: object, where: str) -> object:
    if type(data) is not kind:  # exact: a bool is no int on this wire
        raise WireError(f"{where}: expected {kind.__name__}, got {data!r}")
    return data
