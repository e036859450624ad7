"""The table of metrics knows every one that the packages can write; docs/metrics.md is made from it."""

import ast
import re
import runpy
import sys
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from offbeat_recipes.report.metrics import CHARTS, Kind, label_of, lookup, out_of_range
from offbeat_recipes.settings.reading import all_settings

ROOT = Path(__file__).parents[4]
SOURCES = [path.read_text() for path in sorted((ROOT / "packages" / "trainer" / "src").rglob("*.py"))]
described_in = runpy.run_path(str(ROOT / "tools" / "make_metrics_page.py"))["described_in"]
TABLE = [known.key for chart in CHARTS for known in chart.metrics]
DESCRIBED = [known.key for source in SOURCES for known in described_in(source)]
AREAS = {key.partition("/")[0] for key in TABLE + DESCRIBED}
# Keys of a batch, of a run's prompts and of the screen: they look like metrics and are none.
NO_METRICS = {
    "dpo/chosen",
    "kto/desirable",
    "distill/teacher",
    "distill/teacher_logprobs",
    "distill/teacher_top",
    "value/error_square",
    "policy/chosen",
    "reference/top",
}


def keys_in(source: str) -> set[str]:
    """Return the texts of Python `source` that read as metrics; what a text fills in is `*`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        text = ""
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(one.value) if isinstance(one, ast.Constant) else "*" for one in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        if re.fullmatch(r"[a-z]+/[a-z0-9_*]+[a-z0-9*]", text) and text.partition("/")[0] in AREAS:
            found.add(text)
    return found


def is_known(key: str) -> bool:
    """Whether the table has `key`, or, of a key with names filled in, one that it may become; or the code describes it."""
    in_table = lookup(key) is not None or ("*" in key and any(fnmatchcase(one, key) for one in TABLE))
    return in_table or key in DESCRIBED


def test_the_table_knows_every_metric_in_the_sources():
    keys = {key for source in SOURCES for key in keys_in(source)} - NO_METRICS
    assert len(keys) > 60
    assert sorted(key for key in keys if not is_known(key)) == []


def test_a_metric_that_is_not_in_the_table_is_found_by_this():
    assert keys_in('Metric(f"sync/{name}_new", Sum(1)); Metric("policy/other", Mean(1)); "no/path.py"') == {
        "sync/*_new",
        "policy/other",
    }
    assert not is_known("sync/*_new")
    assert not is_known("policy/other")
    assert is_known("idle/*_fraction")


def test_what_a_module_says_of_its_metric_is_read_from_it():
    [known] = described_in('LOST = described("dapo/lost", meaning="what is lost", unit="nats", high=1)\n')
    assert (known.key, known.meaning, known.unit, known.low, known.high) == (
        "dapo/lost",
        "what is lost",
        "nats",
        None,
        1,
    )
    assert "dapo/overlong_penalty" in DESCRIBED


def test_no_metric_is_in_two_charts_and_each_chart_says_what_is_usual():
    counts = Counter(TABLE + DESCRIBED)
    assert [key for key, count in counts.items() if count > 1] == []
    for chart in CHARTS:
        assert re.fullmatch(r"[A-Z0-9].*\.", chart.usual), chart.title
        drawn = {known.unit for known in chart.metrics if known.drawn}
        assert len(drawn) == 1 or chart.title == "Mishaps", f"{chart.title}: one axis has one unit"
        if chart.kind is Kind.STACK:
            assert sum(known.drawn for known in chart.metrics) == 1, "what adds up is of one pattern"


def test_settings_that_are_advised_exist():
    known = {setting.path for setting in all_settings()}
    words = " ".join(f"{chart.usual} {chart.advice}" for chart in CHARTS)
    advised = set(re.findall(r"\b(?:[a-z]+\.)+[a-z_]+\b", words)) - {"families.md", "driver.log"}
    assert len(advised) > 12
    assert sorted(advised - known) == []


@pytest.mark.parametrize(
    ("key", "title", "label"),
    [
        ("reward/mean", "Reward", "mean"),
        ("reward/format_mean", "Reward components", "format"),
        ("time/engine_s", "Time of a step, by phase", "engine s"),
        ("time/validate_s", "Time of a step, by phase", "validate"),
        ("staleness/3_fraction", "Staleness of tokens", "3"),
        ("buffer/dropped_too_old_groups", "Dropped groups", "too old"),
        ("critic/grad_norm", "Gradient norm", "grad norm"),
        ("critic/lr", "Critic", "lr"),
    ],
)
def test_a_key_is_looked_up_exactly_before_by_pattern(key, title, label):
    chart, known = lookup(key)
    assert (chart.title, label_of(key, known)) == (title, label)


def test_out_of_range_looks_at_the_last_quarter():
    _, ess = lookup("offpolicy/ess_fraction")
    assert out_of_range(ess, [0.1] * 6 + [0.9, 0.8]) is None
    assert out_of_range(ess, [0.9] * 6 + [0.1, None, 0.3]) == pytest.approx(0.2)
    assert out_of_range(ess, [None]) is None
    assert out_of_range(lookup("reward/mean")[1], [-5.0]) is None


@pytest.fixture
def check(monkeypatch):
    def check(page):
        tool = str(ROOT / "tools" / "make_metrics_page.py")
        monkeypatch.setattr(sys, "argv", [tool, "--check", "--page", str(page)])
        runpy.run_path(tool, run_name="__main__")

    return check


def test_the_committed_page_is_current(check):
    check(ROOT / "docs" / "metrics.md")


def test_a_page_that_says_something_else_is_red(check, tmp_path):
    page = tmp_path / "metrics.md"
    page.write_text((ROOT / "docs" / "metrics.md").read_text().replace("nats", "bits", 1))
    with pytest.raises(SystemExit, match=r"run tools/make_metrics_page\.py"):
        check(page)
