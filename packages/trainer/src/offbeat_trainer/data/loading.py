"""Classes and functions that users name by where they are: "package.module:name", "folder/file.py:name" or "folder/file.pkl:name".

A pickle holds one object that somebody gave as such, in Python: `save_object` writes it, by value, so that no process that reads it
needs the script, the notebook or the modules beside it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import pickle
import re
import sys
import sysconfig
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from offbeat_trainer.errors import LoadError

if TYPE_CHECKING:
    from types import ModuleType

_PREFIX = "offbeat_file_"
_PICKLED: dict[tuple[str, int, int], object] = {}
"""What was read from pickles: by file, time and size, so that a class is the same one each time."""


def load_object(path: str) -> object:
    """Return what `path` names. A file is read once per process; modules beside it, or in the working directory, are found.

    A pickle runs code of whoever wrote it, as a Python file does.

    Raises:
        LoadError: `path` has no such form, what it names cannot be imported, or has no such name.
    """
    home, mark, name = path.rpartition(":")
    if not mark or not home or not name:
        raise LoadError(f"expected package.module:name or file.py:name, got {path!r}")
    if home.endswith(".pkl"):
        return _unpickled(home)
    module = load_file(home) if home.endswith(".py") else _import(home)
    if not hasattr(module, name):
        raise LoadError(f"{home} has no {name!r}")
    return getattr(module, name)


def load_file(path: str) -> ModuleType:
    """Return the module that the Python file at `path` makes; see `load_object`."""
    file = Path(path).resolve()
    name = f"{_PREFIX}{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    _findable(file.parent)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception):  # whatever a user's module raises
            raise LoadError(f"cannot import {path!r}: {type(error).__name__}: {error}") from error
        raise
    return module


def place_of(cls: type) -> str | None:
    """Return by which path, absolute, `load_object` gives `cls` in another process; None for one of an importable module."""
    if cls.__module__.startswith(_PREFIX):
        return f"{sys.modules[cls.__module__].__file__}:{cls.__qualname__}"
    found = (file for (file, *_), value in _PICKLED.items() if value is cls)
    return next((f"{file}:{cls.__name__}" for file in found), None)


def name_of(value: object) -> str:
    """Return the name that a function or class goes by in settings and metrics: "object" where it has none."""
    name = str(getattr(value, "__name__", type(value).__name__))
    return name if name.isidentifier() else "object"  # a lambda


def save_object(value: object, file: Path) -> None:
    """Write `value` to `file` for `load_object`, with all of the user's own code that it uses.

    Raises:
        LoadError: it holds what cannot leave this process.
    """
    import cloudpickle

    pickled, others = io.BytesIO(), _not_own()
    own = {  # by the name that it has itself: it may stand in sys.modules under others, too
        module.__name__: module
        for module in [*sys.modules.values()]
        if _is_own(getattr(module, "__file__", None), others)
    }
    for name in {"__main__"} | cast("set[str]", cloudpickle.list_registry_pickle_by_value()):
        own.pop(name, None)
    for module in own.values():
        cloudpickle.register_pickle_by_value(module)
    try:
        _pickler()(pickled).dump(value)
    except Exception as error:  # whatever the parts of a user's object raise
        raise LoadError(
            f"{name_of(value)!r} cannot be sent to the processes that call it: {type(error).__name__}: {error}"
        ) from error
    finally:
        for module in own.values():
            cloudpickle.unregister_pickle_by_value(module)
    file.write_bytes(pickled.getvalue())


@cache
def _pickler() -> type[Any]:
    import cloudpickle

    marks = {
        id(mark): name for name, mark in vars(dataclasses).items() if type(mark).__module__ == "dataclasses"
    }

    class Pickler(cloudpickle.Pickler):
        """Leaves the marks by which dataclasses know "no default" and the like what they are: they are told by identity."""

        def reducer_override(self, obj: Any) -> Any:  # noqa: ANN401 whatever is pickled
            if id(obj) in marks:
                return getattr, (dataclasses, marks[id(obj)])
            return cast("Any", super()).reducer_override(obj)

    return Pickler


def _unpickled(path: str) -> object:
    file = Path(path).resolve()
    try:
        at = file.stat()
        key = (str(file), at.st_mtime_ns, at.st_size)
        if key not in _PICKLED:
            _PICKLED[key] = pickle.loads(file.read_bytes())
    except Exception as error:  # whatever a user's object raises
        raise LoadError(f"cannot read {path!r}: {type(error).__name__}: {error}") from error
    return _PICKLED[key]


def _is_own(file: object, others: tuple[str, ...]) -> bool:
    """Whether the `file` of a module is the user's own: neither installed nor of Python nor of ours."""
    return isinstance(file, str) and not any(part in file for part in others)


def _import(name: str) -> ModuleType:
    _findable(Path.cwd())
    try:
        return import_module(name)
    except Exception as error:
        raise LoadError(f"cannot import {name!r}: {type(error).__name__}: {error}") from error


def _findable(folder: Path) -> None:
    """Let modules in `folder` be imported, after all others: a file of the user's hides nothing that is installed."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def own_place(trace: str) -> str:
    """Return "file:line" of the last frame in `trace`, a formatted traceback, that is in a file of the user's own; "" for none."""
    not_own = _not_own()
    frames = re.findall(r'File "([^"]+)", line (\d+)', trace)
    own = [f"{file}:{line}" for file, line in frames if not any(part in file for part in not_own)]
    return own[-1] if own else ""


def _not_own() -> tuple[str, ...]:
    """Return what the files of everybody but the user have in their paths."""
    ours = {
        str(Path(module.__file__).parent)
        for name, module in [*sys.modules.items()]
        if name.startswith("offbeat_") and not name.startswith(_PREFIX) and module.__file__ is not None
    }
    return (*ours, f"{os.sep}site-packages{os.sep}", "<", sysconfig.get_path("stdlib"))
