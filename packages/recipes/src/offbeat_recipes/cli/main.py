"""`offbeat`: one program for all commands. What a command needs is loaded when it is called, so help answers at once.

`offbeat completion`: commands, settings and their choices for a shell's Tab. A shell's script hands over the line up to the cursor
and takes what its last word may become. Where that is nothing, the shell completes the names of files.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from offbeat_recipes.cli._environment import USAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Command = Callable[[Sequence[str] | None], int]

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
    "completion": ("main:completion", "let a shell complete commands and settings"),
    "import": ("settings:import_verl", "say what the settings of a verl run are here"),
}
"""Subcommands: the module beside this one and its function that answers, and what it is for."""
SCRIPTS = {
    # readline takes what stands behind the last = or : for the word; the line is handed over whole.
    "bash": """\
_offbeat() {
  local line=${COMP_LINE:0:COMP_POINT} one
  local word=${line##* }
  local kept=${word%"${word##*[=:]}"}
  COMPREPLY=()
  while IFS= read -r one; do COMPREPLY+=("${one#"$kept"}"); done < <(offbeat completion --of "$line" 2>/dev/null)
  [[ ${COMPREPLY[0]-} == *= ]] && compopt -o nospace
}
complete -o default -F _offbeat offbeat
""",
    "zsh": """\
_offbeat() {
  local -a found=("${(@f)$(offbeat completion --of "${BUFFER[1,CURSOR]}" 2>/dev/null)}")
  found=("${(@)found:#}")
  if (( $#found )); then compadd -S '' -- $found; else _files; fi
}
compdef _offbeat offbeat
""",
    "fish": """\
complete -c offbeat -a '(offbeat completion --of (commandline -cp) 2>/dev/null)'
""",
}
_TAKES_SETTINGS = ("train", "plan", "eval", "sft")


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


def completion(argv: Sequence[str] | None = None) -> int:
    """Print a shell's script, or what the last word of a line may become; return the exit code."""
    made = argparse.ArgumentParser(
        prog="offbeat completion",
        description="Print what lets a shell complete commands, settings and their choices.",
        epilog="For bash: echo 'source <(offbeat completion bash)' >> ~/.bashrc; for zsh and fish likewise.",
    )
    asked = made.add_mutually_exclusive_group(required=True)
    asked.add_argument("shell", nargs="?", choices=SCRIPTS, help="whose script is printed")
    asked.add_argument(
        "--of", metavar="LINE", help="print what the last word of LINE may become, as the scripts ask"
    )
    options = made.parse_args(argv)
    if options.of is None:
        sys.stdout.write(SCRIPTS[options.shell])
    else:
        sys.stdout.writelines(f"{one}\n" for one in candidates(options.of))
    return 0


def candidates(line: str) -> list[str]:
    """Return what the last word of `line`, which begins with the program, may become; empty where that is for files."""
    *before, word = line.split(" ")
    _, *words = filter(None, before)
    if not words:
        return [name for name in COMMANDS if name.startswith(word)]
    explains = words[0] == "settings" and words[-1] == "--explain"
    if not explains and words[0] not in _TAKES_SETTINGS:
        return []
    from offbeat_recipes.cli._hydra import groups
    from offbeat_recipes.settings.described import described  # not needed for commands, and takes a while

    choices = {item.path: item.choices for item in described()} | ({} if explains else groups())
    key, has_value, _ = word.partition("=")
    if has_value:
        found = [f"{key}={choice}" for choice in choices.get(key, ())]
    else:
        found = [*choices] if explains else [f"{name}=" for name in choices]
    return [one for one in found if one.startswith(word)]


if __name__ == "__main__":
    sys.exit(main())
