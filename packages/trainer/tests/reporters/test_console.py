import io

import pytest
from rich.console import Console

from offbeat_rollout import Completion, Finish
from offbeat_trainer.data.metrics import Last, Metric, Sum
from offbeat_trainer.data.types import Group, Prompt, Score, Trajectory
from offbeat_trainer.watch.console import HEADER_EVERY, ConsoleReporter


class Screen:
    """A console into a string, and a clock that the test moves."""

    def __init__(self, *, terminal, **settings):
        self.file = io.StringIO()
        self.time_s = 100.0
        console = Console(file=self.file, force_terminal=terminal, width=100, highlight=False)
        self.reporter = ConsoleReporter(console=console, now=lambda: self.time_s, **settings)

    def phase(self, name, detail="", spend_s=0.0):
        self.reporter.phase(name, detail)
        self.time_s += spend_s

    @property
    def lines(self):
        return [line.rstrip() for line in self.file.getvalue().splitlines() if line.strip()]


def group(text="1+1=", correct=True):
    made = Completion.of(
        request_id="r", token_ids=(1,), logprobs=(0.0,), policy_versions=(1,), finish=Finish.STOP
    )
    return Group(
        prompt=Prompt(uid="u", text=text, token_ids=(1,)),
        trajectories=(Trajectory.of(made),),
        scores=(Score(reward=float(correct), correct=correct),),
    )


def step_metrics(step, **more):
    values = {"reward/mean": 0.5, "accuracy/train": 0.25, "time/generate_s": 1.0, **more}
    return [
        *(Metric(key, Last(value)) for key, value in values.items()),
        Metric("tokens/generated", Sum(step)),
    ]


def test_in_a_pipe_startup_is_one_line_a_phase_as_it_begins():
    screen = Screen(terminal=False, title="demo")
    screen.phase("start", "1 rank", spend_s=4.2)
    screen.phase("warm-up", "step 1 of 300", spend_s=1)
    screen.phase("warm-up", "step 2 of 300", spend_s=20)  # too soon to say again
    screen.phase("warm-up", "step 250 of 300", spend_s=60)
    screen.phase("validate", "256 prompts")
    assert screen.lines == [
        "offbeat  ·  demo",
        "   +0.0 s  start      1 rank",
        "   +4.2 s  warm-up    step 1 of 300",
        "  +25.2 s  warm-up    step 250 of 300",
        "    +1:25  validate   256 prompts",
    ]


def test_in_a_pipe_steps_are_rows_and_nothing_else():
    screen = Screen(terminal=False, steps=2)
    for step in (1, 2):
        for name in ("generate", "reward", "train", "sync", "validate", "save"):
            screen.phase(name, spend_s=1)
        screen.reporter.metrics(step, step_metrics(step * 1000, **{"policy/ref_kl_nats": 0.01}))
    screen.reporter.summary({})
    screen.reporter.close()
    header, *rows = screen.lines[:3]
    assert header.split()[:4] == ["step", "reward", "acc", "valid"]
    assert "ref KL" in header
    assert rows[0].split()[:5] == ["1", "0.500", "25.0%", "·", "1.0k"]
    assert rows[1].split()[:5] == ["2", "0.500", "25.0%", "·", "2.0k"]
    assert "\x1b" not in screen.file.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_what_a_step_waits_for_is_said_when_it_is_announced(terminal):
    screen = Screen(terminal=terminal, steps=2)
    screen.phase("validate", "8 prompts", spend_s=20)
    screen.phase("generate", spend_s=600)
    for waited_s in (600, 601, 1200):
        screen.phase("generate", f"slow: for {waited_s} s", spend_s=1 if waited_s == 600 else 599)
        if terminal:
            screen.reporter._live.refresh()
    screen.reporter.close()
    said = [waited_s for waited_s in (600, 601, 1200) if f"slow: for {waited_s} s" in screen.file.getvalue()]
    assert said == ([600, 601, 1200] if terminal else [600, 1200])


@pytest.mark.parametrize("terminal", [False, True])
def test_that_a_run_will_stop_and_who_was_fenced_off_stays_to_be_read(terminal):
    screen = Screen(terminal=terminal, steps=2)
    for name, detail in (
        ("generate", ""),
        ("stopping", "after this step"),
        ("fenced", "replica 1"),
        ("train", ""),
    ):
        screen.phase(name, detail, spend_s=1)
    screen.reporter.close()
    for news in ("stopping: after this step", "fenced: replica 1"):
        assert sum(news in line for line in screen.lines) == 1


def test_the_header_comes_back_rarely():
    screen = Screen(terminal=False)
    screen.phase("generate")
    for step in range(1, HEADER_EVERY + 2):
        screen.reporter.metrics(step, step_metrics(step))
    assert sum("reward" in line for line in screen.lines) == 2


def test_on_a_terminal_startup_phases_leave_their_time_and_steps_show_below():
    screen = Screen(terminal=True, steps=10)
    screen.phase("start", "1 rank", spend_s=4.2)
    screen.phase("generate", spend_s=2)
    screen.reporter.metrics(1, step_metrics(1))
    screen.phase("train", spend_s=2)
    screen.reporter._live.refresh()
    screen.reporter.close()
    written = screen.file.getvalue()
    assert "✓" in written
    assert "4.2 s" in written
    assert "1/10" in written
    assert "about 36.0 s left" in written  # one step took 4 s, nine are left
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h") == 1  # the cursor is given back


def test_a_long_phase_says_how_long_it_still_takes():
    screen = Screen(terminal=False)
    screen.phase("warm-up", "300 steps", spend_s=30)
    screen.reporter.progress(100, 300)
    screen.phase("warm-up", "step 100 of 300")
    assert screen.lines[-1].endswith("step 100 of 300; about 1:00 left")
    screen.phase("validate", "256 prompts", spend_s=8)
    screen.phase("generate", spend_s=1)
    screen.phase("validate", "256 prompts", spend_s=2)  # which took 8 s the first time
    assert screen.reporter._phase.left(screen.time_s) == "about 6.0 s left"
    assert screen.reporter._phase.left(screen.time_s + 9) == "", "longer than last time"


def test_on_a_terminal_what_is_left_of_a_phase_is_a_bar_and_a_time():
    screen = Screen(terminal=True)
    screen.phase("warm-up", "300 steps", spend_s=30)
    screen.reporter.progress(150, 300)
    screen.phase("warm-up", "step 150 of 300")
    screen.reporter.close()
    assert any("━" in line and "about 30.0 s left" in line and "150 of 300" in line for line in screen.lines)


def test_the_speed_of_a_step_counts_the_validation_during_which_it_was_generated():
    screen = Screen(terminal=False, steps=3)
    screen.reporter.metrics(1, step_metrics(1000, **{"time/validate_s": 4.0}))
    screen.reporter.metrics(2, step_metrics(1000, **{"time/generate_s": 0.0, "time/train_s": 1.0}))
    screen.reporter.metrics(3, step_metrics(1000))
    rows = [line.split() for line in screen.lines if line.split()[:1] in (["1"], ["2"], ["3"])]
    assert [cells[4] for cells in rows] == ["1.0k", "200", "1.0k"]


def test_samples_come_below_the_row_of_their_step():
    screen = Screen(terminal=False)
    screen.phase("validate")
    screen.reporter.samples(0, "before", [group("2+2=", correct=False)], [["5[bold]\x1b"]])
    screen.phase("generate")
    screen.reporter.samples(1, "sampled", [group("not shown")], [["1"]])
    screen.reporter.samples(1, "after", [group("3+3=")], [["6"]])
    screen.reporter.metrics(1, step_metrics(1))
    text = "\n".join(screen.lines)
    assert "5[bold]\\x1b" in text  # as it is: neither markup nor a control character
    assert text.index("2+2=") < text.index("0.500") < text.index("3+3=")
    assert "not shown" not in text


@pytest.mark.parametrize("terminal", [False, True])
def test_an_end_without_summary_names_the_phase(terminal):
    screen = Screen(terminal=terminal)
    screen.phase("start", "2 replicas", spend_s=300)
    screen.reporter.close()
    screen.reporter.close()
    assert screen.file.getvalue().count("ended in start 2 replicas") == 1
    assert "5:00" in screen.file.getvalue()


def test_the_summary_tells_before_and_after_and_where_to_look():
    screen = Screen(terminal=False)
    screen.reporter.summary(
        {
            "accuracy_before": 0.25,
            "accuracy_after": 0.975,
            "reward_first": None,
            "wall_s": 192.0,
            "startup_s": 20.0,
            "tokens_per_s": 8912.0,
            "phase_s": {"generate": 0.8, "train": 0.35},
            "resume_command": "not now",
            "paths": {"metrics": "runs/demo/metrics.jsonl"},
        }
    )
    text = "\n".join(screen.lines)
    for wanted in (
        " done ", "25.0%  →  97.5%", "3:12  (start 20.0 s)", "8.9k tokens/s", "generate 0.80 s · train 0.35 s",
        "runs/demo/metrics.jsonl",
    ):  # fmt: skip
        assert wanted in text
    assert "not now" not in text
    assert "None" not in text


def test_the_summary_begins_with_how_each_column_went():
    screen = Screen(terminal=False)
    for step in (1, 2, 3):
        screen.reporter.metrics(step, step_metrics(step, **{"accuracy/train": step / 4}))
    last = screen.lines[-1]
    screen.reporter.summary({"steps": 3})
    line = screen.lines[screen.lines.index(last) + 1]
    assert "▁▄█" in line
    assert line.index("▁▄█") + 3 == last.index("75.0%") + 5, "under its column"


def test_an_interrupted_run_says_how_to_go_on():
    screen = Screen(terminal=False)
    command = f"cd '/a folder/{'x' * 90}' && offbeat-train --config config.yaml resume=auto"
    screen.reporter.summary({"interrupted": True, "steps": 7, "resume_command": command})
    assert any(" stopped " in line for line in screen.lines)
    assert screen.lines[-1].endswith(f"  {command}"), "it is copied whole"
