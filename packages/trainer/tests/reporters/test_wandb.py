import subprocess
import sys

import pytest

from offbeat_trainer.errors import TrainerError
from offbeat_trainer.watch.trackers import WandbReporter


def test_where_it_is_missing_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(TrainerError, match=r"offbeat-trainer\[wandb\]"):
        WandbReporter(tmp_path, project="p", name="n")


RUN = """
import sys
from offbeat_trainer.data.metrics import Last, Metric
from offbeat_trainer.watch.trackers import WandbReporter
folder, *steps = sys.argv[1:]
reporter = WandbReporter(folder, project="p", name="n", config={"learning": 0.125})
reporter.samples(1, "after", [], [])
for step in map(int, steps):
    reporter.metrics(step, [Metric("reward/mean", Last(0.5 + step))])
reporter.summary({"accuracy_after": 0.9})
reporter.close()
reporter.close()
"""


def go(folder, *steps):
    # A process of its own: W&B's service ends the file when its client exits.
    command = [sys.executable, "-c", RUN, str(folder), *map(str, steps)]
    assert subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout == ""


def test_offline_a_run_is_written_below_its_folder_with_its_settings(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    go(tmp_path / "run", 1)
    (written,) = tmp_path.rglob("run-*.wandb")
    for word in (b"accuracy_after", b"reward/mean", b"learning", b"0.125"):
        assert word in written.read_bytes()


def test_runs_of_one_name_are_runs_of_their_own_and_one_that_goes_on_repeats_its_steps(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    go(tmp_path / "one", 1, 2, 3)
    go(tmp_path / "other", 1)
    go(tmp_path / "one", 2, 3, 4)  # from the checkpoint of step 1
    names = {
        folder: {path.name for path in (tmp_path / folder).rglob("run-*.wandb")}
        for folder in ("one", "other")
    }
    assert len(names["one"]) == len(names["other"]) == 1
    assert names["one"] != names["other"]
    for written in (tmp_path / "one").rglob("run-*.wandb"):
        assert written.read_bytes().count(b"reward/mean") >= 3
