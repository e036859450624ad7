"""Each rule speaks of the cause that is planted for it, and of no other; a run that goes well gets no advice."""

import ast
import json
import math
import random
import re
from pathlib import Path

import pytest

from offbeat_recipes.report import advice as module
from offbeat_recipes.report.advice import ENOUGH, RULES, Advice, advice, first_advice
from offbeat_recipes.report.build import report_data
from offbeat_recipes.report.collect import Run, collect
from offbeat_recipes.settings.reading import all_settings, known_paths

STEPS = 48
ASYNC = {"mode": {"name": "fully_async", "max_staleness": 4}, "trainer": {"group_size": 16}}
PATH = re.compile(r"\b(?:[a-z]+\.)+[a-z_]+\b")


def noise(step, size=1.0):
    return size * random.Random(step).uniform(-1, 1)


def steadily(value, size=0.1):
    """Return a metric about `value`."""
    return lambda step: value * (1 + noise(step, size))


def learning(step):
    return 0.97 - 0.5 * math.exp(-step / 10) + noise(step, 0.02)


# The shape of the demo's 50 steps in mode=fully_async, and of others of its kind.
HEALTHY = {
    "reward/mean": learning,
    "reward/max": lambda step: 1.0,
    "group/zero_variance_fraction": lambda step: min(0.75, 0.1 + step / 60) + noise(step, 0.1),
    "policy/entropy_nats": lambda step: 0.4 * math.exp(-step / 30),
    "completion/length_mean": steadily(20),
    "time/generate_s": steadily(0.25, 0.9),
    "time/reward_s": steadily(0.01),
    "time/train_s": steadily(0.22, 0.3),
    "time/sync_s": steadily(0.0003),
    "idle/generation_fraction": lambda step: 0.04 + 0.4 / step,
    "idle/trainer_fraction": lambda step: 0.5 + 0.3 / step,
    "buffer/ready_groups": lambda step: step % 12,
    "buffer/running_groups": lambda step: max(0, min(28 - step % 12, 16 * (STEPS - step))),
    "buffer/consumed_groups": lambda step: 16 * step,
    "buffer/left_out_no_spread_groups": lambda step: step,
    "staleness/mean": lambda step: 0.0 if step == 1 else 1.2 + noise(step, 0.4),
    "mismatch/mean_abs_logprob_diff": lambda step: 1e-7 if step == 1 else 0.005 * (1 + noise(step, 0.9)),
}


def slowly(step):
    return 0.5 if step < STEPS / 2 else 1.5


def up_to(level, step):
    """Rise to `level` within the first half, and stay there."""
    return level * min(1.0, step / (STEPS / 2)) + noise(step, 0.02)


PLANTED = [
    pytest.param(
        {"time/train_s": slowly}, "slower", "train did", "raise engine.num_ranks (now 1)", id="train"
    ),
    pytest.param({"time/sync_s": slowly}, "slower", "sync did", "raise sync.bucket_mib", id="sync"),
    pytest.param(
        {"time/generate_s": slowly, "completion/length_mean": lambda step: 100 * slowly(step)},
        "slower",
        "completions grew from 50 to 150 tokens",
        "lower sampling.max_tokens",
        id="longer",
    ),
    pytest.param(
        {
            "reward/mean": lambda step: 0.02 + noise(step, 0.01),
            "group/zero_variance_fraction": steadily(0.93, 0.02),
        },
        "without_spread",
        "in 93% of groups all completions have one reward: prompts are too hard",
        "raise trainer.group_size (now 16)",
        id="too hard",
    ),
    pytest.param(
        {"reward/mean": steadily(0.97, 0.02), "group/zero_variance_fraction": steadily(0.93, 0.02)},
        "without_spread",
        "prompts are too easy",
        "raise trainer.group_size",
        id="too easy",
    ),
    pytest.param(
        {"buffer/left_out_no_spread_groups": lambda step: 48 * step},
        "without_spread",
        "left out 2304 groups for 768 that were trained",
        "raise trainer.group_size",
        id="left out",
    ),
    pytest.param(
        {"reward/mean": lambda step: up_to(0.5, step)},
        "level_reward",
        "is 0.498, of those before 0.497: it no longer rises",
        "raise trainer.prompts_per_step",
        id="level",
    ),
    pytest.param(
        {"reward/mean": lambda step: 0.3 + noise(step, 0.05)},
        "level_reward",
        "it never rose",
        "raise engine.optimizer.lr",
        id="never rose",
    ),
    pytest.param(
        {"reward/mean": lambda step: up_to(0.6, step) - max(0, step - 36) / 30},
        "level_reward",
        "it falls",
        "lower engine.optimizer.lr",
        id="falls",
    ),
    pytest.param(
        {
            "reward/mean": lambda step: up_to(0.5, step),
            "policy/entropy_nats": lambda step: 0.5 if step < 20 else 0.004,
        },
        "level_reward",
        "entropy fell from 0.5 to 0.004 nats",
        "raise algorithm.entropy_coef",
        id="entropy",
    ),
    pytest.param(
        {
            "staleness/mean": lambda step: step % 5,
            "mismatch/mean_abs_logprob_diff": lambda step: 1e-3 + 0.04 * (step % 5),
        },
        "aged",
        "0.16 nats apart in steps of older tokens, 0.001 in others: the mismatch grows with age",
        "lower mode.max_staleness (now 4)",
        id="age",
    ),
    pytest.param(
        {"time/reward_s": steadily(0.6)},
        "slow_scoring",
        "a judge, or another slow reward",
        "raise reward.concurrency (now 32)",
        id="judge",
    ),
    pytest.param(
        {"buffer/running_groups": lambda step: 2, "time/generate_s": steadily(0.8)},
        "starved",
        "at 32 of 256 requests: replicas are starved of prompts",
        "raise mode.max_staleness (now 4)",
        id="starved",
    ),
    pytest.param(
        {"idle/generation_fraction": lambda step: 0.45},
        "headroom",
        "nothing was generated for 45% of the time: replicas have headroom",
        "raise engine.num_ranks (now 1)",
        id="headroom",
    ),
]


@pytest.mark.parametrize("settings", [{}, ASYNC, {"mode": {"name": "one_step_off"}}])
@pytest.mark.parametrize("steps", [1, 4, ENOUGH, 25, STEPS])
def test_a_run_that_goes_well_gets_no_advice(make_run, settings, steps):
    folder = make_run("run", settings, metrics=HEALTHY, steps=steps)
    assert advice(collect(folder)) == []
    assert first_advice(folder) == {}


@pytest.mark.parametrize(("planted", "rule", "words", "setting"), PLANTED)
def test_a_planted_cause_is_named_with_its_figure_and_a_setting(make_run, planted, rule, words, setting):
    run = collect(make_run("run", ASYNC, metrics={**HEALTHY, **planted}, steps=STEPS))
    [found] = advice(run)
    assert found == getattr(module, rule)(run)
    assert words in f"{found.seen}: {found.means}"
    assert found.setting.startswith(setting)


def test_a_mismatch_that_grows_with_time_alone_is_not_called_one_of_age(make_run):
    grows = {"mismatch/mean_abs_logprob_diff": lambda step: 0.01 * step}
    for name, age in (("level", lambda step: 1), ("but-one", lambda step: min(1, step - 1))):
        run = collect(make_run(name, ASYNC, metrics={**HEALTHY, **grows, "staleness/mean": age}, steps=STEPS))
        assert advice(run) == []


def test_a_run_that_a_deadline_ended_is_stalled_however_short(make_run):
    folder = make_run()
    error = (
        "nothing has moved for 600 s: the trainer waits; if it was only slow, raise trainer.step_timeout_s"
    )
    (folder / "summary.json").write_text(json.dumps({"error": error}))
    [found] = advice(collect(folder))
    assert found.seen == "the run ended: nothing has moved for 600 s: the trainer waits"
    assert found.setting == "raise trainer.step_timeout_s (now 600.0)"
    (folder / "summary.json").write_text(json.dumps({"error": "a full disk"}))
    assert advice(collect(folder)) == []


def test_each_rule_has_a_cause_that_is_planted():
    assert {rule.__name__ for rule in RULES} == {planted.values[1] for planted in PLANTED} | {"stalled"}


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "rloo", "ppo"])
def test_a_setting_that_is_advised_is_one_of_the_run(make_run, mode, algorithm):
    chosen = {"mode": mode, "algorithm": algorithm}
    known = known_paths({"environment": "none", **chosen})
    run = collect(make_run("run", {section: {"name": name} for section, name in chosen.items()}))
    silent = []
    for planted in PLANTED:
        run.steps = list(range(1, STEPS + 1))
        run.series = {key: [f(at) for at in run.steps] for key, f in {**HEALTHY, **planted.values[0]}.items()}
        found = advice(run)
        paths = [path for one in found for path in PATH.findall(one.setting)]
        assert len(paths) == len(found)
        assert sorted(set(paths) - set(known)) == []
        silent += [] if found else [planted.id]
    assert silent == (["headroom"] if mode == "sync" else [])


def test_settings_that_the_rules_name_exist():
    sections = {item.path.partition(".")[0] for item in all_settings()}
    nodes = ast.walk(ast.parse(Path(module.__file__).read_text()))
    texts = " ".join(str(node.value) for node in nodes if isinstance(node, ast.Constant))
    named = {path for path in PATH.findall(texts) if path.partition(".")[0] in sections}
    assert {"mode.max_staleness", "reward.concurrency", "sync.bucket_mib"} <= named
    assert sorted(named - set(known_paths())) == []


@pytest.mark.parametrize("planted", [one.values[0] for one in PLANTED], ids=[one.id for one in PLANTED])
def test_a_run_too_short_to_say_gets_no_advice(make_run, planted):
    metrics = {**HEALTHY, **planted}
    assert advice(collect(make_run("run", ASYNC, metrics=metrics, steps=ENOUGH - 1))) == []


def test_metrics_that_are_missing_or_not_finite_end_no_rule(make_run):
    assert advice(Run(name="empty")) == []
    keys = {key for planted in PLANTED for key in planted.values[0]} | set(HEALTHY)
    for key in sorted(keys):
        gone = {**HEALTHY, key: lambda step: None}
        assert advice(collect(make_run(key.replace("/", "-"), ASYNC, metrics=gone, steps=STEPS))) == []
    nothing = {key: lambda step: None for key in keys}
    assert advice(collect(make_run("nothing", metrics=nothing, steps=STEPS))) == []


def test_a_run_whose_settings_are_not_known_is_told_what_is_seen(make_run):
    folder = make_run(metrics={**HEALTHY, "time/reward_s": steadily(0.6)}, steps=STEPS)
    (folder / "config.yaml").write_text("- torn")
    [found] = advice(collect(folder))
    assert found == Advice(seen=found.seen, means=found.means, setting="")
    assert "for rewards alone" in found.seen
    assert first_advice(folder) == {"advice": f"{found.seen}: {found.means}"}


def test_the_report_and_the_last_panel_have_it(make_run):
    both = {**HEALTHY, "time/reward_s": steadily(0.6), "idle/generation_fraction": lambda step: 0.5}
    folder = make_run("run", ASYNC, metrics=both, steps=STEPS)
    main, _ = report_data([folder])
    shown = main["runs"][0]["advice"]
    assert [set(one) for one in shown] == [{"seen", "means", "setting"}] * 2
    [(label, line)] = first_advice(folder).items()
    assert label == "advice"
    assert line.startswith(shown[0]["seen"])
    assert line.endswith("; try: raise reward.concurrency (now 32) (1 more in the report)")
    assert "\n" not in line
