import sys
from importlib.util import find_spec

import pytest

from offbeat_rollout import Completion, Finish
from offbeat_trainer.data.metrics import Last, Mean, Metric
from offbeat_trainer.data.types import Group, Prompt, Trajectory
from offbeat_trainer.errors import TrainerError
from offbeat_trainer.watch.fanout import FanOut
from offbeat_trainer.watch.trackers import TensorBoardReporter

INSTALLED = pytest.mark.skipif(find_spec("tensorboard") is None, reason="needs the extra [tensorboard]")


def read(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return events


@INSTALLED
def test_scalars_and_texts_read_back(tmp_path):
    made = Completion.of(
        request_id="r", token_ids=(1,), logprobs=(0.0,), policy_versions=(1,), finish=Finish.STOP
    )
    group = Group(prompt=Prompt(uid="u", text="1+1=", token_ids=(1,)), trajectories=(Trajectory.of(made),))
    reporter = TensorBoardReporter(tmp_path)
    reporter.metrics(1, [Metric("reward/mean", Mean(1.0)), Metric("reward/mean", Mean(0.0))])
    reporter.metrics(2, [Metric("reward/mean", Mean(0.75))])
    reporter.samples(2, "after", [group], [["two"]])
    reporter.summary({"accuracy_after": 0.9})
    reporter.close()
    reporter.close()
    events = read(tmp_path)
    assert [(one.step, one.value) for one in events.Scalars("reward/mean")] == [(1, 0.5), (2, 0.75)]
    (shown,) = events.Tensors("samples/after/text_summary")
    assert b"1+1=" in shown.tensor_proto.string_val[0]
    assert b"two" in shown.tensor_proto.string_val[0]
    assert b"accuracy_after" in events.Tensors("summary/text_summary")[0].tensor_proto.string_val[0]


@INSTALLED
def test_a_resumed_run_hides_what_came_after_its_step(tmp_path):
    first, again = FanOut([TensorBoardReporter(tmp_path)]), FanOut([TensorBoardReporter(tmp_path)])
    for step in (1, 2, 3):
        first.metrics(step, [Metric("a/x", Last(step))])
    first.close()
    again.truncate_after(1)
    for step in (2, 3):
        again.metrics(step, [Metric("a/x", Last(step + 20))])
    again.close()
    assert [(one.step, one.value) for one in read(tmp_path).Scalars("a/x")] == [(1, 1), (2, 22), (3, 23)]


@INSTALLED
def test_the_settings_of_the_run_are_there_to_read(tmp_path):
    TensorBoardReporter(tmp_path, config={"seed": 3, "algorithm": {"lr": 0.5}}).close()
    (text,) = read(tmp_path).Tensors("config/text_summary")
    assert b'"lr": 0.5' in text.tensor_proto.string_val[0]


def test_where_it_is_missing_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(TrainerError, match=r"offbeat-trainer\[tensorboard\]"):
        TensorBoardReporter(tmp_path)
