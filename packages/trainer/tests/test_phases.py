import time

import pytest

from offbeat_trainer.data.metrics import Sum
from offbeat_trainer.watch.watchdog import PhaseClock
from scripted import Recorder

SOME_S = 0.01


def test_phases_add_up_are_announced_and_become_metrics():
    reporter = Recorder()
    clock = PhaseClock(reporter)
    with clock.phase("generate", "16 prompts"):
        time.sleep(SOME_S)
    with clock.phase("train"), clock.phase("generate"):
        assert reporter.phases[-1] == ("generate", "")  # announced at its start, not at its end
        time.sleep(SOME_S)
    assert reporter.phases == [("generate", "16 prompts"), ("train", ""), ("generate", "")]
    assert list(clock.seconds) == ["generate", "train"]
    assert clock.seconds["generate"] >= 2 * SOME_S
    assert clock.seconds["train"] >= SOME_S
    assert {metric.key: metric.reduction for metric in clock.metrics()} == {
        "time/generate_s": Sum(clock.seconds["generate"]),
        "time/train_s": Sum(clock.seconds["train"]),
    }


def test_a_phase_that_fails_is_counted_and_its_error_passes():
    clock = PhaseClock(Recorder())

    def failing():
        with clock.phase("sync"):
            time.sleep(SOME_S)
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert clock.seconds["sync"] >= SOME_S


def test_seconds_is_a_copy():
    clock = PhaseClock(Recorder())
    with clock.phase("sync"):
        pass
    clock.seconds["sync"] = -1.0
    assert clock.seconds["sync"] >= 0
