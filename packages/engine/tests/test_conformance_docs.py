"""docs/writing-an-engine.md is run as it stands: its files are written, registered, and put through the suite."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.spawns

PAGE = Path(__file__).parents[3] / "docs" / "writing-an-engine.md"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def write_package(folder, name, changes=()):
    """Write each file of the page, its parts one after the other, as package `name`, and install it by its entry point."""

    def renamed(text):
        return text.replace("my_engine", name).replace('"mine"', f'"{name}"')

    for block in blocks("python"):
        title = re.match(r"# (\w+\.py)(, continued)?\n", block)
        assert title, f"a block says in its first line which file it belongs to: {block[:60]!r}"
        with (folder / renamed(title[1])).open("a") as file:
            file.write(renamed(block) + "\n")
    engine = folder / f"{name}.py"
    for good, bad in changes:
        assert good in engine.read_text()
        engine.write_text(engine.read_text().replace(good, bad))
    (groups,) = (tomllib.loads(block)["project"]["entry-points"] for block in blocks("toml"))
    lines = [
        line
        for group, points in groups.items()
        for line in (f"[{group}]", *(f"{name} = {renamed(target)}" for target in points.values()))
    ]
    installed = folder / f"{name}-0.1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
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
        command,
        cwd=folder,
        env={**environment, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "COLUMNS": "500"},
        capture_output=True,
        text=True,
        timeout=600,
    )


# What is right in the page's engine, what is written in its place, the case that sees it, and what that says.
MISTAKES = (
    (
        'logits_BTV / batch["temperature"][:, None, None]',
        "logits_BTV",
        "training_llama_one_rank",
        r"first step: `logprobs` of sequence \d+, token \d+",
    ),
    (
        'updates.set_num_steps(loaded.meta["scheduled_steps"])',
        "pass",
        "checkpoint_1_to_1",
        r"learning rate after loading and a step: expected 0\.000833\d*, got 0\.001",
    ),
)


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Return what pytest says of the page's engine and, of a copy with two mistakes, of the cases that see them."""
    folder = tmp_path_factory.mktemp("page")
    write_package(folder, "my_engine")
    write_package(folder, "mistaken", [(good, bad) for good, bad, _, _ in MISTAKES])
    chosen = " or ".join(["my_engine", *(case for _, _, case, _ in MISTAKES)])
    ran = run_suite(folder, "-k", chosen, "test_my_engine.py", "test_mistaken.py")
    assert ran.returncode == 1, ran.stdout[-4000:] + ran.stderr[-2000:]
    return ran.stdout


def test_the_engine_of_the_page_passes_the_suite(said):
    assert "FAILED test_my_engine.py" not in said, said[-4000:]
    passed, skipped = (int(re.search(rf"(\d+) {word}", said)[1]) for word in ("passed", "skipped"))
    assert passed >= 20
    assert skipped > passed
    assert "my_engine does not declare packing: this engine is the plainest possible" in said


def test_the_suite_sees_two_mistakes_in_it_and_tells_them_apart(said):
    assert "2 failed" in said
    for _, _, case, says in MISTAKES:
        assert re.search(rf"FAILED test_mistaken\.py::\w+::test_{case} - AssertionError: {says}", said), said[
            -3000:
        ]


MOVES = """
import pytest
import torch
from my_engine import MyEngine
from my_engine_settings import MyConfig

from offbeat_engine import Fsdp2Config, ModelConfig, SftLoss, World, engine_class
from offbeat_engine.testing import make_tiny_model, probes
from offbeat_engine.testing.probes import Job
from offbeat_engine.testing.runner import BATCHES, STEPS


@pytest.mark.parametrize("first", ["mine", "fsdp2"])
def test_its_run_goes_on_with_fsdp2_and_the_reverse(tmp_path, first):
    settings = {"model": ModelConfig(path=make_tiny_model(tmp_path / "model")), "micro_batch_tokens": 60}
    mine = Job(engine=MyEngine, config=MyConfig(**settings), loss_fn=SftLoss())
    plain = Job(engine=engine_class("fsdp2"), config=Fsdp2Config(**settings), loss_fn=SftLoss())
    saving, loading = (mine, plain) if first == "mine" else (plain, mine)
    whole = probes.train(World(), plain, BATCHES, (STEPS,))
    saved = probes.save(World(), saving, BATCHES[:2], str(tmp_path / "checkpoints"))
    found, loaded, record = probes.resume(World(), loading, [], BATCHES[2:], str(tmp_path / "checkpoints"))
    assert found == 2
    for name, weight in saved.items():
        assert torch.equal(loaded[name], weight), name
    for name, weight in whole.weights_after[STEPS].items():
        torch.testing.assert_close(record.weights_after[3][name], weight, atol=1e-6, rtol=0)
"""


def test_a_run_moves_between_it_and_fsdp2_with_its_moments(tmp_path):
    write_package(tmp_path, "my_engine")
    (tmp_path / "test_moves.py").write_text(MOVES)
    ran = run_suite(tmp_path, "test_moves.py")
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert "2 passed" in ran.stdout
