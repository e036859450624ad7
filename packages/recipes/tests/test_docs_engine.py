"""The engine of docs/writing-an-engine.md is chosen, set and trained with from the command line, with no word of it elsewhere."""

import json
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


OWN_KEY = """
import sys, torch
from offbeat_engine import World, engine_class
from offbeat_engine.config import ModelConfig
from offbeat_engine.testing import make_tiny_model, random_batch
mine = engine_class("mine")

def logprobs(rows_per_pass, batch):
    engine = mine(mine.Config(model=ModelConfig(path=sys.argv[1]), rows_per_pass=rows_per_pass), World())
    engine.init_model()
    with engine.eval_mode():
        found, ctx = engine.forward_backward_step(batch, forward_only=True)
    return found["logprobs"], ctx.stats.engine["padding_fraction"]

make_tiny_model(sys.argv[1], family="llama")
batch = random_batch(4)
usual, none_padded = logprobs(1, batch)
same, some_padded = logprobs(4, batch)
assert none_padded == 0 < some_padded < 1, (none_padded, some_padded)
torch.testing.assert_close(same, usual, atol=1e-5, rtol=0)

places_T = torch.arange(batch["input_ids"].shape[1])
counted = batch.clone()
counted["mine/positions"] = places_T.expand(4, -1).contiguous()
torch.testing.assert_close(logprobs(4, counted)[0], usual, atol=1e-5, rtol=0)
stretched = batch.clone()
stretched["mine/positions"] = (3 * places_T).expand(4, -1).contiguous()
assert (logprobs(4, stretched)[0] - usual).abs().max() > 1e-3
stretched["mine/positions"] = stretched["mine/positions"].float()
try:
    logprobs(4, stretched)
except Exception as error:
    assert "mine/positions" in str(error), error
else:
    raise AssertionError("a key of another dtype is refused by its name")
"""


@pytest.mark.spawns
def test_its_setting_batch_key_and_statistic_do_what_the_page_says(installed, tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", OWN_KEY, str(tmp_path / "model")],
        env=installed,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.ray
@pytest.mark.slow
def test_a_whole_run_with_it(installed, tmp_path):
    """Its own Ray: workers must find the package where this run's environment has it."""
    folder = tmp_path / "run"
    ran = train(
        installed,
        "task=arithmetic",
        f"run_dir={folder}",
        "engine.name=mine",
        "engine.rows_per_pass=3",
        "rollout=hf",
        "sampling.stop=['1']",
        "warmup.steps=4",
        "trainer.steps=3",
        "trainer.prompts_per_step=4",
        "trainer.group_size=4",
        "trainer.save_every=2",
        "trainer.validation_prompts=8",
    )
    assert ran.returncode == 0, ran.stderr
    assert yaml.safe_load((folder / "config.yaml").read_text())["engine"]["rows_per_pass"] == 3
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(0 < line["engine/padding_fraction"] < 1 for line in steps)
    assert max(line["mismatch/max_abs_logprob_diff"] for line in steps) <= 1e-4
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    stopped = [sample["completion"] for sample in samples if "1" in sample["completion"]]
    assert stopped, "a model after four steps of warm-up writes a 1 here and there"
    assert all(text.index("1") == len(text) - 1 for text in stopped), (
        "nothing comes after the text to stop at"
    )
