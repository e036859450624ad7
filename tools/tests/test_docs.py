"""What the pages say of files, code and commands is so."""

from __future__ import annotations

import re
import shlex
import subprocess
import textwrap
from pathlib import Path

import pytest

from offbeat_recipes.cli._hydra import compose_run

ROOT = Path(__file__).resolve().parents[2]
LOOP = ROOT / "packages/trainer/src/offbeat_trainer/loops/online.py"


def pages() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=600
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def links(text: str) -> list[str]:
    found = re.findall(r"\]\(([^)\s#]+)", text)
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def commands(text: str) -> list[list[str]]:
    """Return the settings of every command in the shell blocks of a page that takes those of a run."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```\n", text, re.DOTALL | re.MULTILINE)
    lines = "".join(code for kind, code in blocks if kind in ("", "bash")).replace("\\\n", " ").splitlines()
    told = [
        shlex.split(line, comments=True)
        for line in lines
        if re.match(r"(uv run )?offbeat(-(?!sync)| train| plan| eval| sft| report)(?!.*--multirun)", line)
    ]
    return [[word for word in words if "=" in word] for words in told]


def test_every_relative_link_leads_somewhere():
    found = {page: links(page.read_text("utf-8")) for page in pages()}
    assert sum(map(len, found.values())) > 25
    assert [
        f"{page.relative_to(ROOT)}: {link}"
        for page, names in found.items()
        for link in names
        if not (page.parent / link).exists()
    ] == []


def test_every_page_is_listed_in_the_index():
    index = set(links((ROOT / "docs/index.md").read_text("utf-8")))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"} <= index


def test_the_readme_shows_the_loop_as_it_is():
    _from_python, shown = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL
    )
    indented = textwrap.indent(shown, 12 * " ")
    assert indented in LOOP.read_text("utf-8")


@pytest.mark.parametrize("page", ["README.md", "packages/recipes/README.md"])
def test_the_settings_of_every_command_exist(page: str):
    told = commands((ROOT / page).read_text("utf-8"))
    assert len(told) >= 5
    assert sum(map(len, told)) >= 8
    for settings in told:
        compose_run(settings)


def test_every_group_of_entry_points_is_on_the_page_of_plug_ins():
    source = "".join(path.read_text() for path in ROOT.glob("packages/*/src/**/*.py"))
    groups = set(re.findall(r'"(offbeat\.[a-z]+)"', source))
    page = (ROOT / "docs" / "plug-ins.md").read_text()
    assert groups == set(re.findall(r"`(offbeat\.[a-z]+)`", page))
