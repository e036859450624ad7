"""`offbeat report`: what runs did, as one HTML file, or served while they go on."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat_recipes.cli._environment import USAGE, command_parser, options_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

_EPILOG = """\
  offbeat report runs/demo             # writes runs/demo/report.html, to be opened by double click
  offbeat report runs/a runs/b         # compares them in ./report.html; seeds of the same run are one line
  offbeat report runs/demo --serve     # follows a run that goes on
  offbeat report runs/demo --inspect   # writes runs/demo/inspect/, for `inspect view --log-dir` of inspect-ai
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write or serve the report; return 0, or 2 where a folder is no run or the file cannot be written."""
    made = _parser()
    options = options_of(made, argv)
    from offbeat_recipes.errors import RunFolderError
    from offbeat_recipes.report.build import REPORT, write_report

    output = options.output if options.output or len(options.runs) == 1 else Path(REPORT)
    try:
        if options.inspect:
            from offbeat_recipes.report.inspect_log import write_inspect

            for run in options.runs:
                sys.stdout.writelines(f"{file}\n" for file in write_inspect(run))
        elif options.serve:
            _serve(options.runs, options.port, options.price)
        else:
            sys.stdout.write(f"{write_report(options.runs, output, price=options.price)}\n")
    except (RunFolderError, OSError) as error:
        sys.stderr.write(f"{made.prog}: {error}\n")
        return USAGE
    return 0


def _parser() -> argparse.ArgumentParser:
    made = command_parser(
        "offbeat report", "Write what runs did as one HTML file that needs no network.", _EPILOG
    )
    made.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run")
    made.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="by default report.html: of one run in its folder, of several here",
    )
    made.add_argument(
        "--serve", action="store_true", help="write nothing; show the report on this machine as it grows"
    )
    made.add_argument(
        "--inspect",
        action="store_true",
        help="write the completions as logs of inspect-ai instead, one a step",
    )
    made.add_argument(
        "--price",
        type=float,
        default=0.0,
        metavar="X",
        help="of an hour of one GPU, or of the machine of a run on CPU: shows what steps cost",
    )
    made.add_argument("--port", type=int, default=0, help="of --serve; by default a free one")
    return made


def _serve(runs: Sequence[Path], port: int, price: float) -> None:
    from offbeat_recipes.report.build import server

    with server(runs, port, price=price) as serving:
        sys.stdout.write(f"http://127.0.0.1:{serving.server_port}/ shows the report; Ctrl-C ends it\n")
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            serving.serve_forever()


if __name__ == "__main__":
    sys.exit(main())
