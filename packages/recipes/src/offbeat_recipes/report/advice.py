"""What a person would say of a run's figures. A rule that has fewer than `ENOUGH` steps with its metrics says nothing."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from statistics import fmean, median, variance
from typing import TYPE_CHECKING

from offbeat_recipes.report.collect import STEP_PHASES, collect_figures
from offbeat_recipes.settings.reading import flatten

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from offbeat_recipes.report.collect import Run

ENOUGH = 12  # whether a reward rises needs twice as many
_BY_PHASE = {
    "generate": "raise rollout.num_replicas",
    "reward": "raise reward.concurrency",
    "train": "raise engine.num_ranks",
    "sync": "raise sync.bucket_mib",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What is seen, what it usually means, and what to do with which setting of the run; empty where that has none of the rule's."""

    seen: str
    means: str
    setting: str


def advice(run: Run) -> list[Advice]:
    """Return what the `RULES` say of `run`, the gravest first."""
    return [found for rule in RULES if (found := rule(run)) is not None]


def first_advice(folder: Path) -> dict[str, str]:
    """Return the first advice on the run in `folder` as a line, by its label; nothing where no rule speaks."""
    found = advice(collect_figures(folder))
    lines = [f"{one.seen}: {one.means}" + (f"; try: {one.setting}" if one.setting else "") for one in found]
    more = f" ({len(lines) - 1} more in the report)" if lines[1:] else ""
    return {"advice": lines[0] + more} if lines else {}


def stalled(run: Run) -> Advice | None:
    """A deadline ended the run."""
    error = str(run.summary.get("error", ""))
    cause = "a process hangs (logs/ has what it did last), or is slower than the deadline"
    words = f"the run ended: {error.partition(';')[0]}", cause, "raise trainer.step_timeout_s"
    return _say(run, *words) if "step_timeout_s" in error else None


def slower(run: Run) -> Advice | None:
    """Late steps take twice as long as early ones."""
    early, late = _ends(_seconds(run, *STEP_PHASES))
    if late < 2 * early or not early:
        return None
    seen = f"a step takes {late:.3g} s, and took {early:.3g} s at first"
    short, long = _ends(_values(run, "completion/length_mean"))
    if long >= 1.5 * short > 0:
        cause = f"completions grew from {short:.0f} to {long:.0f} tokens"
        return _say(run, seen, cause, "lower sampling.max_tokens")
    ends = {name: _ends(_seconds(run, name)) for name in STEP_PHASES}
    phase = max(ends, key=lambda name: ends[name][1] - ends[name][0])
    return _say(run, seen, f"completions did not grow, {phase} did", _BY_PHASE[phase])


def without_spread(run: Run) -> Advice | None:
    """Most groups have one reward, or were left out for it; not where the task was learned meanwhile."""
    rewards, trained = _values(run, "reward/mean"), _values(run, "buffer/consumed_groups")
    left_out = sum(max(_values(run, key), default=0) for key in run.series if "/left_out_" in key)
    _, flat = _ends(_values(run, "group/zero_variance_fraction"))
    is_learned = rewards and _solved(run, rewards[-3:]) and not _solved(run, rewards[:3])
    if trained and left_out >= 2 * trained[-1] > 0:
        seen = f"the algorithm left out {left_out:.0f} groups for {trained[-1]:.0f} that were trained"
    elif flat > 0.8 and not is_learned:
        seen = f"in {flat:.0%} of groups all completions have one reward"
    else:
        return None
    degree = "easy" if _solved(run, rewards) else "hard"
    cause = f"prompts are too {degree}: take others, or more completions of each"
    return _say(run, seen, cause, "raise trainer.group_size")


def level_reward(run: Run) -> Advice | None:
    """The last quarter's reward is not a standard error above that of the one before, and there is more to get."""
    rewards = _values(run, "reward/mean")
    quarter = len(rewards) // 4
    parts = rewards[:quarter], rewards[-2 * quarter : -quarter], rewards[-quarter:]
    if len(rewards) < 2 * ENOUGH or _solved(run, parts[2]) or without_spread(run) is not None:
        return None
    (first, before, last), error = map(fmean, parts), sqrt(sum(map(variance, parts[1:])) / quarter)
    early, late = _ends(_values(run, "policy/entropy_nats"))
    seen = f"the mean reward of the last {quarter} steps is {last:.3g}, of those before {before:.3g}"
    if last > before + error:
        return None
    if late < 0.1 * early:
        cause = f"entropy fell from {early:.2g} to {late:.2g} nats: nothing new is tried"
        return _say(run, seen, cause, "raise algorithm.entropy_coef", "raise sampling.temperature")
    if last < before - 3 * error:
        return _say(run, seen, "it falls: updates are too large", "lower engine.optimizer.lr")
    if before > first + 3 * error:
        return _say(run, seen, "it no longer rises: steps are too noisy", "raise trainer.prompts_per_step")
    return _say(run, seen, "it never rose: updates are too small", "raise engine.optimizer.lr")


def aged(run: Run) -> Advice | None:
    """In steps of older tokens log-probs are 0.05 nats apart or more, and twice as far as in those of fresher ones."""
    series = (run.series.get(key, []) for key in ("staleness/mean", "mismatch/mean_abs_logprob_diff"))
    pairs = [
        (age, apart) for age, apart in zip(*series, strict=False) if age is not None and apart is not None
    ]
    pairs.sort(key=lambda pair: pair[0])
    youngest, oldest = _ends([age for age, _ in pairs])
    fresh, old = _ends([apart for _, apart in pairs])
    if youngest == oldest or old < max(0.05, 2 * fresh):
        return None
    seen = f"sampler and trainer are {old:.2g} nats apart in steps of older tokens, {fresh:.2g} in others"
    cause = "the mismatch grows with age: the policy moves too far while tokens wait"
    return _say(run, seen, cause, "lower mode.max_staleness", "lower engine.optimizer.lr")


def slow_scoring(run: Run) -> Advice | None:
    """A quarter of the time goes by in waiting for rewards alone."""
    share = _share(run, "reward")
    seen = f"the trainer waited {share:.0%} of the steps' time for rewards alone"
    cause = "a judge, or another slow reward, holds everything up"
    return _say(run, seen, cause, _BY_PHASE["reward"]) if share >= 0.25 else None


def starved(run: Run) -> Advice | None:
    """Half of the time goes into generation, whose replicas have a quarter of the requests that they can run at once."""
    share, groups = _share(run, "generate"), _values(run, "buffer/running_groups")
    settings = flatten(run.config)
    names = ("trainer.group_size", "rollout.max_num_seqs", "rollout.num_replicas")
    size, most, replicas = (value if isinstance(value := settings.get(name), int) else 0 for name in names)
    requests = size * median(groups[len(groups) // 2 :]) if groups else 0
    seen = f"generation takes {share:.0%} of the steps' time, at {requests:.0f} of {most * replicas} requests"
    cause = "replicas are starved of prompts: more at once take hardly longer"
    words = seen, cause, "raise mode.max_staleness", "raise trainer.prompts_per_step"
    return _say(run, *words) if share >= 0.5 and 0 < 4 * requests <= most * replicas else None


def headroom(run: Run) -> Advice | None:
    """Replicas of an asynchronous run idle for 30 % of the time or more."""
    idle, settings = _values(run, "idle/generation_fraction"), flatten(run.config)
    if settings.get("mode.name") in (None, "sync") or not idle or idle[-1] < 0.3:
        return None
    seen = f"nothing was generated for {idle[-1]:.0%} of the time"
    cause = "replicas have headroom: they wait for training"
    is_one = settings.get("rollout.num_replicas") == 1
    return _say(run, seen, cause, "raise engine.num_ranks" if is_one else "lower rollout.num_replicas")


RULES = (stalled, slower, without_spread, level_reward, aged, slow_scoring, starved, headroom)


def _say(run: Run, seen: str, means: str, *choices: str) -> Advice:
    """Return the advice with the first of `choices`, each a verb and a setting, that the run has."""
    settings = flatten(run.config)
    found = [f"{one} (now {settings[path]})" for one in choices if (path := one.split()[1]) in settings]
    return Advice(seen=seen, means=means, setting=found[0] if found else "")


def _values(run: Run, key: str) -> list[float]:
    values = [value for value in run.series.get(key, []) if value is not None]
    return values if len(values) >= ENOUGH else []


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the medians of the first and the last quarter; zeros where the values are too few to say."""
    quarter = len(values) // 4
    return (median(values[:quarter]), median(values[-quarter:])) if len(values) >= ENOUGH else (0.0, 0.0)


def _seconds(run: Run, *phases: str) -> list[float]:
    """Return the seconds of `phases` in each step."""
    columns = [run.series[key] for name in phases if (key := f"time/{name}_s") in run.series]
    return [sum(value or 0.0 for value in step) for step in zip(*columns, strict=True)]


def _share(run: Run, phase: str) -> float:
    """Return the part of the time of the last half of the steps."""
    spent, total = (sum(_seconds(run, *names)[len(run.steps) // 2 :]) for names in ([phase], STEP_PHASES))
    return spent / total if total and len(run.steps) >= ENOUGH else 0.0


def _solved(run: Run, rewards: Sequence[float]) -> bool:
    """Say whether the mean of `rewards` is within a tenth of the best that a completion got, of what there was to get."""
    best, worst = max(_values(run, "reward/max"), default=0.0), min([0.0, *_values(run, "reward/mean")])
    return bool(rewards) and best > worst and fmean(rewards) >= best - 0.1 * (best - worst)
