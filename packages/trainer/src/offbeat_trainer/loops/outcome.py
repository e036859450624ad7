"""What a run comes to, kept up to date as it goes, and the bookkeeping at the end of each step."""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from offbeat_trainer.algorithms.advantages import advantages_of
from offbeat_trainer.data.assemble import accuracy, group_metrics, staleness_metrics
from offbeat_trainer.data.metrics import Last, Max, Mean, Metric, Sum, reduce_metrics
from offbeat_trainer.data.types import due, version_of
from offbeat_trainer.errors import GroupFailed
from offbeat_trainer.loops.producer import RETRIED, tried_again
from offbeat_trainer.loops.run_store import RunState
from offbeat_trainer.rollouts.single import run_all, sampling_params
from offbeat_trainer.watch.fanout import progress_of
from offbeat_trainer.watch.jsonl import KeepsTrajectories

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat_ckptsync import SyncReport
    from offbeat_engine import TrainBatch
    from offbeat_trainer.config import LoopConfig
    from offbeat_trainer.data.interface import OfflinePolicy, Policy
    from offbeat_trainer.data.types import Group, Score
    from offbeat_trainer.loops.run_store import RunStore
    from offbeat_trainer.loops.session import Session
    from offbeat_trainer.watch.watchdog import PhaseClock

log = logging.getLogger(__name__)

STEP_PHASES = ("generate", "reward", "train", "sync")
ACCURACY = "accuracy/validation"
VALIDATION = "reward/validation"
DROPPED = "buffer/dropped_"  # metrics that count, by reason; see `GroupStream.metrics`
LEFT_OUT = "buffer/left_out_"
NUM_SHOWN = 4
FEW_STEPS = 5
_APART_NATS = 0.3  # a token in the mean; rounding in bfloat16 comes to 0.01, by flipped experts to 0.05
_KEPT = [item.name for item in fields(RunState) if item.name != "step"]
FORGET_EVERY = 20
"""Steps between two clearances of the journal where no checkpoint clears it."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a run came to. `steps` counts all that were done, `steps_here` those of this process.

    `max_abs_logprob_diff`, sampler against trainer, is that of steps whose tokens were all made by the weights they trained; None
    where there were none. `tokens` are generated ones; `step_s` is the time of the four phases of a step, without validation and saving.
    """

    steps: int = 0
    steps_here: int = 0
    interrupted: bool = False
    accuracy_before: float | None = None
    accuracy_after: float | None = None  # the newest validation
    validation_before: float | None = None  # the mean reward of held-out prompts
    validation_after: float | None = None
    loss_before: float | None = None  # of held-out rows, where a run learns from written ones
    loss_after: float | None = None
    reward_first: float | None = None  # the mean of the run's first steps, `FEW_STEPS` at most
    reward_last: float | None = None  # that of the last ones
    last_rewards: list[float] = field(default_factory=list[float])
    algorithm_state: dict[str, float] = field(
        default_factory=dict[str, float]
    )  # `Algorithm.state` of the next step
    max_abs_logprob_diff: float | None = None
    is_told: bool = False  # that the two do not run the same model
    warmup_s: float = 0.0
    tokens: float = 0.0
    step_s: float = 0.0
    phase_s: dict[str, float] = field(default_factory=dict[str, float])
    trained_groups: int = 0  # of this process
    dropped_groups: dict[str, float] = field(
        default_factory=dict[str, float]
    )  # since the run began, by reason
    left_out_groups: dict[str, float] = field(default_factory=dict[str, float])  # by the algorithm, as above
    unscored_completions: float = 0  # of trained groups, of this process
    unscored_prompts: float = 0  # held-out ones, of all validations of this process
    sync_failures: float = 0  # tries that failed before one that did not
    fenced_members: float = 0  # replicas that syncs went on without, counted each time
    lost_replicas: list[str] = field(default_factory=list[str])  # each loss with its reason
    syncs: int = 0
    sync_gb_per_s: float = 0.0  # the sum over `syncs`
    where_time_went: str | None = None  # the largest cause of idle time, in a sentence

    def go_on(self, state: RunState) -> None:
        """Take over what was reached when `state` was saved: a run that has no step left to do has come to that."""
        for name in _KEPT:
            setattr(self, name, getattr(state, name))

    def take(self, step: int, values: dict[str, float], seconds: dict[str, float]) -> None:
        """Take in one finished step: its reduced metrics and the seconds of its phases."""
        self.steps = step + 1
        self.steps_here += 1
        reward = values["reward/mean"]
        self.last_rewards = [*self.last_rewards, reward][-FEW_STEPS:]
        self.reward_last = math.fsum(self.last_rewards) / len(self.last_rewards)
        if self.reward_first is None or self.steps == len(self.last_rewards):
            self.reward_first = self.reward_last
        self.tokens += values["tokens/generated"]
        self.take_seconds(seconds)
        if not values.get("staleness/max"):  # of older tokens it is mostly their age
            self._compare(step, values)
        self.dropped_groups, self.left_out_groups = _by_reason(values, DROPPED), _by_reason(values, LEFT_OUT)
        if "sync/gb_per_s" in values:  # not every step of an asynchronous run has a sync
            self.syncs += 1
            self.sync_gb_per_s += values["sync/gb_per_s"]
        self.take_mishaps(values)

    def take_validation(self, values: dict[str, float]) -> None:
        """Take in the newest validation."""
        self.accuracy_after, self.validation_after = values.get(ACCURACY), values.get(VALIDATION)

    def take_mishaps(self, values: dict[str, float]) -> None:
        """Count what went wrong in rewards, syncs and validations and did not end the run."""
        self.sync_failures += values.get("sync/failures", 0)
        self.fenced_members += values.get("sync/fenced_members", 0)
        self.unscored_completions += values.get("buffer/unscored_completions", 0)
        self.unscored_prompts += values.get("validation/unscored_prompts", 0)

    def _compare(self, step: int, values: dict[str, float]) -> None:
        """Take in how far sampler and trainer are apart where both had the same weights; say once where that is no rounding."""
        diff, mean = (values.get(f"mismatch/{name}_abs_logprob_diff") for name in ("max", "mean"))
        if diff is not None:
            self.max_abs_logprob_diff = Max(diff).join(Max(self.max_abs_logprob_diff or 0.0)).value()
        if mean is not None and not mean <= _APART_NATS and not self.is_told:
            self.is_told = True
            log.warning(
                "step %d: for the same weights and tokens the log-probs of sampler and trainer are %.2g nats apart in the mean, which is "
                "no rounding: they do not run the same model, and what is learned is not what was sampled. Try `rollout=hf`, which holds "
                "itself against the model's plain forward, and look the model up in docs/families.md",
                step,
                mean,
            )

    def take_seconds(self, seconds: dict[str, float]) -> None:
        """Take in how long the phases of a step took."""
        self.step_s += sum(seconds.get(name, 0.0) for name in STEP_PHASES)
        for name, value in seconds.items():
            self.phase_s[name] = self.phase_s.get(name, 0.0) + value

    def summary(self) -> dict[str, object]:
        """Return the figures of the run, JSON-ready; means are per step of this process."""
        steps = max(self.steps_here, 1)
        return {
            "steps": self.steps,
            "interrupted": self.interrupted,
            "accuracy_before": self.accuracy_before,
            "accuracy_after": self.accuracy_after,
            "validation_before": self.validation_before,
            "validation_after": self.validation_after,
            "loss_before": self.loss_before,
            "loss_after": self.loss_after,
            "reward_first": self.reward_first,
            "reward_last": self.reward_last,
            "tokens_per_s": self.tokens / self.step_s if self.tokens and self.step_s else None,
            "phase_s": {name: self.phase_s.get(name, 0.0) / steps for name in STEP_PHASES},
            "beside_s": {name: value for name, value in self.phase_s.items() if name not in STEP_PHASES},
            "sync_gb_per_s": self.sync_gb_per_s / self.syncs if self.syncs else None,
            "trained_groups": self.trained_groups,
            "dropped_groups": self.dropped_groups,
            "left_out_groups": self.left_out_groups,
            "unscored_completions": self.unscored_completions,
            "unscored_prompts": self.unscored_prompts,
            "sync_failures": self.sync_failures,
            "fenced_members": self.fenced_members,
            "lost_replicas": self.lost_replicas,
            "max_abs_logprob_diff": self.max_abs_logprob_diff,
            "warmup_s": self.warmup_s,
            "where_time_went": self.where_time_went,
        }


def _by_reason(values: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return the metrics that begin with `prefix`, by the reason in their names."""
    return {
        key.removeprefix(prefix).removesuffix("_groups"): value
        for key, value in values.items()
        if key.startswith(prefix)
    }


async def open_run(session: Session, outcome: Outcome, start: int) -> None:
    """Begin a run with step `start`, whose weights the policy holds: publish and validate.

    Nothing is saved: what a run starts from is there already, and one that is killed before its first checkpoint starts from it.
    """
    clock = session.clock()
    session.algorithm = session.algorithm.at(outcome.algorithm_state)
    outcome.steps = start
    outcome.lost_replicas = (
        session.timeline.lost
    )  # the list that grows: a run may end in the middle of a step
    with clock.phase("sync", "first weights to every replica"):
        report = await session.publisher.publish(version_of(start))
    outcome.take_mishaps(reduce_metrics(sync_metrics(report)))
    if outcome.validation_before is None:
        before = reduce_metrics(await validate(session, start, "before", clock))
        outcome.accuracy_before, outcome.validation_before = before.get(ACCURACY), before.get(VALIDATION)
        outcome.take_mishaps(before)
        _take_beside(outcome, clock)
    session.stop.listening = True


def keep_trajectories(session: Session, step: int, groups: Sequence[Group], batch: TrainBatch) -> None:
    """Tell those that keep trajectories what step `step` trained: `groups`, of which `batch` was made."""
    if isinstance(session.reporter, KeepsTrajectories):
        advantages = advantages_of(groups, batch)
        session.reporter.trajectories(step + 1, groups, session.task.decode, advantages)


async def close_step(
    session: Session,
    outcome: Outcome,
    clock: PhaseClock,
    step: int,
    groups: Sequence[Group],
    trained: Sequence[Metric],
) -> bool:
    """End step `step`: join its metrics, validate, show, report and save what the calendar says is due.

    Returns whether the run ends here: a stop was asked for, and the checkpoint to go on from is written.
    """
    done = step + 1
    metrics = [*group_metrics(groups), *staleness_metrics(groups, version_of(step)), *trained]
    dropped_before = sum(outcome.dropped_groups.values())
    values = reduce_metrics(metrics)
    session.algorithm = session.algorithm.after(values)
    outcome.take(step, values, clock.seconds)
    if "validation/version" in values:  # made beside earlier steps
        outcome.take_validation(values)
    outcome.trained_groups += len(groups)
    outcome.algorithm_state = dict(session.algorithm.state)
    dropped = sum(outcome.dropped_groups.values()) - dropped_before
    if dropped > len(groups):  # what is left is chosen by what failed
        words = (
            f"step {done} dropped {dropped:.0f} groups and trained {len(groups)}; the log names the reasons"
        )
        log.warning("%s", words)
        session.reporter.phase("dropped", words)
    outcome.where_time_went = session.timeline.sentence()
    last = done == session.loop.steps
    metrics += await _validate_if_due(session, outcome, clock, done)
    if due(done, session.loop.sample_every):
        show(session, done, "sampled", groups)
    session.reporter.metrics(done, [*metrics, *clock.metrics()])
    ends = session.stop.due
    await _save_if_due(session, outcome, clock, block=ends or last)
    _take_beside(outcome, clock)
    outcome.interrupted = ends and not last
    return ends


async def _validate_if_due(session: Session, outcome: Outcome, clock: PhaseClock, done: int) -> list[Metric]:
    """Validate after a step where the calendar says so; return what came out, or nothing where that goes on beside the next steps."""
    last = done == session.loop.steps
    if not last and not due(done, session.loop.validate_every):
        return []
    if session.beside and not validates_at_once(session.loop, done) and not session.stop.requested:
        session.beside(validate(session, done))
        return []
    metrics = await validate(session, done, "after" if last else "", clock)
    found = reduce_metrics(metrics)
    outcome.take_validation(found)
    outcome.take_mishaps(found)
    return metrics


async def _save_if_due(session: Session, outcome: Outcome, clock: PhaseClock, *, block: bool) -> None:
    """Save after a step where the calendar says so, or where the run ends (`block`: nothing follows that would wait for it)."""
    done, every = outcome.steps, session.loop.save_every
    if due(done, every) or session.stop.due or (block and every):
        with clock.phase("save"):
            await asyncio.to_thread(session.journal.flush)  # a checkpoint stands on what its steps took
            await save(session.store, session.policy, outcome, block=block)
            await asyncio.to_thread(session.journal.forget, session.store.oldest())
    elif not every and due(done, FORGET_EVERY):
        # Without checkpoints these tokens would never be trained again.
        await asyncio.to_thread(session.journal.forget, done)


def _take_beside(outcome: Outcome, clock: PhaseClock) -> None:
    """Take in what validation and saving took."""
    outcome.take_seconds({name: value for name, value in clock.seconds.items() if name not in STEP_PHASES})


async def save(store: RunStore, policy: Policy | OfflinePolicy, outcome: Outcome, *, block: bool) -> None:
    """Write what `resume=auto` continues from. The state goes first: only a whole checkpoint makes it count.

    Without `block` the checkpoint becomes whole beside the next steps; until then a run goes on from the one before.
    """
    store.save(RunState(step=outcome.steps, **{name: getattr(outcome, name) for name in _KEPT}))
    await policy.save(outcome.steps, block=block)


async def validate(
    session: Session, step: int, title: str = "", clock: PhaseClock | None = None
) -> list[Metric]:
    """Return accuracy and mean reward of greedy completions of held-out prompts under the weights now served; `title` shows some.

    With a `clock` the loop waits for it; without one steps go on beside it.

    Prompts without a score are left out of both, and counted. Where no prompt gets one nothing is measured, and the run goes on:
    a judge that is down for a minute ends no training. Empty where no prompts are held out.
    """
    prompts = session.held_out
    if not prompts:
        return []
    greedy = replace(sampling_params(session.sampling, session.task, session.seed, step), temperature=0.0)
    groups: list[Group] = []
    progress = None if clock is None else progress_of(session.reporter)
    why = "the log names the reasons"
    with (
        nullcontext()
        if clock is None
        else clock.phase("validate", f"{len(prompts)} held-out prompts, greedy")
    ):
        try:
            groups = await tried_again(
                lambda: run_all(session.rollout, prompts, greedy, 1, progress),
                session.asynchrony.max_attempts,
            )
        except (GroupFailed, *RETRIED) as error:
            why = f"{type(error).__name__}: {error}"
            log.warning("validation after step %d measured nothing: %s", step, why)
    unscored = len(prompts) - len(groups)
    if unscored:
        session.reporter.phase(
            "validate", f"{unscored} of {len(prompts)} held-out prompts got no score and do not count: {why}"
        )
    metrics = [Metric("validation/unscored_prompts", Sum(unscored))]
    if not groups:
        return metrics
    if title:
        show(session, step, title, groups)
    sets = {f"_{name}": by_set for name, by_set in held_out_sets(groups).items()}
    for name, scores in {"": [group.scores[0] for group in groups], **sets}.items():
        metrics += accuracy(f"{ACCURACY}{name}", scores)
        metrics.append(
            Metric(f"{VALIDATION}{name}", Mean(math.fsum(one.reward for one in scores), len(scores)))
        )
    return metrics


def held_out_sets(groups: Sequence[Group]) -> dict[str, list[Score]]:
    """Return the scores of held-out prompts by the validation set they are of; empty where the task has no more than one."""
    names = dict.fromkeys(group.prompt.held_out for group in groups if group.prompt.held_out)
    return {
        name: [score for group in groups if group.prompt.held_out == name for score in group.scores]
        for name in names
    }


def show(session: Session, step: int, title: str, groups: Sequence[Group]) -> None:
    """Hand a few groups with their texts to the reporter."""
    some = list(groups[:NUM_SHOWN])
    texts = [[session.task.decode(one.token_ids.tolist()) for one in group.trajectories] for group in some]
    session.reporter.samples(step, title, some, texts)


def sync_metrics(report: SyncReport) -> list[Metric]:
    """Return a weight sync in metrics."""
    gap = [] if report.worst_gap_s is None else [Metric("sync/worst_gap_s", Mean(report.worst_gap_s))]
    return [
        *gap,
        Metric("sync/failures", Sum(len(report.failures))),
        Metric("sync/version", Last(report.version)),
        Metric("sync/gb_per_s", Mean(report.gb_per_s)),
        Metric("sync/bytes", Sum(report.num_bytes)),
        Metric("sync/pause_s", Mean(report.pause_s)),
        Metric("sync/transfer_s", Mean(report.transfer_s)),
        Metric("sync/verify_s", Mean(report.verify_s)),
        Metric("sync/flip_s", Mean(report.flip_s)),
        Metric("sync/fenced_members", Sum(len(report.fenced))),
    ]


def validates_at_once(loop: LoopConfig, done: int) -> bool:
    """Say whether the loop waits for the validation after `done` steps, even where it runs on: so few are left."""
    return done == loop.steps or (done + 1 == loop.steps and due(done, loop.validate_every))
