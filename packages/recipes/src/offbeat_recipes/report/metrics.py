"""Every metric of a run: its unit, what it means, what is usual, and the chart that shows it.

The report and docs/metrics.md are made from this table; a test holds the metrics of real runs against it. `*` in a key stands
for any characters: the name of a reward, of a phase, of a reason.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Section(StrEnum):
    """The question of the report that a chart helps to answer."""

    LEARN = "learn"
    HEALTH = "health"
    TIME = "time"


class Kind(StrEnum):
    """How a chart is drawn: lines, lines over a logarithmic axis, or areas that add up."""

    LINES = "lines"
    LOG = "log"
    STACK = "stack"


@dataclass(frozen=True, slots=True)
class Known:
    """One metric, or all whose keys fit the pattern `key`.

    `low` and `high` bound what is usual, where that is the same for most runs. Those that are not `drawn` are for other readers.
    """

    key: str
    unit: str
    meaning: str
    low: float | None = None
    high: float | None = None
    drawn: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Metrics that are read together, in one unit; `usual` and `advice` are sentences."""

    title: str
    section: Section
    usual: str
    advice: str = ""
    kind: Kind = Kind.LINES
    metrics: tuple[Known, ...]


CHARTS = (
    Chart(
        title="Reward",
        section=Section.LEARN,
        usual="Rises, steeply at first, then ever more slowly.",
        advice="Flat from the start: look at groups without spread below. Held-out falls while training rises: "
        "the policy learns these prompts by heart, or games the reward; read completions.",
        metrics=(
            Known("reward/mean", "", "mean reward of the step's completions"),
            Known("reward/validation", "", "mean reward of greedy completions of held-out prompts"),
            Known("reward/max", "", "largest reward of the step", drawn=False),
        ),
    ),
    Chart(
        title="Accuracy",
        section=Section.LEARN,
        usual="Rises with the reward; there only where a reward says what is right.",
        advice="Held-out is measured greedily, so it lies above training at the same skill.",
        metrics=(
            Known("accuracy/train", "fraction", "completions of the step that are right"),
            Known("accuracy/validation", "fraction", "greedy completions of held-out prompts that are right"),
        ),
    ),
    Chart(
        title="Reward components",
        section=Section.LEARN,
        usual="All rise, or stay where they are at their best.",
        advice="One falls while another rises: they pull apart; set their weights anew.",
        metrics=(Known("reward/*_mean", "", "mean of one of several rewards, before its weight"),),
    ),
    Chart(
        title="Preference rewards",
        section=Section.LEARN,
        usual="The margin rises; the chosen reward may fall a little.",
        advice="Both fall fast: lower engine.optimizer.lr.",
        metrics=(
            Known("dpo/reward_margin", "nats", "implicit reward of the chosen over the rejected completion"),
            Known("dpo/reward_chosen", "nats", "implicit reward of the chosen completion"),
            Known("dpo/reward_rejected", "nats", "implicit reward of the rejected completion"),
            Known("validation/reward_margin", "nats", "the margin of held-out pairs"),
            Known("validation/reward_chosen", "nats", "the chosen reward of held-out pairs", drawn=False),
            Known("validation/reward_rejected", "nats", "the rejected reward of held-out pairs", drawn=False),
        ),
    ),
    Chart(
        title="Loss",
        section=Section.LEARN,
        usual="Falls where a run learns from written rows. A policy loss stays near 0 and tells nothing of progress.",
        advice="Held-out loss rises while the other falls: stop earlier, or take more rows.",
        metrics=(
            Known("train/loss", "", "what the optimizer lowers, averaged over the step's updates"),
            Known("validation/loss", "", "the loss of held-out rows"),
            Known("critic/loss", "", "the loss of PPO's critic"),
        ),
    ),
    Chart(
        title="KL divergence",
        section=Section.HEALTH,
        usual="Below 0.05 within a step, and 0 with one update per step. Against a reference it rises slowly.",
        advice="Jumps: lower engine.optimizer.lr or trainer.updates_per_step; against a reference raise algorithm.kl_coef.",
        metrics=(
            Known(
                "policy/approx_kl_nats",
                "nats",
                "k3 estimate: policy now, against before this step",
                high=0.05,
            ),
            Known("policy/ref_kl_nats", "nats", "KL of the policy against the reference model"),
            Known(
                "distill/reverse_kl_nats", "nats", "KL of the policy against its teacher, on its own tokens"
            ),
        ),
    ),
    Chart(
        title="Entropy",
        section=Section.HEALTH,
        usual="Falls slowly as the policy grows sure.",
        advice="Falls to 0 while the reward is still low: nothing is tried any more; raise algorithm.clip_high, "
        "algorithm.entropy_coef or sampling.temperature. Rises without end: lower the learning rate.",
        metrics=(Known("policy/entropy_nats", "nats", "mean entropy of the policy at the trained tokens"),),
    ),
    Chart(
        title="Gradient norm",
        section=Section.HEALTH,
        usual="Of one order of magnitude, with single peaks; larger ones are cut to engine.optimizer.max_grad_norm.",
        advice="Grows over many steps: lower engine.optimizer.lr. 0: no group of the step had spread.",
        metrics=(
            Known("train/grad_norm", "", "norm of the gradient before it is cut, averaged over updates"),
            Known("critic/grad_norm", "", "the same of PPO's critic"),
        ),
    ),
    Chart(
        title="Clipped tokens",
        section=Section.HEALTH,
        usual="0 with one update per step, below 20 % with several.",
        advice="More: updates go too far; lower engine.optimizer.lr or trainer.updates_per_step.",
        metrics=(
            Known("policy/clip_low_fraction", "fraction", "tokens whose ratio was cut from below", high=0.2),
            Known("policy/clip_high_fraction", "fraction", "tokens whose ratio was cut from above", high=0.2),
            Known("policy/clip_dual_fraction", "fraction", "tokens cut by the dual clip", high=0.05),
            Known("value/clip_fraction", "fraction", "tokens whose value was cut (PPO)", high=0.3),
        ),
    ),
    Chart(
        title="Sampler against trainer",
        section=Section.HEALTH,
        kind=Kind.LOG,
        usual="For the same weights: mean below 1e-5 in float32, near 1e-2 in bfloat16. For older tokens it holds "
        "what the policy has learned since, too.",
        advice="A mean above 0.05 at staleness 0: the two do not run the same model; try rollout=hf, see docs/families.md.",
        metrics=(
            Known(
                "mismatch/mean_abs_logprob_diff", "nats", "mean difference of log-probs per token", high=0.05
            ),
            Known("mismatch/max_abs_logprob_diff", "nats", "largest difference of log-probs of a token"),
            Known("mismatch/kl_nats", "nats", "k3 estimate of KL(sampler, trainer)", drawn=False),
        ),
    ),
    Chart(
        title="Off-policy weights",
        section=Section.HEALTH,
        usual="The effective share of samples is near 1, and above a half where tokens are old; few weights are cut.",
        advice="Lower: tokens are too old for this learning rate; lower mode.max_staleness or engine.optimizer.lr.",
        metrics=(
            Known("offpolicy/ess_fraction", "fraction", "effective sample size over samples", low=0.5),
            Known("offpolicy/truncated_fraction", "fraction", "weights that were cut to a bound", high=0.2),
            Known("offpolicy/masked_fraction", "fraction", "tokens left out for their weight", high=0.2),
        ),
    ),
    Chart(
        title="Largest ratio",
        section=Section.HEALTH,
        kind=Kind.LOG,
        usual="1 for fresh tokens and one update; below 10 otherwise.",
        advice="Peaks that stay: single tokens drive the update; tighten algorithm.correction_high or clip_high.",
        metrics=(
            Known("policy/ratio_max", "", "largest ratio of a token: policy now over before this step"),
            Known("offpolicy/ratio_max", "", "largest ratio of a token: trainer over sampler"),
            Known("offpolicy/ratio_mean", "", "mean of that ratio", drawn=False),
            Known("offpolicy/ratio_square_mean", "", "mean of its square", drawn=False),
        ),
    ),
    Chart(
        title="Staleness of tokens",
        section=Section.HEALTH,
        kind=Kind.STACK,
        usual="All of age 0 in mode=sync, of age 1 in one_step_off, spread up to mode.max_staleness in fully_async.",
        advice="Most at the bound: generation runs far ahead; lower mode.max_staleness or give training more devices.",
        metrics=(
            Known("staleness/*_fraction", "fraction", "tokens that are so many versions old"),
            Known("staleness/mean", "versions", "mean age of trained tokens", drawn=False),
            Known("staleness/max", "versions", "age of the oldest trained token", drawn=False),
            Known(
                "trajectory/versions_mean", "versions", "versions that made a trajectory, mean", drawn=False
            ),
            Known(
                "trajectory/versions_max", "versions", "versions that made a trajectory, most", drawn=False
            ),
        ),
    ),
    Chart(
        title="Dropped groups",
        section=Section.HEALTH,
        usual="None, or few against those trained. Counted since the run began, by reason.",
        advice="Many: what is trained is chosen by what failed; logs/driver.log names the reasons.",
        metrics=(Known("buffer/dropped_*_groups", "groups", "groups given up for this reason, so far"),),
    ),
    Chart(
        title="Groups without spread",
        section=Section.HEALTH,
        usual="Below a half. All completions of such a group have one reward, and teach nothing.",
        advice="More: prompts are too hard or too easy; take others, a larger trainer.group_size, or a reward of degrees.",
        metrics=(
            Known("group/zero_variance_fraction", "fraction", "groups whose rewards are all equal", high=0.8),
        ),
    ),
    Chart(
        title="Spread of rewards",
        section=Section.HEALTH,
        usual="Falls as the task is learned.",
        advice="Near 0 at a low reward: there is nothing to tell good from bad by.",
        metrics=(Known("reward/std", "", "standard deviation in a group, mean over groups"),),
    ),
    Chart(
        title="Length of completions",
        section=Section.HEALTH,
        usual="Changes slowly; longer is usual where a model learns to reason.",
        advice="Grows to the limit without reward: the policy rambles; collapses: it skips the work.",
        metrics=(
            Known("completion/length_mean", "tokens", "mean sampled tokens of a completion"),
            Known("completion/length_max", "tokens", "most sampled tokens of a completion"),
        ),
    ),
    Chart(
        title="Completions cut off",
        section=Section.HEALTH,
        usual="Below 10 %.",
        advice="More: raise sampling.max_tokens, or reward what ends.",
        metrics=(
            Known("completion/truncated_fraction", "fraction", "cut at sampling.max_tokens", high=0.25),
            Known("completion/aborted_fraction", "fraction", "ended from outside", high=0.05),
            Known(
                "trajectory/out_of_*_fraction", "fraction", "ended by a limit of turns or seconds", high=0.25
            ),
        ),
    ),
    Chart(
        title="Turns",
        section=Section.HEALTH,
        usual="As many as the task needs.",
        advice="At environment.max_turns: raise it, or see what the policy asks again and again.",
        metrics=(
            Known("trajectory/turns_mean", "turns", "mean turns of a trajectory"),
            Known("trajectory/turns_max", "turns", "most turns of a trajectory"),
            Known(
                "trajectory/observed_tokens_mean", "tokens", "tokens that an environment said", drawn=False
            ),
        ),
    ),
    Chart(
        title="Critic",
        section=Section.HEALTH,
        usual="Rises towards 1.",
        advice="Below 0: the critic is worse than a constant; raise its learning rate, or train it longer first.",
        metrics=(
            Known(
                "value/explained_variance",
                "",
                "share of the returns' variance that the critic explains",
                low=0.0,
            ),
            Known("value/mean", "", "mean value of a token", drawn=False),
            Known("value/return_mean", "", "mean return of a token", drawn=False),
            Known("value/*_square", "", "mean square of errors or returns", drawn=False),
            Known("critic/*", "", "the critic's learning rate, micro-batches, tokens", drawn=False),
        ),
    ),
    Chart(
        title="Learning rate",
        section=Section.HEALTH,
        usual="As engine.optimizer.schedule says.",
        metrics=(Known("train/lr", "", "learning rate of the newest update"),),
    ),
    Chart(
        title="Mishaps",
        section=Section.HEALTH,
        usual="0.",
        advice="logs/driver.log says which replica, prompt or sync, and why.",
        metrics=(
            Known("generation/lost_replicas", "replicas", "replicas lost so far in this process", high=0),
            Known("sync/failures", "syncs", "tries of a weight sync that failed", high=0),
            Known("sync/fenced_members", "replicas", "replicas that a sync went on without", high=0),
            Known("validation/unscored_prompts", "prompts", "held-out prompts that got no score", high=0),
        ),
    ),
    Chart(
        title="Memory of training",
        section=Section.HEALTH,
        usual="Level after the first steps.",
        advice="Near the device's: lower engine.micro_batch_tokens, or set engine.activation_checkpointing=true.",
        metrics=(
            Known(
                "memory/train_peak_bytes", "bytes", "most that training held on a device (CPU: the process)"
            ),
        ),
    ),
    Chart(
        title="Of the engine",
        section=Section.HEALTH,
        usual="What the training engine tells of its own.",
        metrics=(Known("engine/*", "", "see the engine's page"),),
    ),
    Chart(
        title="Time of a step, by phase",
        section=Section.TIME,
        kind=Kind.STACK,
        usual="Training and generation share it; a few percent go to the sync.",
        advice="Generation leads: more replicas, or an asynchronous mode. Training leads: more ranks, larger micro-batches.",
        metrics=(
            Known("time/engine_s", "s", "in forward and backward passes", drawn=False),
            Known("time/*_s", "s", "seconds of a step in this phase of the loop"),
        ),
    ),
    Chart(
        title="Speed",
        section=Section.TIME,
        usual="Level after the first steps, which compile and fill caches.",
        metrics=(
            Known(
                "tokens/generated_per_s",
                "tokens/s",
                "tokens generated over the time of the whole step (derived)",
            ),
            Known(
                "time/engine_tokens_per_s", "tokens/s", "tokens of all ranks in forward and backward passes"
            ),
            Known("tokens/generated", "tokens", "tokens sampled for the step", drawn=False),
            Known("train/tokens", "tokens", "tokens of an update's batch", drawn=False),
            Known("train/micro_batches", "", "micro-batches of an update", drawn=False),
        ),
    ),
    Chart(
        title="Arithmetic used",
        section=Section.TIME,
        usual="30 to 50 % for large dense models, less for small ones.",
        advice="Lower: raise engine.micro_batch_tokens.",
        metrics=(
            Known("time/mfu_fraction", "fraction", "share of the GPUs' bfloat16 peak that the model needed"),
        ),
    ),
    Chart(
        title="Idle so far",
        section=Section.TIME,
        usual="In mode=sync the two take turns; asynchronous runs keep the slower side busy.",
        advice="Whoever idles has more devices than it needs.",
        metrics=(
            Known("idle/trainer_fraction", "fraction", "time of the run in which nothing was trained"),
            Known("idle/generation_fraction", "fraction", "time of the run in which nothing was generated"),
        ),
    ),
    Chart(
        title="Weight sync",
        section=Section.TIME,
        usual="Level; the pause, which generation feels, is the smallest.",
        metrics=(
            Known("sync/transfer_s", "s", "weights on their way"),
            Known("sync/verify_s", "s", "comparing digests"),
            Known("sync/flip_s", "s", "changing over, on the slowest replica"),
            Known("sync/pause_s", "s", "what generation felt"),
            Known("sync/worst_gap_s", "s", "longest time between two tokens of an engine around a sync"),
            Known("sync/gb_per_s", "GB/s", "bytes over the time of their transfer", drawn=False),
            Known("sync/bytes", "bytes", "bytes sent", drawn=False),
            Known("sync/version", "", "version that was served after it", drawn=False),
        ),
    ),
    Chart(
        title="Queue of groups",
        section=Section.TIME,
        usual="0 ready in mode=sync. Asynchronous: some ready at all times, so that training never waits.",
        advice="Ready grows: training is the slower side. Always 0: generation is.",
        metrics=(
            Known("buffer/ready_groups", "groups", "scored groups that wait for a step"),
            Known("buffer/running_groups", "groups", "groups being generated or scored"),
            Known("buffer/issued_groups", "groups", "groups begun so far", drawn=False),
            Known("buffer/consumed_groups", "groups", "groups trained so far", drawn=False),
        ),
    ),
)


@cache
def lookup(key: str) -> tuple[Chart, Known] | None:
    """Return the chart and the entry of the metric `key`, the exact one before patterns; None: it is in no chart."""
    entries = [(chart, known) for chart in CHARTS for known in chart.metrics]
    exact = [entry for entry in entries if entry[1].key == key]
    fitting = [entry for entry in entries if fnmatchcase(key, entry[1].key)]
    return next(iter([*exact, *fitting]), None)


def label_of(key: str, known: Known) -> str:
    """Return what a chart calls the metric: what `*` stands for, or its key without area and unit."""
    start, star, end = known.key.partition("*")
    if star:
        return key.removeprefix(start).removesuffix(end).replace("_", " ")
    return key.partition("/")[2].removesuffix("_fraction").removesuffix("_nats").replace("_", " ")


def out_of_range(known: Known, values: Sequence[float | None]) -> float | None:
    """Return the median of the last quarter of `values` if that is not what is usual; else None."""
    finite = [value for value in values if value is not None]
    if not finite or (known.low is None and known.high is None):
        return None
    newest = statistics.median(finite[-max(1, len(finite) // 4) :])
    too_low = known.low is not None and newest < known.low
    too_high = known.high is not None and newest > known.high
    return newest if too_low or too_high else None
