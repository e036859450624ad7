"""docs/writing-an-engine.md is run as it stands: its files are written, registered, and put through the suite."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "writing-an-engine.md"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def write_package(folder):
    """Write each file of the page, its parts one after the other, and install it by its entry point."""
    for block in blocks("python"):
        name = re.match(r"# (\w+\.py)(, continued)?\n", block)
        assert name, f"a block says in its first line which file it belongs to: {block[:60]!r}"
        with (folder / name[1]).open("a") as file:
            file.write(block + "\n")
    (groups,) = (tomllib.loads(block)["project"]["entry-points"] for block in blocks("toml"))
    lines = [
        line for group, points in groups.items() for line in (f"[{group}]", *map(" = ".join, points.items()))
    ]
    installed = folder / "my_engine-0.1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my-engine\nVersion: 0.1\n")
    (installed / "entry_points.txt").write_text("\n".join(lines))


def run_suite(folder, *options):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-ra",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:asyncio",
        f"--rootdir={folder}",
        *options,
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_XDIST")}
    paths = os.pathsep.join(filter(None, (str(folder), environment.get("PYTHONPATH"))))
    return subprocess.run(
        [*command, "test_my_engine.py"],
        cwd=folder,
        env={**environment, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "COLUMNS": "500"},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_the_engine_of_the_page_passes_the_suite(tmp_path):
    write_package(tmp_path)
    ran = run_suite(tmp_path)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    passed, skipped = (int(re.search(rf"(\d+) {word}", ran.stdout)[1]) for word in ("passed", "skipped"))
    assert passed >= 20
    assert skipped > passed
    assert "mine does not declare packing: this engine is the plainest possible" in ran.stdout


# What is right in the page's engine, what is written in its place, the case that sees it, and what that says.
MISTAKES = (
    (
        'logits_BTV / batch["temperature"][:, None, None]',
        "logits_BTV",
        "training_llama_one_rank",
        r"first step: `logprobs` of sequence \d+, token \d+",
    ),
    (
        'self.num_steps = state["num_steps"]',
        "pass",
        "checkpoint_1_to_1",
        r"learning rate after loading and a step: expected 0\.000833\d*, got 0\.001",
    ),
)


def test_the_suite_sees_two_mistakes_in_it_and_tells_them_apart(tmp_path):
    write_package(tmp_path)
    file = tmp_path / "my_engine.py"
    for good, bad, _, _ in MISTAKES:
        assert good in file.read_text()
        file.write_text(file.read_text().replace(good, bad))
    ran = run_suite(tmp_path, "-k", " or ".join(case for _, _, case, _ in MISTAKES))
    assert ran.returncode == 1
    assert "2 failed" in ran.stdout
    for _, _, case, says in MISTAKES:
        assert re.search(
            rf"FAILED test_my_engine\.py::\w+::test_{case} - AssertionError: {says}", ran.stdout
        ), ran.stdout[-3000:]
