"""Write offbeat_recipes/settings/typed.pyi: what `Trainer` takes, for editors and type checkers.

Each section is a TypedDict of its settings, and dotted names are one more. Run without arguments to write the file; with --check to
fail where the committed one is not what would be written.
"""

from __future__ import annotations

import argparse
import sys
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from offbeat_recipes.cli._hydra import groups
from offbeat_recipes.settings.described import Described, described
from offbeat_recipes.settings.sections import PLUG_INS
from offbeat_trainer.algorithms.registry import peer_recipes

if TYPE_CHECKING:
    from collections.abc import Iterable

STUB = Path(__file__).resolve().parent.parent / "packages/recipes/src/offbeat_recipes/settings/typed.pyi"
HEAD = '''"""What `Trainer` takes. Written by `tools/make_typed_settings.py` from the fields of the settings; change those, not this file."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, Required, TypeAlias, TypedDict, TypeVar, Unpack

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
Text: TypeAlias = str | Path
Reward: TypeAlias = Callable[..., object] | str

class Task(Protocol):
    """A task that is made already."""

    def prompts(self, *args: Any, **kwargs: Any) -> Any: ...

class OwnSettings(TypedDict, total=False, extra_items=Any):
    """A section for a plug-in that is named, say by the path of a class: what it is set to is its own."""

    name: Required[str]
'''
TAIL = """    **settings: Unpack[Dotted],
) -> None: ...

def _like(typed: Callable[P, None]) -> Callable[[Callable[..., None]], Callable[P, None]]: ...

takes_settings = _like(_takes)

class _Function(Protocol[P]):
    def __call__(self, function: Callable[..., R], /) -> Callable[P, R]: ...

def _without_self(typed: Callable[Concatenate[object, P], None]) -> _Function[P]: ...

function_takes_settings = _without_self(_takes)
"""
OBJECTS = {
    "model": "Text | None",
    "reward": "Reward | Sequence[Reward] | None",
    "data": "object",
    "validation": "object",
    "environment": "Callable[..., object] | str | None",
    "algorithm": "type | str | None",
    "task": "type | Task | str | None",
}
"""What `Trainer` takes that is no setting."""


def stub() -> str:
    """Return the text of typed.pyi."""
    sections: dict[str, list[str]] = {}
    run, dotted = [], []
    for item in described():
        section, _, name = item.path.rpartition(".")
        if not section:
            run.append(f"    {name}: {_type(item)} = ...,")
            continue
        if section not in sections and (outer := section.rpartition(".")[0]):
            sections.setdefault(outer, []).append(f"    {section.rpartition('.')[2]}: {_class(section)}")
        told = f'"""{item.help.rstrip(".")}; by default {item.default}"""'
        sections.setdefault(section, []).extend([f"    {name}: {_type(item)}", f"    {told}"])
        own = " | str" if _is_name(item) else ""
        dotted.append(f'    "{item.path}": {_type(item)}{own},')
    lines = [HEAD]
    for section, fields in sections.items():
        lines += [f"class {_class(section)}(TypedDict, total=False):", *fields, ""]
    lines += ['Dotted = TypedDict("Dotted", {', *dotted, "}, total=False)", ""]
    lines += ["def _takes(", "    self: object,", "    *,", *_keywords(sections), *run]
    return "\n".join([*lines, TAIL])


def _keywords(sections: Iterable[str]) -> list[str]:
    """Return a parameter for each section, group and object."""
    taken = {name: [kind] for name, kind in OBJECTS.items()}
    for group, choices in {**groups(), "recipe": sorted(peer_recipes())}.items():
        if group not in OBJECTS:
            taken[group] = [f"Literal{choices}"]
    for section in (name for name in sections if "." not in name):
        own = ["OwnSettings"] if section in PLUG_INS else []
        taken[section] = [_class(section), *own, *taken.get(section, [])]
    return [f"    {name}: {' | '.join(kinds)} = ...," for name, kinds in taken.items()]


def _class(section: str) -> str:
    return "".join(part.capitalize() for part in section.split(".")) + "Settings"


def _is_name(item: Described) -> bool:
    return item.path in {f"{section}.name" for section in PLUG_INS}


def _type(item: Described) -> str:
    if _is_name(item):
        return f"Literal{sorted(PLUG_INS[item.path.partition('.')[0]].names())}"
    return " | ".join(dict.fromkeys(map(_named, item.annotations)))


def _named(annotation: Any) -> str:  # noqa: ANN401 any annotation
    """Return a type as it is written; the values of an enum are given by their texts."""
    words = {int: "int", float: "float", str: "Text", bool: "bool", NoneType: "None", Any: "object"}
    if annotation in words:
        return words[annotation]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return f"Literal{[one.value for one in annotation]}"
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return f"Literal{list(parts)}"
    if origin is dict:
        return f"Mapping[str, {_named(parts[1])}]"
    if origin is tuple:
        inner = _named(parts[0]).replace("Text", "str")
        return f"list[{inner}] | tuple[{inner}, ...]"
    return " | ".join(map(_named, parts))


def main() -> None:
    """Write the file, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the file is stale")
    parser.add_argument("--stub", type=Path, default=STUB, help="where the file is")
    options = parser.parse_args()
    if not options.check:
        options.stub.write_text(stub())
    elif not options.stub.exists() or options.stub.read_text() != stub():
        sys.exit(
            f"{options.stub} is not what the settings are; run tools/make_typed_settings.py and commit it"
        )


if __name__ == "__main__":
    main()
