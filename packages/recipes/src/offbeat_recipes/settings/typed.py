"""What `Trainer` takes, for editors and type checkers: they read typed.pyi, which `tools/make_typed_settings.py` writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., object]")


def takes_settings(init: F) -> F:
    """Return `init`, a method that takes what `Trainer` does, as it is; in typed.pyi it has a keyword for each section."""
    return init


function_takes_settings = takes_settings
"""The same for a function, which has no `self`."""
