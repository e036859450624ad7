import sys

import pytest

from offbeat_trainer.errors import TrainerError
from offbeat_trainer.metrics import Last, Metric
from offbeat_trainer.reporters.wandb import WandbReporter


def test_where_it_is_missing_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(TrainerError, match=r"offbeat-trainer\[wandb\]"):
        WandbReporter(tmp_path, project="p", name="n")


def test_offline_a_run_is_written_below_its_folder(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    reporter = WandbReporter(tmp_path, project="p", name="n", config={"a": 1})
    reporter.samples(1, "after", [], [])
    reporter.metrics(1, [Metric("reward/mean", Last(0.5))])
    reporter.summary({"accuracy_after": 0.9})
    reporter.close()
    reporter.close()
    (written,) = tmp_path.rglob("run-n.wandb")
    assert b"accuracy_after" in written.read_bytes()
