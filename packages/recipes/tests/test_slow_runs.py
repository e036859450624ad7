"""Whole runs over replicas of a token a second, which is slow and no more: `step_timeout_s` is what a group takes many times."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.deep]

RUN_TIMEOUT_S = 900.0
# Another package's adapter: the Transformers one, which waits before every call of its model, which is one a token.
ADAPTER = """
import time
from torch.nn.modules.module import register_module_forward_pre_hook
from offbeat_rollout.hf import HfEngine

def wait(module, inputs):
    if type(module).__name__.endswith("ForCausalLM"):
        time.sleep(1.0)

class Slow(HfEngine):
    async def start(self):
        await super().start()
        register_module_forward_pre_hook(wait)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return the environment in which a package is installed whose adapter is `slow`."""
    folder = tmp_path_factory.mktemp("site")
    about = folder / "slow-0.1.dist-info"
    about.mkdir()
    (folder / "slow_adapter.py").write_text(ADAPTER)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: slow\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("[offbeat.rollouts]\nslow = slow_adapter:Slow\n")
    paths = filter(None, (str(folder), os.environ.get("PYTHONPATH")))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("mode", ["sync", "fully_async"])
def test_nobody_is_lost_and_the_run_says_that_it_is_slow(installed, tmp_path, mode):
    folder = tmp_path / "run"
    ran = subprocess.run(
        [
            Path(sys.executable).parent / "offbeat-train", "task=arithmetic", f"mode={mode}", f"run_dir={folder}",
            "rollout.name=slow", "rollout.num_replicas=3", "cluster.num_devices=3", "rollout.cpu_threads=1", "trainer.step_timeout_s=5",
            "trainer.steps=2", "trainer.prompts_per_step=3", "trainer.group_size=2", "trainer.validation_prompts=3",
            "trainer.validate_every=0", "warmup.steps=0", "task.hidden_size=12", "sampling.max_tokens=12",
        ],
        env=installed,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [1, 2]
    assert not any(key.startswith("buffer/dropped") for line in steps for key in line)
    said = (folder / "logs" / "driver.log").read_text()
    assert "is lost" not in said
    assert "is in its place" not in said
    for words in (ran.stdout, said):
        assert "slow: the loop waits for generation to give a step's groups, for " in " ".join(words.split())
        assert "made tokens, " in words
