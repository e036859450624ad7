import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest

from offbeat_rollout import Completion, Finish
from offbeat_trainer.data.metrics import Last, Max, Mean, Metric, described
from offbeat_trainer.data.types import Group, Prompt, Score, Trajectory
from offbeat_trainer.watch.fanout import FanOut
from offbeat_trainer.watch.jsonl import JsonlReporter
from scripted import Recorder


def lines(path):
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


@contextmanager
def no_room_beyond(num_bytes):
    """Let no file of this process grow beyond so many bytes: a write takes what fits, the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_code_says_of_its_metrics_is_written_as_soon_as_it_is_known(tmp_path, monkeypatch):
    table = {}
    for module in ("data.metrics", "watch.jsonl"):
        monkeypatch.setattr(f"offbeat_trainer.{module}.DESCRIBED", table)
    meaning = "how well it went" * 50
    reporter, path = JsonlReporter(tmp_path), tmp_path / "metrics_described.json"
    reporter.metrics(1, [Metric("mine/other", Mean(1.0))])
    assert not path.exists()
    assert described("mine/score", meaning=meaning, unit="points", high=1.0) == "mine/score"
    with no_room_beyond(400):
        reporter.metrics(2, [Metric("mine/score", Mean(1.0))])
    assert not path.exists()
    reporter.metrics(3, [Metric("mine/score", Mean(1.0))])
    reporter.close()
    assert json.loads(path.read_text()) == {
        "mine/score": {"unit": "points", "meaning": meaning, "low": None, "high": 1.0}
    }
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]


SCORED = (Score(reward=1.0, correct=True),)


def a_group(scores=SCORED):
    made = Completion.of(
        request_id="r", token_ids=(1, 2), logprobs=(0.0, 0.0), policy_versions=(1, 1), finish=Finish.STOP
    )
    return Group(
        prompt=Prompt(uid="u", text="1+1=", token_ids=(1,)),
        trajectories=(Trajectory.of(made),),
        scores=scores,
    )


def test_one_line_per_step_reduced_and_sorted(tmp_path):
    reporter = JsonlReporter(tmp_path / "run")
    before = time.time()
    reporter.metrics(1, [Metric("b/x", Mean(1.0)), Metric("a/x", Max(3.0)), Metric("b/x", Mean(3.0))])
    reporter.metrics(2, [Metric("a/nan", Last(math.nan)), Metric("a/inf", Last(-math.inf))])
    first, second = lines(tmp_path / "run" / "metrics.jsonl")  # not closed: every line is there at once
    assert list(first) == ["step", "time_s", "a/x", "b/x"]
    assert (first["step"], first["a/x"], first["b/x"]) == (1, 3.0, 2.0)
    assert before - 1 <= first["time_s"] <= time.time() + 1
    assert (second["a/inf"], second["a/nan"]) == (None, None)
    reporter.close()
    reporter.close()


def test_a_score_may_be_made_of_numpys_numbers(tmp_path):
    reporter = JsonlReporter(tmp_path)
    score = Score(reward=np.float32(0.5), correct=np.int32(3) > 2)
    reporter.samples(1, "sampled", [a_group(scores=(score,))], [["3"]])
    (line,) = lines(tmp_path / "samples.jsonl")
    assert (line["reward"], line["correct"]) == (0.5, True)
    reporter.close()


def test_samples_read_back_whatever_is_in_them(tmp_path):
    text = "ß \u2028 \x85 \ud800 \n \x00"
    reporter = JsonlReporter(tmp_path)
    reporter.samples(4, "before", [a_group()], [[text]])
    reporter.samples(5, "after", [a_group(scores=())], [["3"]])
    reporter.truncate_after(4)
    reporter.close()
    assert lines(tmp_path / "samples.jsonl") == [
        {
            "step": 4,
            "title": "before",
            "uid": "u",
            "prompt": "1+1=",
            "completion": text,
            "num_tokens": 2,
            "finish": "stop",
            "reward": 1.0,
            "correct": True,
        }
    ]


@pytest.mark.parametrize("torn", [b'{"step": 3, "a/x"', b"{", b'{"step": 3}'])
def test_a_torn_last_line_is_dropped_on_reopening(tmp_path, torn):
    first = JsonlReporter(tmp_path)
    for step in (1, 2):
        first.metrics(step, [])
    first.close()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + torn)
    again = JsonlReporter(tmp_path)
    again.metrics(3, [])
    again.close()
    assert [line["step"] for line in lines(path)] == [1, 2, 3]


def test_a_resumed_run_forgets_what_came_after_its_step(tmp_path):
    reporter = JsonlReporter(tmp_path)
    for step in (1, 2, 3, 4):
        reporter.metrics(step, [Metric("a/x", Last(step))])
    reporter.truncate_after(2)
    reporter.metrics(3, [Metric("a/x", Last(30))])
    reporter.close()
    assert [(line["step"], line["a/x"]) for line in lines(tmp_path / "metrics.jsonl")] == [
        (1, 1),
        (2, 2),
        (3, 30),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "samples.jsonl"]


def test_a_killed_process_leaves_whole_lines(tmp_path):
    code = (
        "import itertools, sys\n"
        "from offbeat_trainer.watch.jsonl import JsonlReporter\n"
        "reporter = JsonlReporter(sys.argv[1])\n"
        "for step in itertools.count(1):\n"
        "    reporter.metrics(step, [])\n"
        "    if step == 50: print('there', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "there\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait(600)
    process.stdout.close()
    JsonlReporter(tmp_path).close()
    steps = [line["step"] for line in lines(tmp_path / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 50


def test_a_disk_that_is_full_for_a_while_costs_the_lines_of_that_time_and_tears_none(tmp_path, capsys):
    jsonl, path = JsonlReporter(tmp_path), tmp_path / "metrics.jsonl"
    beside = Recorder()
    both = FanOut([jsonl, beside], describe_error=lambda error: f"no room for {error.filename}")
    both.metrics(1, [Metric("a/x", Last(1))])
    with no_room_beyond(path.stat().st_size + 5):
        both.metrics(2, [Metric("a/x", Last(2))])
        assert [line["step"] for line in lines(path)] == [1]
        both.metrics(3, [Metric("a/x", Last(3))])
    both.metrics(4, [Metric("a/x", Last(4))])
    both.close()
    assert [line["step"] for line in lines(path)] == [1, 4]
    assert list(beside.steps) == [1, 2, 3, 4]
    assert both.lost == {"JsonlReporter": 2}
    said = capsys.readouterr().err
    assert (
        said
        == f"offbeat: JsonlReporter could not write and tries again, the run goes on: no room for {path}\n"
    )


def test_what_is_to_be_forgotten_stays_where_there_is_no_room_to_write_the_rest_anew(tmp_path):
    reporter = JsonlReporter(tmp_path)
    for step in (1, 2, 3):
        reporter.metrics(step, [])
    with no_room_beyond(5), pytest.raises(OSError, match="File too large"):
        reporter.truncate_after(2)
    reporter.metrics(4, [])
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    reporter.close()
