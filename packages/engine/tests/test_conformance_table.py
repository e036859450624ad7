"""docs/capabilities.md is what the engines declare."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def check(monkeypatch):
    def check(page):
        tool = str(ROOT / "tools" / "make_capabilities.py")
        monkeypatch.setattr(sys, "argv", [tool, "--check", "--page", str(page)])
        runpy.run_path(tool, run_name="__main__")

    return check


def test_the_committed_table_is_current(check):
    check(ROOT / "docs" / "capabilities.md")


def test_a_table_that_says_something_else_is_red(check, tmp_path):
    page = tmp_path / "capabilities.md"
    page.write_text((ROOT / "docs" / "capabilities.md").read_text().replace("| yes |", "| no |", 1))
    with pytest.raises(SystemExit, match=r"run tools/make_capabilities\.py"):
        check(page)
