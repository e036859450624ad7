"""Write docs/metrics.md: every metric of a run, its unit and meaning, what is usual, what to do where it is not.

Run without arguments to write the page; with --check to fail where the committed one is not what would be
written.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat_recipes.report.metrics import CHARTS, Known, Section

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "metrics.md"
SOURCES = ROOT / "packages" / "trainer" / "src"
QUESTIONS = {
    Section.LEARN: "Did it learn?",
    Section.HEALTH: "Is it healthy?",
    Section.TIME: "Where did the time go?",
}
HEAD = """\
# Metrics of a run

Written by `tools/make_metrics_page.py` from `offbeat_trainer/watch/metrics.toml`, and from what the code that measures a metric says of it with
`described`; change those, not this page. A line of `metrics.jsonl` is one step, with these keys. The [report](report.md) draws them under the titles that they have here. `*` stands for
a name: of a reward, a phase, an age, a reason. *Usual* bounds what the last quarter of most runs stays within; the report names
what does not.
"""


def described_in(source: str) -> list[Known]:
    """Return the metrics that a module of this Python `source` describes by the literals in its calls of `described`."""
    said: list[dict[str, Any]] = [
        {
            "key": ast.literal_eval(call.args[0]),
            "unit": "",
            **{word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg},
        }
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "described"
    ]
    return [Known(**one) for one in said]


def page() -> str:
    """Return the text of docs/metrics.md."""
    lines = [HEAD]
    for section, question in QUESTIONS.items():
        lines += [f"## {question}", ""]
        for chart in (chart for chart in CHARTS if chart.section is section):
            lines += [f"### {chart.title}", "", f"Usual: {chart.usual} {chart.advice}".rstrip(), ""]
            lines += _table(chart.metrics)
    alone = [one for path in sorted(SOURCES.rglob("*.py")) for one in described_in(path.read_text())]
    lines += ["## Drawn alone", "", *_table(sorted(alone, key=lambda one: one.key))]
    return "\n".join(lines).rstrip() + "\n"


def _table(metrics: Iterable[Known]) -> list[str]:
    rows = [f"| `{one.key}` | {one.unit} | {one.meaning} | {_usual(one)} |" for one in metrics]
    return ["| metric | unit | meaning | usual |", "|---|---|---|---|", *rows, ""]


def _usual(known: Known) -> str:
    bounds = [("at least", known.low), ("at most", known.high)]
    return ", ".join(f"{word} {value:g}" for word, value in bounds if value is not None)


def main() -> None:
    """Write the page, or with --check exit 1 where it is not current."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where the page is not current"
    )
    parser.add_argument("--page", type=Path, default=PAGE, help="the file to write or to check")
    options = parser.parse_args()
    if not options.check:
        options.page.write_text(page())
        print(f"wrote {options.page}")
    elif not options.page.is_file() or options.page.read_text() != page():
        sys.exit(
            f"{options.page} is not what the table of metrics holds; run tools/make_metrics_page.py and commit it"
        )


if __name__ == "__main__":
    main()
