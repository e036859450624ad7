"""docs/families.md: every causal family is exact or refused in a sentence."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "families.md").read_text()
# One of each outcome: exact both ways, packing refused by layer type, by the model's own attention, logits that are scaled,
# a model that is not causal, noise that cannot be turned off, frequencies that grow.
SOME = ["llama", "lfm2", "biogpt", "granite, scaled logits", "bert", "phimoe", "phi3, longrope"]


@pytest.fixture(scope="module")
def tool():
    return runpy.run_path(str(ROOT / "tools" / "make_families.py"), run_name="make_families")


def lines_of(page):
    return {
        match[1]: match[0] for match in re.finditer(r"^(?:\| |- )([^|:]+?)(?: \||:).*$", page, re.MULTILINE)
    }


@pytest.mark.parametrize("family", SOME)
def test_the_page_says_what_comes_of_a_family(tool, tmp_path, family):
    row = tool["attempt"](family, tmp_path)
    assert row.is_sound
    assert lines_of(tool["page"]([row]))[family] == lines_of(PAGE)[family]


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_every_family_is_exact_or_refused(tool, tmp_path):
    names = tool["families"]()
    rows = [tool["attempt"](name, tmp_path / str(number)) for number, name in enumerate(names)]
    assert [row.family for row in rows if not row.is_sound] == []
    assert tool["page"](rows) == PAGE


def test_the_page_has_every_family_that_transformers_has(tool):
    assert set(tool["families"]()) <= lines_of(PAGE).keys()


def test_a_difference_is_neither(tool):
    outcome, row = tool["Outcome"], tool["Row"]
    wrong = row(family="x", model="X", packed=outcome(gap=2e-5), padded=outcome(gap=1e-7))
    assert not wrong.is_sound
    assert "WRONG by 2e-05" in tool["page"]([wrong])
