import io
from fnmatch import fnmatchcase

import pytest
from rich.console import Console

from offbeat_trainer.watch.figures import (
    clock,
    columns,
    header,
    metrics_table,
    number,
    percent,
    row,
    seconds,
    sparkline,
    summary_panel,
    trends,
    visible,
    with_speed,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.000"), (0.31234, "0.312"), (-1.5, "-1.500"), (12.34, "12.3"), (456.7, "457"), (8912, "8.9k"),
        (999.9, "1.0k"), (123456, "123k"), (2.5e6, "2.5M"), (3e-6, "3e-6"), (float("nan"), "nan"),
    ],
)  # fmt: skip
def test_numbers(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(4.23, "4.2 s"), (59.9, "59.9 s"), (185, "3:05"), (3729, "1:02:09")]
)
def test_clock(value, text):
    assert clock(value) == text


def test_percent_and_seconds():
    assert [percent(0.3149), percent(1.0), percent(float("nan"))] == ["31.5%", "100.0%", "nan"]
    assert [seconds(0.834), seconds(12.34), seconds(123.4)] == ["0.83", "12.3", "123"]


def test_speed_counts_the_whole_step():
    values = {"tokens/generated": 300.0, "time/generate_s": 1.0, "time/train_s": 2.0, "time/validate_s": 9.0}
    assert with_speed(values)["tokens/generated_per_s"] == 100
    assert with_speed(values, 3.0)["tokens/generated_per_s"] == 50
    assert "tokens/generated_per_s" not in with_speed({"tokens/generated": 300.0})


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"tokens/generated": 8.0},
        {"reward/mean": -123.4, "policy/ref_kl_nats": 1e-9, "train/grad_norm": 1e9},
    ],
)
def test_rows_stand_under_their_header_within_a_narrow_terminal(values):
    shown = columns(values)
    titles, line = header(values, 4, shown).plain, row(12, values, 4, shown).plain
    assert len(titles) == len(line) <= 80
    ends = [
        index for index in range(len(titles) - 1) if titles[index] != " " and titles[index + 1 :][:2] == "  "
    ]
    assert len(ends) == len(shown)
    assert all(line[end] != " " and line[end + 1] == " " for end in ends)


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ([], ""), ([0.5], ""), ([0.5, 0.5], "▁▁"), ([0, 1], "▁█"), ([1, 0.5, 0], "█▄▁"),
        ([0, 0, 1, 1, 2, 2, 3, 3], "▁▃▅█"), ([0, float("nan"), 1], "▁█"), (range(1000), "▁▃▅█"),
    ],
)  # fmt: skip
def test_bars_are_as_high_as_the_values_and_as_many_as_there_is_room(values, bars):
    assert sparkline(list(values), 4) == bars


def test_trends_stand_under_their_columns():
    history = [{"reward/mean": 0.1, "reward/validation": 0.5}, {"reward/mean": 0.9}, {"reward/mean": 0.4}]
    shown = columns(history[0])
    line = trends(history, 4, shown).plain
    assert len(line) == len(row(1, history[0], 4, shown).plain)
    assert line.split() == ["▁█▃"], "one validation alone is no trend"


def test_no_column_stays_empty():
    supervised = {"train/loss": 2.0, "validation/loss": 1.5, "time/train_s": 0.5, "train/grad_norm": 1.0}
    shown = columns(supervised)
    assert header(supervised, 4, shown).plain.split() == ["step", "loss", "valid", "train", "s", "grad"]
    assert row(1, supervised, 4, shown).plain.split()[2] == "1.500"
    partial = {"reward/mean": 0.4, "reward/validation": 0.5}
    shown = columns(partial)
    assert header(partial, 4, shown).plain.split() == ["step", "reward", "valid"], "neither right nor wrong"
    assert row(1, partial, 4, shown).plain.split() == ["1", "0.400", "0.500"]
    synced = {"reward/mean": 0.4, "time/sync_s": 1.0}
    titles = header(synced, 4, columns(synced, shown)).plain.split()
    assert titles == ["step", "reward", "valid", "sync", "s"], "of a sync every other step"


def test_columns_are_by_algorithm_and_their_form_is_by_unit():
    preference = {"train/loss": 0.7, "accuracy/train": 0.5, "dpo/reward_margin": 0.1, "time/train_s": 12.0}
    shown = columns(preference)
    titles = header(preference, 4, shown).plain.split()
    assert titles == ["step", "loss", "acc", "margin", "valid", "train", "s"]
    assert row(1, preference, 4, shown).plain.split() == ["1", "0.700", "50.0%", "0.100", "·", "12.0"]
    distilled = {"reward/mean": 1.0, "distill/reverse_kl_nats": 0.2, "policy/entropy_nats": 1.0}
    assert row(1, distilled, 4, columns(distilled)).plain.split()[-1] == "0.200"


def test_every_column_is_of_metrics_in_the_table():
    known = {one["key"] for chart in metrics_table()["chart"] for one in chart["metrics"]}
    keys = [key for one in metrics_table()["column"] for key in one["metrics"]]
    assert len(keys) > 10
    assert [key for key in keys if not any(fnmatchcase(key, one) for one in known)] == []


def test_accuracy_at_one_end_alone_gives_way_to_the_reward():
    values = {"accuracy_before": 0.0, "validation_before": 0.0, "validation_after": 0.4}
    assert "accuracy" not in panel_text(values)
    assert "held-out reward" in panel_text(values)
    right = {**values, "accuracy_after": 0.4}
    assert "accuracy" in panel_text(right)
    assert "held-out reward" not in panel_text(right)


def test_completions_cannot_draw_on_the_screen():
    assert visible("a\r\nb\x1b[2Jc\td") == "a⏎b\\x1b[2Jc\\td"


@pytest.mark.parametrize(
    ("values", "title"),
    [({}, " done "), ({"interrupted": True}, " stopped "), ({"error": "no room", "steps": 3}, " failed ")],
)
def test_the_panel_says_how_the_run_ended(values, title):
    assert summary_panel(values).title.plain == title


def panel_text(values):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(summary_panel(values))
    return console.export_text()


def test_the_panel_says_what_to_try_where_there_is_advice():
    assert "advice" not in panel_text({"steps": 3})
    assert "advice   30% of it waits\\x1b[2J: a judge; try: this" in panel_text(
        {"advice": "30% of it waits\x1b[2J: a judge; try: this"}
    )


def test_the_panel_of_a_failed_run_begins_with_the_reason_and_leaves_out_what_was_not_reached():
    text = panel_text(
        {"error": "the judge\x1b[2J is down", "phase_s": {"generate": 0.0, "train": 0.0}, "steps": 0}
    )
    assert text.splitlines()[2].split("│")[1].split() == ["failed", "the", "judge\\x1b[2J", "is", "down"]
    assert "per step" not in text


def test_the_panel_says_what_went_wrong_beside_the_steps_and_what_validation_and_saving_took():
    text = panel_text(
        {
            "unscored_prompts": 3.0, "sync_failures": 1.0, "fenced_members": 2.0, "beside_s": {"save": 1200.0, "validate": 0.1},
            "lost_replicas": ["replica 0: begin: took longer than 3 s", "replica 1: no answer within 60 s"],
        }
    )  # fmt: skip
    rows = {
        words[0]: words[1]
        for line in text.splitlines()
        if len(words := line.strip("│ ").split("   ", 1)) == 2
    }
    assert {label: said.strip() for label, said in rows.items()} == {
        "not scored": "3 held-out prompts",
        "in syncs": "1 failed and tried again, 2 without a replica",
        "lost replicas": "2; the newest:",
        "beside steps": "save 20:00",
    }
    assert "replica 1: no answer within 60 s" in text
    assert "in syncs" not in panel_text(
        {"sync_failures": 0.0, "fenced_members": 0.0, "unscored_prompts": 0.0}
    )


def test_the_panel_says_how_many_groups_were_dropped_and_why():
    drops = {"reward_raised": 40.0, "reward_none_applies": 4.0, "failed": 0.0}
    text = panel_text({"dropped_groups": drops, "trained_groups": 16})
    assert "44 groups for 16 trained: reward raised 40, reward none applies 4" in text
    assert "dropped" not in panel_text({"dropped_groups": {"failed": 0.0}, "trained_groups": 16})
