"""The wire values as JSON: plain text both ways, strict about every field, no pickle."""

from __future__ import annotations

import dataclasses
import marshal
import threading
import types
from collections.abc import Sequence
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from offbeat_ckptsync import errors
from offbeat_ckptsync.errors import SyncError, WireError
from offbeat_ckptsync.values import Manifest

if TYPE_CHECKING:
    from collections.abc import Callable

_Value = TypeVar("_Value")
Json = dict[str, object]
"""A JSON object, decoded."""


def encode(value: object) -> Json:
    """Return a wire value (a dataclass of `types`) as a JSON object, not to be changed."""
    if isinstance(value, Manifest):
        return _encoded.get(value)
    return _encode(value)


def _encode(value: object) -> Json:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        raise WireError(f"only values of offbeat_ckptsync.values travel, got {type(value).__name__}")
    return {name: plain(getattr(value, name)) for name in _shape_of(type(value))[1]}


class _Encoded:
    """Manifests encoded last: weights keep names and shapes, so the same go to every member and with every sync."""

    def __init__(self) -> None:
        self._kept: list[tuple[Manifest, Json]] = []
        self._turn = threading.Lock()  # all members are asked at once: one does the work, in one thread

    def get(self, value: Manifest) -> Json:
        with self._turn:
            for known, data in self._kept:
                if known is value:
                    return data
            data = _encode(value)
            self._kept = [(value, data), *self._kept][:_KEPT]
            return data


_KEPT = 16
_encoded = _Encoded()


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
    if type(value) in _PLAIN:
        return value
    if dataclasses.is_dataclass(value):
        return encode(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        if hasattr(type(cast("object", value)), "_fields"):
            # A row of plain values: JSON as it is, and nothing for a garbage collector to go through.
            return tuple(cast("tuple[object, ...]", value))
        return [plain(item) for item in cast("tuple[object, ...]", value)]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in cast("dict[str, object]", value).items()}
    return value


def _decode(kind: object, data: object, where: str) -> object:
    exact: Any = type(data)
    if exact is kind:
        return data  # a plain type, exactly: a bool is no int on this wire
    special = _SPECIAL.get(kind)
    if special is not None:
        return special(data, where)
    origin = get_origin(kind)
    if origin is not None:
        return _decode_generic(kind, origin, data, where)
    if isinstance(kind, type):
        if dataclasses.is_dataclass(kind):
            return _decode_dataclass(kind, data, where)
        if issubclass(kind, tuple):
            return _decode_row(cast("type", kind), data, where)
    if kind is float and type(data) is int:
        return float(data)  # JSON writes 1.0 as it likes
    return _require(cast("type", kind), data, where)


def _decode_generic(kind: object, origin: Any, data: object, where: str) -> object:  # noqa: ANN401 -- of a type
    if origin in (Union, types.UnionType):
        return _decode_union(get_args(kind), data, where)
    if origin is Literal:
        if data not in get_args(kind):
            raise WireError(f"{where}: expected one of {get_args(kind)}, got {data!r}")
        return data
    if origin in (tuple, list, Sequence):
        item_kind = get_args(kind)[0]  # only tuple[X, ...] is used
        given = cast("list[object]", _require(list, data, where))
        if {*map(type, given)} == {item_kind}:  # plain and of one type: there may be very many
            return given if origin is list else tuple(given)
        items = [_decode(item_kind, item, f"{where}[{i}]") for i, item in enumerate(given)]
        return items if origin is list else tuple(items)
    assert origin is dict, kind
    item_kind = get_args(kind)[1]
    table = cast("dict[str, object]", _require(dict, data, where))
    if {*map(type, table.values())} == {item_kind}:
        return table
    return {key: _decode(item_kind, item, f"{where}.{key}") for key, item in table.items()}


class _Decoded:
    """Large values decoded last: they come again with every sync, and are the same objects then."""

    def __init__(self, decode: Callable[[object, str], object]) -> None:
        self._decode = decode
        self._kept: list[tuple[bytes, object]] = []
        self._turn = threading.Lock()  # as above

    def __call__(self, data: object, where: str) -> object:
        with self._turn:
            try:
                key = marshal.dumps(cast("Any", data), 2)  # tells True from 1, as `==` does not
            except ValueError:  # no JSON; refused with its field's name
                return self._decode(data, where)
            for known, value in self._kept:
                if known == key:
                    return value
            value = self._decode(data, where)
            self._kept = [(key, value), *self._kept][:_KEPT]
            return value


def _decode_row(kind: type, data: object, where: str) -> object:
    hints = _hints_of(kind)
    row = cast("list[object]", _require(list, data, where))
    if len(row) != len(hints):
        raise WireError(f"{where}: expected {', '.join(hints)}, got {row!r}")
    return kind(
        *(
            _decode(hint, item, f"{where}.{name}")
            for (name, hint), item in zip(hints.items(), row, strict=True)
        )
    )


_PLAIN = (str, int, float, bool, type(None))
_SPECIAL: dict[object, Callable[[object, str], object]] = {
    Manifest: _Decoded(lambda data, where: _decode_dataclass(Manifest, data, where)),
}


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
    return _hints_of(kind), {item.name: item for item in dataclasses.fields(kind)}


@cache
def _hints_of(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _decode_union(kinds: tuple[object, ...], data: object, where: str) -> object:
    if type(data) in kinds or (data is None and type(None) in kinds):
        return data
    values = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
    if isinstance(data, dict) and len(values) == 1:
        return _decode(values[0], cast("object", data), where)
    raise WireError(f"{where}: expected one of {', '.join(str(kind) for kind in kinds)}, got {data!r}")


def _require(kind: type, data: object, where: str) -> object:
    if kind is list and type(data) is tuple:
        return [*cast("tuple[object, ...]", data)]  # a row that has not been text
    if type(data) is not kind:  # exact: a bool is no int on this wire
        raise WireError(f"{where}: expected {kind.__name__}, got {data!r}")
    return data
