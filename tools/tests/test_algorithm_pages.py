"""docs/algorithms: a page for each installed algorithm, made of its class."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from offbeat_trainer.algorithms.registry import algorithm_names

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "algorithms"


@pytest.fixture
def make_pages(monkeypatch):
    def make_pages(*arguments):
        tool = str(ROOT / "tools" / "make_algorithm_pages.py")
        monkeypatch.setattr(sys, "argv", [tool, *map(str, arguments)])
        runpy.run_path(tool, run_name="__main__")

    return make_pages


def test_the_pages_are_what_the_classes_say(make_pages):
    make_pages("--check")
    listed = (PAGES / "index.md").read_text()
    for name in algorithm_names():
        assert f"| [`{name}`]({name}.md) |" in listed
        assert "Use it when" in (PAGES / f"{name}.md").read_text()


def test_the_readme_counts_algorithms_and_recorded_numbers():
    assert len(algorithm_names()) == 30
    fixtures = (ROOT / "packages/trainer/tests/algorithms/fixtures").glob("*.json")
    assert sum(len(json.loads(path.read_text())["cases"]) for path in fixtures) == 80
    (row,) = (line for line in (ROOT / "README.md").read_text().splitlines() if "paper's formula" in line)
    assert "[Thirty]" in row
    assert " 80 recorded numbers" in row


def test_a_page_of_another_text_and_one_of_no_algorithm_are_found_and_mended(make_pages, tmp_path):
    folder = tmp_path / "algorithms"
    shutil.copytree(PAGES, folder)
    before = (folder / "gspo.md").read_text()
    (folder / "gspo.md").write_text(before.replace("0.0003", "0.0004"))
    (folder / "gone.md").write_text("# gone")
    with pytest.raises(SystemExit, match=r"gspo\.md, gone\.md: not what the algorithms are"):
        make_pages("--check", "--folder", folder)
    make_pages("--folder", folder)
    assert (folder / "gspo.md").read_text() == before
    assert not (folder / "gone.md").exists()
