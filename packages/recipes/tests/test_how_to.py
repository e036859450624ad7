"""Each section of docs/how-to.md, copied and pasted into an empty folder, ends in a run that learns."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat_recipes.cli._hydra import compose_run

PAGE = Path(__file__).parents[3] / "docs" / "how-to.md"
TIMEOUT_S = 1200
FIRST, *SECTIONS = re.split(r"^## ", PAGE.read_text("utf-8"), flags=re.MULTILINE)[1:]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RUN = [one for one in SECTIONS if "```bash" in one]


def title(section):
    return section.partition("\n")[0]


def paste(section, folder):
    """Write the files of a section and run its commands, as somebody does who copies block after block."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for kind, text in BLOCK.findall(section):
        if kind == "bash":
            done = subprocess.run(
                ["bash", "-e", "-c", text], cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )  # fmt: skip
            assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        elif named := re.match(r"# (\S+)\n", text):
            (folder / named[1]).write_text(text)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    folder = tmp_path_factory.mktemp("how-to")
    paste(FIRST, folder)
    return folder


@pytest.mark.ray
@pytest.mark.deep
@pytest.mark.parametrize("section", RUN, ids=title)
def test_a_section_ends_in_a_run_that_learns(section, begun, tmp_path):
    folder = tmp_path / "empty"
    shutil.copytree(begun, folder)
    paste(section, folder)
    summaries = [path for path in folder.glob("runs/*/summary.json") if path.parent.name != "start"]
    assert summaries
    for path in summaries:
        told = json.loads(path.read_text())
        if told["loss_after"] is not None:
            assert told["loss_after"] < told["loss_before"]
        else:
            assert told["validation_after"] > told["validation_before"], told
            assert told["reward_last"] > told["reward_first"], told


@pytest.mark.ray
@pytest.mark.deep
def test_the_tour_ends_where_it_says(tmp_path):
    paste(PAGE.with_name("tour.md").read_text("utf-8"), tmp_path)
    folders = tmp_path / "runs" / "tour", tmp_path / "runs" / "killed"
    told = json.loads((folders[0] / "summary.json").read_text())
    assert told["accuracy_after"] > 0.9 > told["accuracy_before"]
    lines = [(folder / "metrics.jsonl").read_text().splitlines() for folder in folders]
    plain, killed = ([json.loads(line)["reward/mean"] for line in some] for some in lines)
    assert len(plain) == 50
    assert plain == killed
    assert "killed" in (tmp_path / "compared.html").read_text()


@pytest.mark.parametrize(
    "section", [one for one in SECTIONS if "offbeat train " in one or "offbeat sft " in one], ids=title
)
def test_the_settings_of_every_command_exist(section, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for _, text in BLOCK.findall(FIRST + section):
        if named := re.match(r"# (\S+)\n", text):
            Path(named[1]).write_text(text)
    commands = [text for kind, text in BLOCK.findall(section) if kind in ("bash", "sh")]
    lines = "".join(commands).replace("\\\n", " ").splitlines()
    found = [
        shlex.split(line, comments=True) for line in lines if re.match(r"offbeat (train|sft|plan) ", line)
    ]
    for words in found:
        config = words[words.index("--config") + 1] if "--config" in words else None
        compose_run([word for word in words if "=" in word], config)
    assert found
