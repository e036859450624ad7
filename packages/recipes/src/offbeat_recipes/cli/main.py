"""`offbeat`: one program for all commands. What a command needs is loaded when it is called, so help answers at once."""

from __future__ import annotations

import difflib
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

USAGE = 2  # exit code of everything that is refused before it starts

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("offbeat_recipes.cli.train", "train a language model by reinforcement learning"),
    "plan": (
        "offbeat_recipes.cli.plan",
        "say what a run would do and need, and whether it can; starts nothing",
    ),
    "eval": ("offbeat_recipes.cli.evaluate", "measure a model or a checkpoint of a run"),
    "sft": ("offbeat_recipes.cli.sft", "train on written examples"),
    "export": ("offbeat_recipes.cli.export", "write a checkpoint of a run as a Hugging Face folder"),
    "chat": ("offbeat_recipes.cli.chat", "talk to the model that a run trained"),
    "show": ("offbeat_recipes.cli.show", "print what completions of a run say"),
    "report": ("offbeat_recipes.cli.report", "write what runs did as one page to look at"),
    "settings": ("offbeat_recipes.cli.settings", "list, find and explain settings"),
}
"""Subcommands: the module whose `main` answers, and what it is for."""


def usage() -> str:
    """Return the help of the program."""
    lines = "\n".join(f"  {name:<10}{purpose}" for name, (_, purpose) in COMMANDS.items())
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
    command = import_module(COMMANDS[name][0])
    if argv is not None:
        return command.main(rest)
    # A command knows by an `argv` of None that it is the whole process, and what is its own then.
    sys.argv = [f"offbeat {name}", *rest]
    return command.main()


if __name__ == "__main__":
    sys.exit(main())
