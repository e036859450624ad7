"""Classes and functions that users name by where they are: "package.module:name" or "folder/file.py:name"."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import sysconfig
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat_trainer.errors import LoadError

if TYPE_CHECKING:
    from types import ModuleType

_PREFIX = "offbeat_file_"


def load_object(path: str) -> object:
    """Return what `path` names. A file is read once per process; modules beside it, or in the working directory, are found.

    Raises:
        LoadError: `path` has no such form, what it names cannot be imported, or has no such name.
    """
    home, mark, name = path.rpartition(":")
    if not mark or not home or not name:
        raise LoadError(f"expected package.module:name or file.py:name, got {path!r}")
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


def file_of(module: str) -> str | None:
    """Return the file that the module of this name was read from by `load_file`; None for any other."""
    return sys.modules[module].__file__ if module.startswith(_PREFIX) else None


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
    ours = {
        str(Path(module.__file__).parent)
        for name, module in sys.modules.items()
        if name.startswith("offbeat_") and not name.startswith(_PREFIX) and module.__file__ is not None
    }
    not_own = (*ours, f"{os.sep}site-packages{os.sep}", "<", sysconfig.get_path("stdlib"))
    frames = re.findall(r'File "([^"]+)", line (\d+)', trace)
    own = [f"{file}:{line}" for file, line in frames if not any(part in file for part in not_own)]
    return own[-1] if own else ""
