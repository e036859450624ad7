"""`offbeat show`: what a run's completions say, in a terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat_recipes.cli._environment import USAGE, command_parser, options_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from rich.text import Text

_COUNT = 4
_EPILOG = """\
  offbeat show runs/demo                 # some completions of the newest step that has any
  offbeat show runs/demo --worst 5       # of the lowest reward, of all steps
  offbeat show runs/demo --prompt 12+34  # of prompts that hold this text, over the steps
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print completions; return 0, or 2 where there are none to print."""
    made = command_parser(
        "offbeat show",
        "Print completions of a run: those of samples.jsonl, and all that report.trackers kept.",
        _EPILOG,
    )
    made.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    made.add_argument("--step", type=int, metavar="N", help="of one step alone")
    made.add_argument("--prompt", metavar="TEXT", help="of prompts that hold this text, or whose uid it is")
    chosen = made.add_mutually_exclusive_group()
    chosen.add_argument("--worst", type=int, metavar="K", help="the K of the lowest reward")
    chosen.add_argument("--best", type=int, metavar="K", help="the K of the highest reward")
    chosen.add_argument(
        "--count", type=int, metavar="K", help=f"how many, the newest first; by default {_COUNT}"
    )
    options = options_of(made, argv)
    from rich.console import Console

    from offbeat_recipes.errors import RunFolderError
    from offbeat_recipes.report.collect import collect
    from offbeat_trainer.watch.fanout import Screen

    try:
        rows = list(_chosen(collect(options.run).rows, options))
    except RunFolderError as error:
        sys.stderr.write(f"{made.prog}: {error}\n")
        return USAGE
    if not rows:
        sys.stderr.write(
            f"{made.prog}: {options.run} has no such completions; trainer.sample_every and report.trackers=[trajectories] say "
            "what a run keeps\n"
        )
        return USAGE
    console = Console(file=Screen(sys.stdout) if argv is None else sys.stdout, highlight=False)  # pyright: ignore[reportArgumentType]
    for row in rows:
        console.print(*_lines(row), sep="\n", end="\n\n", soft_wrap=True)
    return 0


def _chosen(rows: list[dict[str, Any]], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows that were asked for."""
    if options.step is not None:
        rows = [row for row in rows if row["step"] == options.step]
    if options.prompt is not None:
        rows = [row for row in rows if options.prompt in row["prompt"] or options.prompt == row["uid"]]
    if options.worst is not None or options.best is not None:
        scored = [row for row in rows if row["reward"] is not None]
        scored.sort(key=lambda row: row["reward"], reverse=options.best is not None)
        yield from scored[: options.worst if options.best is None else options.best]
    elif options.count is not None:
        yield from reversed(rows[-options.count :] if options.count else [])
    elif options.prompt is not None:
        yield from rows
    else:
        newest = [row for row in rows if row["step"] == rows[-1]["step"]]
        yield from newest[:_COUNT]


def _lines(row: dict[str, Any]) -> Iterator[Text]:
    """Yield the lines of a completion. Its text is never markup, and what cannot be printed is shown as its escape."""
    from rich.text import Text

    from offbeat_trainer.watch.figures import visible

    def printable(text: str) -> str:
        return "\n".join(map(visible, text.split("\n")))

    reward = "no reward" if row["reward"] is None else f"reward {row['reward']:g}"
    verdict = {True: ", right", False: ", wrong", None: ""}[row["correct"]]
    components: dict[str, float] = row["parts"] or {}
    parts = "".join(f", {name} {value:g}" for name, value in components.items())
    head = f"step {row['step']} ({row['title']}), {row['uid']}: {reward}{verdict}{parts}, {row['num_tokens']} tokens, {row['finish']}"
    yield Text(head, style="bold green" if row["correct"] else "bold")
    yield Text(printable(row["prompt"]), style="dim")
    every: list[dict[str, str]] = row["turns"] or []
    turns = [turn for turn in every if "text" in turn]
    for turn in turns:
        yield Text(f"[{turn['role']}] ", style="cyan").append(printable(turn["text"]), style="default")
    if not turns:
        yield Text(printable(row["completion"]))


if __name__ == "__main__":
    sys.exit(main())
