"""From a command line to a `RunConfig`: Hydra composes, pydantic validates, people get sentences.

Hydra's compose API is used, not its application decorator: it must not change the working directory, make
folders, or set up logging. Nothing heavier than Hydra and pydantic may be imported here.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from offbeat_recipes.cli._environment import USAGE, command_parser, speak_utf8
from offbeat_recipes.errors import RecipeError, SettingError
from offbeat_recipes.settings.hub import localized
from offbeat_recipes.settings.reading import check_path, parse, suggestion, text_settings, to_dict
from offbeat_recipes.settings.sections import PLUG_INS, replaced_fields
from offbeat_trainer.algorithms.registry import peer_entry, peer_recipes
from offbeat_trainer.errors import LoadError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Collection, Sequence

    from offbeat_recipes.settings.tree import RunConfig


CONF = Path(str(files("offbeat_recipes"))) / "settings" / "conf"
RECIPE = "recipe="

_EPILOG = """\
settings are given as key=value, groups as group=choice:
  trainer.steps=200 engine.optimizer.lr=1e-5 device=cuda
groups:
{groups}
--cfg job prints every setting with its value. offbeat plan takes the same settings and starts nothing.
"""


def groups() -> dict[str, list[str]]:
    """Return the config groups and their choices."""
    return {
        folder.name: sorted(path.stem for path in folder.glob("[!_]*.yaml"))
        for folder in sorted(CONF.iterdir())
        if folder.is_dir() and any(folder.glob("*.yaml"))
    }


def parser(prog: str, description: str) -> argparse.ArgumentParser:
    """Return the options that all command lines share."""
    chosen = {**groups(), "recipe": sorted(peer_recipes())}
    lines = "\n".join(f"  {name}={'|'.join(choices)}" for name, choices in chosen.items())
    made = command_parser(prog, description, _EPILOG.format(groups=lines))
    made.add_argument("settings", nargs="*", metavar="key=value", help="what differs from the defaults")
    made.add_argument(
        "--config", metavar="FILE", help="a YAML file to start from, say runs/<name>/config.yaml"
    )
    made.add_argument("--cfg", choices=["job"], help="print the settings as they would be used, and end")
    return made


def compose_run(settings: Sequence[str], config_file: str | None = None) -> RunConfig:
    """Return the settings of a run from overrides as on a command line.

    Args:
        settings: `group=choice` and `dotted.key=value`. Over a `config_file` without `defaults`, a choice changes what
            its own YAML names and leaves the rest of the file as it is. `recipe=trl-1.16` stands for the settings of the algorithm
            under which it gives that library's number; those given beside it win.
        config_file: YAML to start from instead of the packaged `train.yaml`; its `defaults` may name that one.

    Raises:
        SettingError: something is unknown or wrong; the message is for people.
    """
    others = [item for item in settings if not item.startswith(RECIPE)]
    config = _composed(others, config_file)
    recipe = of_recipe(settings, config)
    return _composed([*recipe.settings, *others], config_file) if recipe else config


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a recipe says of a run's algorithm: its settings but those that were given beside it, and what it is good for."""

    settings: list[str]
    note: str


def of_recipe(settings: Sequence[str], config: RunConfig) -> Recipe | None:
    """Return the recipe that `settings` name, for the algorithm of `config`; None where they name none.

    Raises:
        SettingError: there is no such recipe, or it has nothing for the algorithm.
    """
    named = [item.removeprefix(RECIPE).strip("'") for item in settings if item.startswith(RECIPE)]
    if not named:
        return None
    try:
        entry = peer_entry(named[-1], config.algorithm.name)
    except LoadError as error:
        raise SettingError([f"`recipe`: {error}"]) from None
    given = {item.lstrip("+").partition("=")[0] for item in settings}
    made = [
        f"{key}={value}"
        for name, value in entry["settings"].items()
        if (key := f"algorithm.{name}") not in given
    ]
    differs = f"; {entry['differs']}" if entry["differs"] else ""
    return Recipe(settings=made, note=f"recipe={named[-1]} sets {' '.join(made) or 'nothing'}{differs}")


def _composed(settings: Sequence[str], config_file: str | None) -> RunConfig:
    overrides = _checked_all(settings)
    folder, name, search = CONF, "train", []
    held: dict[str, Any] = {}
    if config_file is not None:
        path = Path(config_file).absolute()
        if not path.is_file():
            raise SettingError([f"--config: no file {config_file}"])
        if path.suffix != ".yaml":  # Hydra finds no other
            raise SettingError(
                [f"--config: expected a name that ends in .yaml, got {config_file}; rename it"]
            )
        held = _read(path)
        overrides = _over_file(path, held, overrides)
        folder, name, search = path.parent, path.name, [f"hydra.searchpath=[{in_quotes(f'file://{CONF}')}]"]
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            composed = compose(
                name, overrides=[*search, *(one for item in overrides for one in _by_name(item))]
            )
        raw = OmegaConf.to_container(composed, resolve=True)
        cast("dict[str, Any]", raw).pop(
            "evaluation", None
        )  # in files of earlier versions: options of `offbeat eval` by now
    except (HydraException, OmegaConfBaseException) as error:
        raise SettingError([_first_line(error)]) from None
    return localized(parse(_without_replaced(cast("dict[str, Any]", raw), held, overrides)))


def to_yaml(config: RunConfig) -> str:
    """Return every setting of `config` as YAML; `--config` reads it back."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def read_command_line(
    made: argparse.ArgumentParser, argv: Sequence[str] | None, *, takes_run: bool = False
) -> tuple[RunConfig, argparse.Namespace] | int:
    """Return settings and options, or the exit code when there is nothing left to do.

    With `takes_run` one word without `=` is the folder of a run, whose settings are meant.
    """
    if argv is None:  # as a command
        speak_utf8()
    options = made.parse_intermixed_args(argv)
    runs = [word for word in options.settings if "=" not in word]
    if takes_run and len(runs) == 1 and options.config is None:
        options.settings = [f"run_dir={runs[0]}", *(word for word in options.settings if word != runs[0])]
        options.config = str(Path(runs[0]) / "config.yaml")
    try:
        config = compose_run(options.settings, options.config)
    except RecipeError as error:
        complain(made.prog, error)
        return USAGE
    if options.cfg is not None:
        sys.stdout.write(to_yaml(config))
        return 0
    return config, options


def complain(prog: str, error: Exception) -> None:
    """Print what is wrong, one line a problem, and nothing else."""
    for line in str(error).splitlines():
        sys.stderr.write(f"{prog}: {line}\n")


def _read(path: Path) -> dict[str, Any]:
    """Return what a file of settings holds.

    Raises:
        SettingError: the file cannot be used.
    """
    try:
        raw = OmegaConf.to_container(OmegaConf.load(path))
    except (OmegaConfBaseException, YAMLError, OSError, UnicodeDecodeError) as error:
        raise SettingError([f"--config: {path} is no YAML: {_first_line(error)}"]) from None
    if not isinstance(raw, dict):
        raise SettingError([f"--config: {path} should hold sections of settings, got {raw!r:.60}"])
    return cast("dict[str, Any]", raw)


def _over_file(path: Path, held: dict[str, Any], overrides: list[str]) -> list[str]:
    """Return `overrides` as Hydra takes them over the settings `held` in `path`.

    In a file with all its settings written out, say that of a run, no group is chosen that another choice could
    replace. There a choice is added; Hydra puts what is added behind the file's own settings.

    Raises:
        SettingError: a choice cannot be laid over it.
    """
    named = cast("list[object]", held.get("defaults") or [])
    if any(entry != "_self_" for entry in named):
        return overrides
    # A task brings settings for other sections along; naming the file's own task must not undo the file's.
    same = f"task={_task_of(held)}"
    return [_added(item, held, path) for item in overrides if item != same]


def _without_replaced(raw: dict[str, Any], held: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return `raw` without what the file said to a plug-in that another now takes the place of, and does not know."""
    given = [item.lstrip("+").partition("=")[0] for item in overrides]
    kept = dict(raw)
    for section in PLUG_INS:
        before, now = held.get(section), raw.get(section)
        if isinstance(before, dict) and isinstance(now, dict):
            ours = cast("dict[str, Any]", now)
            gone = replaced_fields(section, _name_in(held, section), ours.get("name")) - {"name"}
            asked = {key.split(".")[1] for key in given if key.startswith(f"{section}.")}
            kept[section] = {key: value for key, value in ours.items() if key not in gone - asked}
    return kept


def _name_in(held: dict[str, Any], section: str) -> str | None:
    """Return the plug-in that a file's settings in `section` are for: it is named there, or chosen in its `defaults`; None: the default."""
    for entry in cast("list[object]", held.get("defaults") or []):
        chosen = cast("dict[str, str]", entry) if isinstance(entry, dict) else {}
        for key, choice in chosen.items():
            if key.removeprefix("override ").strip("/ ") == section:
                return choice
    return cast("str | None", held[section].get("name"))


def _by_name(item: str) -> list[str]:
    """Return `item` as Hydra takes it: a task that has no YAML of its own has a bare one, and is named beside it."""
    group, _, choice = item.partition("=")
    if group.lstrip("+") != "task" or choice in groups()["task"]:
        return [item]
    return [f"{group}=_own", f"++task.name={in_quotes(choice)}"]


def _added(item: str, raw: dict[str, Any], path: Path) -> str:
    """Return `item` as an addition if it chooses a group; refuse a task over the settings of another task."""
    group, _, choice = item.partition("=")
    if group == "task" and _task_of(raw):
        raise SettingError(
            [
                f"`{item}`: {path} holds the settings of a run with task={_task_of(raw)}, and another task needs "
                "others; leave --config out, or give a file of your own with "
                f"`defaults: [train, override task: {choice}, _self_]`"
            ]
        )
    return f"+{item}" if group in groups() else item


def _task_of(raw: dict[str, Any]) -> str:
    section = raw.get("task")
    return str(section.get("name", "")) if isinstance(section, dict) else ""  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def _checked_all(settings: Sequence[str]) -> list[str]:
    checked: list[str] = []
    problems: list[str] = []
    pairs = (item.partition("=") for item in settings)
    texts = text_settings((key, value) for key, _, value in pairs if key in PLUG_INS and ":" in value)
    for item in settings:
        try:
            checked.append(_checked(item, groups(), texts))
        except SettingError as error:
            problems.extend(error.problems)
    if problems:
        raise SettingError(problems)
    return checked


def _checked(text: str, known_groups: dict[str, list[str]], texts: Collection[str]) -> str:
    """Check one override against the tree of settings and return it in the form that Hydra always accepts."""
    text = _quoted(text, texts)
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise SettingError([f"cannot read {text!r} (expected key=value): {_first_line(error)}"]) from None
    key = override.key_or_group
    if override.type is OverrideType.DEL:
        raise SettingError([f"`{text}`: settings cannot be removed; give the value you want instead"])
    if override.is_sweep_override():
        raise SettingError(
            [
                f"`{text}`: one run takes one value; for a list write {key}=[a,b], for a run each add --multirun"
            ]
        )
    value = override.value()
    if key in PLUG_INS and value not in known_groups[key] and _is_plug_in(key, value):
        return f"{key}={value}" if key == "task" else f"++{key}.name={in_quotes(str(value))}"
    if key in known_groups:
        return f"{key}={_choice(key, str(value), known_groups[key])}"
    wrong = check_path(key)
    if wrong:
        raise SettingError(wrong)
    # `++` sets a key whether or not the YAML names it: the dataclasses are the list of settings, not the YAML.
    return f"++{text.lstrip('+')}"


def _quoted(text: str, texts: Collection[str]) -> str:
    """Return `text` with the value of a setting of `texts` in quotes: as it came from the shell it is meant.

    Hydra's grammar would take spaces, brackets and letters of other alphabets in a path for something else. What somebody has
    put into quotes for Hydra already stays, and so do null, the default, and a list.
    """
    key, mark, value = text.partition("=")
    written = value[:1] + value[-1:] in ("''", '""', "[]")
    if (
        not mark
        or key.lstrip("+") not in {*texts, *PLUG_INS}
        or value in ("", "null")
        or (written and len(value) > 1)
    ):
        return text
    return f"{key}={in_quotes(value)}"


def in_quotes(value: str) -> str:
    """Return `value` as Hydra's grammar takes a text, whatever is in it."""
    # In Hydra's quotes a backslash stands for itself, but before a quote and at the end.
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value)
    return f"'{escaped}'"


def _is_plug_in(section: str, value: object) -> bool:
    """Whether `value` names an installed plug-in, or a class by its path."""
    return isinstance(value, str) and (bool(re.search(r":\w+$", value)) or value in PLUG_INS[section].names())


def _choice(group: str, value: str, choices: list[str]) -> str:
    if value in choices:
        return value
    if group in PLUG_INS:
        choices = sorted({*choices, *PLUG_INS[group].names()})
    near = suggestion(value, choices)
    hint = f"; did you mean {near!r}?" if near else ""
    raise SettingError([f"`{group}`: expected one of {', '.join(choices)}, got {value!r}{hint}"])


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
