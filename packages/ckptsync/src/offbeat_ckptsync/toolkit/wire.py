"""The wire values as JSON: plain text both ways, strict about every field, no pickle. msgspec converts and checks types."""

from __future__ import annotations

import dataclasses
from functools import cache, lru_cache
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec

from offbeat_ckptsync import errors
from offbeat_ckptsync.errors import SyncError, WireError
from offbeat_ckptsync.values import Manifest, SyncOffer

_Value = TypeVar("_Value")
Json = dict[str, object]
"""A JSON object, decoded."""


def encode(value: object) -> Json:
    """Return a wire value (a dataclass of `values`) as a JSON object, not to be changed."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        raise WireError(f"only values of offbeat_ckptsync.values travel, got {type(value).__name__}")
    return cast("Json", plain(value))


def plain(value: object) -> object:
    """Return a wire value, or lists and dictionaries of them, as JSON."""
    if isinstance(value, Manifest):
        return _manifest(value)
    if isinstance(value, SyncOffer):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    return msgspec.to_builtins(value)


@lru_cache(maxsize=16)  # weights keep names and shapes, so the same goes to every member and with every sync
def _manifest(value: Manifest) -> Json:
    return msgspec.to_builtins(value)


def decode(kind: type[_Value], data: object) -> _Value:
    """Return the value of type `kind` that `encode` made `data` from.

    Raises:
        WireError: a field is unknown, missing, or not of its type; the message names it.
    """
    return decode_as(kind, data, kind.__name__)


def decode_as(kind: Any, data: object, where: str) -> Any:  # noqa: ANN401 -- of the type `kind` says
    """Return the value of type `kind`, which may be a list or a dictionary of wire values, that `plain` made `data` from.

    Raises:
        WireError: it is not of its type; the message begins with `where`.
    """
    try:
        value = msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")  # say "Expected `int`, got `str` - at `$.version`"
        raise WireError(f"{where}{path.rstrip('`')}: {reason}") from error
    _require_known(kind, data, where)
    return value


def _require_known(kind: Any, data: Any, where: str) -> None:  # noqa: ANN401 -- as above; JSON
    """Refuse fields that a dataclass in `kind` does not have: msgspec passes over them."""
    if dataclasses.is_dataclass(kind) and isinstance(data, dict):
        hints = _hints_of(kind)
        for name, item in cast("Json", data).items():
            if name not in hints:
                raise WireError(f"{where}: unknown field {name!r}; expected {', '.join(hints)}")
            _require_known(hints[name], item, f"{where}.{name}")
        return
    for inner in filter(dataclasses.is_dataclass, get_args(kind)):  # of a list, a table, or a union with None
        origin = get_origin(kind)
        items = data.values() if origin is dict else data if origin in (list, tuple) else [data]
        for item in items:
            _require_known(inner, item, where)


@cache
def _hints_of(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


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
