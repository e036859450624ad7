"""`offbeat`: one program for all commands. What a command needs is loaded when it is called, so help answers at once."""

from __future__ import annotations

import difflib
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Command = Callable[[Sequence[str] | None], int]

USAGE = 2  # exit code of everything that is refused before it starts

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("train:main", "train a language model by reinforcement learning"),
    "plan": ("train:plan", "say what a run would do and need, and whether it can; starts nothing"),
    "eval": ("train:evaluate", "measure a model or a checkpoint of a run"),
    "sft": ("train:sft", "train on written examples"),
    "export": ("export:main", "write a checkpoint of a run as a Hugging Face folder"),
    "chat": ("chat:main", "talk to the model that a run trained"),
    "show": ("show:main", "print what completions of a run say"),
    "report": ("report:main", "write what runs did as one page to look at"),
    "settings": ("settings:main", "list, find and explain settings"),
    "completion": ("completion:main", "let a shell complete commands and settings"),
    "import": ("settings:import_verl", "say what the settings of a verl run are here"),
}
"""Subcommands: the module beside this one and its function that answers, and what it is for."""


def usage() -> str:
    """Return the help of the program."""
    lines = "\n".join(f"  {name:<12}{purpose}" for name, (_, purpose) in COMMANDS.items())
    return (
        "usage: offbeat COMMAND [options] [key=value ...]\n\n"
        f"RL post-training for language models.\n\ncommands:\n{lines}\n\n"
        "offbeat COMMAND --help says more of one; offbeat settings WORD finds a setting.\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Hand the rest of the command line to the command that it names first; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(usage())
        return 0
    name, *rest = words
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(COMMANDS)}"
        sys.stderr.write(f"offbeat: unknown command {name!r}; {hint}\n")
        return USAGE
    module, function = COMMANDS[name][0].split(":")
    command: Command = getattr(import_module(f"offbeat_recipes.cli.{module}"), function)
    if argv is not None:
        return command(rest)
    # A command knows by an `argv` of None that it is the whole process, and what is its own then.
    sys.argv = [f"offbeat {name}", *rest]
    return command(None)


if __name__ == "__main__":
    sys.exit(main())
