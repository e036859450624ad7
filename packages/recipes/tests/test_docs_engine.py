"""The engine of docs/writing-an-engine.md is chosen and set from the command line, with no word of it elsewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

PAGE = Path(__file__).parents[3] / "docs" / "writing-an-engine.md"
RUN_TIMEOUT_S = 600.0


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Write the page's package with its entry points; return the environment in which it is installed."""
    folder = tmp_path_factory.mktemp("site")
    blocks = re.findall(r"```(python|toml)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    points = ""
    for language, block in blocks:
        if language == "toml":
            points += re.sub(r'\[project\.entry-points\."(.*)"\]', r"[\1]", block).replace('"', "")
            continue
        with (folder / re.match(r"# (\w+\.py)", block)[1]).open("a") as file:
            file.write(block + "\n")
    about = folder / "mine-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text(points)
    paths = filter(None, (str(folder), os.environ.get("PYTHONPATH")))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def train(installed, *words):
    command = [str(Path(sys.executable).parent / "offbeat-train"), *words]
    return subprocess.run(
        command, env=installed, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
    )


def test_its_setting_is_checked_and_printed_as_any_other(installed):
    printed = train(installed, "engine.name=mine", "engine.rows_per_pass=3", "--cfg", "job")
    assert yaml.safe_load(printed.stdout)["engine"]["rows_per_pass"] == 3, printed.stderr
    wrong = train(installed, "engine.name=mine", "engine.rows_per_pas=3")
    assert wrong.returncode == 2
    assert "unknown setting `engine.rows_per_pas`; did you mean `engine.rows_per_pass`?" in wrong.stderr
