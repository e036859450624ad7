import pytest

from offbeat_trainer.data.metrics import Last, Metric
from offbeat_trainer.watch.fanout import FanOut
from offbeat_trainer.watch.jsonl import Silent
from scripted import Recorder


class Breaks(Recorder):
    """A tracker whose disk fills up at step 2."""

    def __init__(self, error):
        super().__init__()
        self._error = error

    def metrics(self, step, metrics):
        if step >= 2:
            raise self._error
        super().metrics(step, metrics)


class NeverCloses(Recorder):
    def close(self):
        super().close()
        raise OSError("no")


def a_run(reporter):
    reporter.phase("start", "here")
    for step in (1, 2, 3):
        reporter.metrics(step, [Metric("a/x", Last(step))])
    reporter.samples(3, "after", [], [])
    reporter.summary({"steps": 3})
    reporter.close()


def is_whole(recorder):
    return (recorder.phases, recorder.steps, recorder.shown, recorder.end, recorder.closed) == (
        [("start", "here")],
        {1: {"a/x": 1}, 2: {"a/x": 2}, 3: {"a/x": 3}},
        [(3, "after", [])],
        {"steps": 3},
        1,
    )


def test_all_are_told_everything():
    some = [Recorder(), Recorder()]
    a_run(FanOut([some[0], Silent(), some[1]]))
    assert all(map(is_whole, some))


def test_one_that_raises_is_named_once_closed_and_dropped(capsys):
    broken, fine = Breaks(OSError("disk full")), Recorder()
    both = FanOut([broken, fine])
    a_run(both)
    assert is_whole(fine)
    assert both.lost == {"Breaks": 3}, "two steps and the samples"
    assert (list(broken.steps), broken.end, broken.closed) == ([1], None, 1)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "Breaks" in said
    assert "OSError: disk full" in said


def test_one_that_cannot_even_close_does_no_harm(capsys):
    fine = Recorder()
    a_run(FanOut([NeverCloses(), fine]))
    assert is_whole(fine)
    assert "NeverCloses" in capsys.readouterr().err


def test_an_interrupt_is_no_failure_of_the_reporter():
    with pytest.raises(KeyboardInterrupt):
        a_run(FanOut([Breaks(KeyboardInterrupt())]))
