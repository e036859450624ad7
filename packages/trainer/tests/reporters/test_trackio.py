import json
import os
import sqlite3
import subprocess
import sys

import pytest

from offbeat_trainer.errors import TrainerError
from offbeat_trainer.watch.trackers import TrackioReporter


def test_where_it_is_missing_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(TrainerError, match=r"offbeat-trainer\[trackio\]"):
        TrackioReporter(tmp_path, project="p", name="n")


RUN = """
import sys
from offbeat_trainer.data.metrics import Last, Metric
from offbeat_trainer.watch.trackers import TrackioReporter
folder, *steps = sys.argv[1:]
reporter = TrackioReporter(folder, project="p", name="n", config={"learning": 0.125})
for step in map(int, steps):
    reporter.samples(step, "sampled", [], [])
    reporter.metrics(step, [Metric("reward/mean", Last(0.5 + step))])
reporter.summary({"accuracy_after": 0.9})
reporter.close()
reporter.close()
"""


def go(folder, *steps):
    command = [sys.executable, "-c", RUN, str(folder), *map(str, steps)]
    environment = {**os.environ, "TRACKIO_DIR": str(folder.parent / "kept")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.spawns
def test_a_run_is_kept_with_its_metrics_and_goes_on_under_its_name(tmp_path):
    pytest.importorskip("trackio", reason="trackio is not installed")
    go(tmp_path / "run", 1, 2)
    go(tmp_path / "run", 3)
    go(tmp_path / "other", 1)
    with sqlite3.connect(tmp_path / "kept" / "p.db") as kept:
        rows = kept.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    kept.close()
    own = (tmp_path / "run" / "trackio.name").read_text()
    assert own.startswith("n-")
    logged = [(step, json.loads(values)) for name, step, values in rows if name == own]
    rewards = [(step, values["reward/mean"]) for step, values in logged if "reward/mean" in values]
    assert rewards == [(1, 1.5), (2, 2.5), (3, 3.5)]
    assert {name for name, _, _ in rows} == {own, (tmp_path / "other" / "trackio.name").read_text()}
