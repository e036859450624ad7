"""Every setting with what is known of it: what `offbeat settings` prints and docs/settings.md holds.

Nothing is written twice: type, default and limits come from the field; its line of help from the source beside it, which is the
string below the field, the comment behind it, or the sentence of its class's docstring that names it, in this order.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, cast, get_args, get_origin

from offbeat_recipes.settings.reading import (
    Setting,
    all_settings,
    default_choices,
    describe_limit,
    limits_of,
    suggestion,
)
from offbeat_recipes.settings.sections import PLUG_INS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_NO_HELP = re.compile(r"noqa|pyright:|fmt:|type:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """One setting for people. `groups` are those choices that have it, such as "engine=fsdp2"; none: every run has it.

    `choices` are all that it may be, where they can be listed.

    `default` is as it is written on a command line; `limits` are in words, and choices count as such. `annotations` are those of
    its fields, where several choices have it.
    """

    path: str
    kind: str
    default: str
    limits: str
    help: str
    groups: tuple[str, ...]
    choices: tuple[str, ...]
    is_speed: bool
    annotations: tuple[object, ...]

    @property
    def values(self) -> str:
        """What it may be: its type, and its choices or limits."""
        return f"{self.kind}: {self.limits}" if self.limits else self.kind

    @property
    def runs(self) -> str:
        """The runs that have it: `groups`, or those of the section that have not, where they are fewer; "" for all."""
        section = self.path.partition(".")[0]
        others = [f"{section}={name}" for name in _names(section)] if section in PLUG_INS else []
        lacking = [name for name in others if name not in self.groups]
        if not self.groups or not set(self.groups) <= set(others) or len(self.groups) <= len(lacking):
            return ", ".join(self.groups)
        return f"not {', '.join(lacking)}"


@cache
def described() -> tuple[Described, ...]:
    """Return every setting that can be set, of all installed plug-ins, tasks and modes, once each, in the order of the tree."""
    found: dict[str, list[tuple[Setting, str]]] = {}
    for section, plug_in in PLUG_INS.items():
        for name in sorted(_names(section), key=lambda one: (one != plug_in.default, one)):
            for item in all_settings({**default_choices(), section: name}):
                if item.derived:
                    continue
                own = item.path.partition(".")[0]
                if own in PLUG_INS and own != section:
                    continue  # described under its own section's names
                choice = f"{own}={item.variant or name}" if item.variant or own == section else ""
                found.setdefault(item.path, []).append((item, choice))
    return tuple(_described(path, items) for path, items in found.items())


def matching(words: Sequence[str]) -> list[Described]:
    """Return the settings with every one of `words` in their name or help, in any case."""
    wanted = [word.lower() for word in words]
    return [
        item for item in described() if all(word in f"{item.path} {item.help}".lower() for word in wanted)
    ]


def nearest(path: str) -> str:
    """Return the setting that a wrong `path` may have meant, or ""."""
    return suggestion(path, [item.path for item in described()])


@cache
def _names(section: str) -> list[str]:
    """Return the plug-ins of a section, once: what is installed is looked for in every package of the environment."""
    return PLUG_INS[section].names()


def _described(path: str, items: list[tuple[Setting, str]]) -> Described:
    first, section = items[0][0], path.partition(".")[0]
    choices = tuple(dict.fromkeys(choice for _, choice in items if choice))
    if section in PLUG_INS and len(choices) == len(_names(section)):
        choices = ()
    field = next(one for one in fields(first.home) if one.name == path.rpartition(".")[2])
    limits = [describe_limit(name, limit) for name, limit in limits_of(path, first).items()]
    kind, options = _kind(first.annotation)
    return Described(
        path=path,
        kind=kind,
        default=_default(field),
        limits=" | ".join(options) or ", ".join(limits),
        help=_help(first.home, field.name, section) or _first_line_of(first.annotation),
        groups=choices,
        choices=("true", "false") if kind == "bool" else tuple(options),
        is_speed=bool(field.metadata.get("speed")),
        annotations=tuple(dict.fromkeys(item.annotation for item, _ in items)),
    )


def _default(field: Any) -> str:  # noqa: ANN401 a field of any type
    value: Any = field.default if field.default_factory is MISSING else field.default_factory()
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, tuple | list):
        return f"[{','.join(map(str, cast('list[object]', value)))}]"
    return "''" if value == "" else str(value)


def _kind(annotation: Any) -> tuple[str, list[str]]:  # noqa: ANN401 any annotation
    """Return the type of a setting in a word, and its choices if it has such."""
    if get_origin(annotation) is Literal:
        return "choice", [str(part) for part in get_args(annotation)]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "choice", [str(part.value) for part in annotation]
    words = {int: "int", float: "float", str: "text", bool: "bool", NoneType: "null"}
    if annotation in words:
        return words[annotation], []
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (tuple, list):
        return f"list of {_kind(parts[0])[0]}", _kind(parts[0])[1]
    if origin is dict or annotation is dict:
        return "mapping", []
    kinds = [_kind(part) for part in parts]
    return " or ".join(kind for kind, _ in kinds), [option for _, options in kinds for option in options]


def _help(cls: type, name: str, section: str) -> str:
    homes = [*cls.__mro__[:-1], *([PLUG_INS[section].section] if section in PLUG_INS else [])]
    beside = [_beside(home.__module__).get((home.__name__, name), "") for home in homes]
    return next(filter(None, [*beside, *(_sentence(home, name) for home in homes)]), "")


def _first_line_of(annotation: Any) -> str:  # noqa: ANN401 any annotation
    """Return what an enum says of its choices as a whole."""
    is_enum = isinstance(annotation, type) and issubclass(annotation, Enum)
    return (annotation.__doc__ or "").strip().partition("\n")[0] if is_enum else ""


def _sentence(cls: type, name: str) -> str:
    """Return the sentences of a class's docstring that name the field, as one line."""
    text = " ".join((vars(cls).get("__doc__") or "").split())
    return " ".join(part for part in re.split(r"(?<=[.])\s+(?=[A-Z`])", text) if f"`{name}`" in part)


@cache
def _beside(module: str) -> dict[tuple[str, str], str]:
    """Return what stands below or behind each field of the classes of a module, by class and field."""
    path = Path(str(sys.modules[module].__file__))
    with tokenize.open(path) as file:
        tokens = [one for one in tokenize.generate_tokens(file.readline) if one.type == tokenize.COMMENT]
    comments = {one.start[0]: one.string.lstrip("# ") for one in tokens}
    return dict(_fields_of(ast.parse(path.read_text(encoding="utf-8")), comments))


def _fields_of(tree: ast.Module, comments: dict[int, str]) -> Iterator[tuple[tuple[str, str], str]]:
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for node, after in zip(cls.body, [*cls.body[1:], None], strict=True):
            if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
                continue
            text = comments.get(node.end_lineno or 0, "")
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = " ".join(str(after.value.value).split())
            if text and not _NO_HELP.match(text):
                yield (cls.name, node.target.id), text
