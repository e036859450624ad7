import subprocess
import sys

import pytest

from offbeat_trainer.errors import TrainerError
from offbeat_trainer.reporters.wandb import WandbReporter


def test_where_it_is_missing_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(TrainerError, match=r"offbeat-trainer\[wandb\]"):
        WandbReporter(tmp_path, project="p", name="n")


RUN = """
import sys
from offbeat_trainer.metrics import Last, Metric
from offbeat_trainer.reporters.wandb import WandbReporter
reporter = WandbReporter(sys.argv[1], project="p", name="n", config={"a": 1})
reporter.samples(1, "after", [], [])
reporter.metrics(1, [Metric("reward/mean", Last(0.5))])
reporter.summary({"accuracy_after": 0.9})
reporter.close()
reporter.close()
"""


def test_offline_a_run_is_written_below_its_folder(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    # A process of its own: W&B's service ends the file when its client exits.
    command = [sys.executable, "-c", RUN, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout == ""
    (written,) = tmp_path.rglob("run-n.wandb")
    assert b"accuracy_after" in written.read_bytes()
    assert b"reward/mean" in written.read_bytes()
