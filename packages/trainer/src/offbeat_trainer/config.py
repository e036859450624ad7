"""Settings of the training loops, and of the algorithms that learn from what is generated."""

# No `from __future__ import annotations` here: pydantic reads these annotations at run time.

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from offbeat_engine.config import SPEED, bounded
from offbeat_trainer.errors import PlanRefused

GRPO_EPSILON = 1e-6
"""Added to the standard deviation, so that rewards that hardly differ do not become huge advantages."""


UNUSED = {"derived": "algorithm.name, the algorithm, which has no use for another value"}
"""Metadata of an inherited setting that a run of the algorithm has not."""


class Advantage(StrEnum):
    """How rewards become advantages; formulas and sources in `offbeat_trainer.algorithms.advantages`.

    BATCH_STD and DOMAIN_STD are GRPO with the deviation of all rewards of the step, or of those of the prompt's domain. OTB, the
    optimal token baseline, costs a forward pass of an engine that names the likeliest tokens.
    """

    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    RLOO = "rloo"
    LOO_GRPO = "loo_grpo"
    OPO = "opo"
    PASS_AT_K = "pass_at_k"
    MAX_RL = "max_rl"
    BATCH_STD = "batch_std"
    DOMAIN_STD = "domain_std"
    OTB = "otb"


class KlIn(StrEnum):
    """Where the KL to the reference counts: as a term of the loss, or in the reward of a completion before advantages are taken."""

    LOSS = "loss"
    REWARD = "reward"


class Aggregation(StrEnum):
    """How token losses become one number; see `offbeat_trainer.algorithms.policy_loss`."""

    TOKEN_MEAN = "token_mean"
    SEQ_MEAN_TOKEN_SUM = "seq_mean_token_sum"
    SEQ_MEAN_TOKEN_MEAN = "seq_mean_token_mean"
    SEQ_MEAN_TOKEN_SUM_NORM = "seq_mean_token_sum_norm"


class KlEstimator(StrEnum):
    """Schulman's estimators of KL(policy || reference); UNBIASED is k3 weighted for who sampled the token, the others are not.

    K3_PLUS has the value of k3 and the gradient of k2. ABS is |log ratio|. FULL estimates nothing: it is the KL of whole
    distributions at each token, for which a rank holds 16 bytes a token of its mini-batch times the vocabulary.
    """

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    K3_PLUS = "k3_plus"
    ABS = "abs"
    UNBIASED = "unbiased"
    FULL = "full"


class Proximal(StrEnum):
    """The policy that the clipped ratio is taken against: the trainer's own before the step, or the sampler's.

    RECOMPUTE is decoupled PPO: the trainer's log-probs decide what is clipped, the correction weighs the samples.
    ROLLOUT is the bypass: one ratio against the sampler's log-probs does both, and no weight is applied.
    """

    RECOMPUTE = "recompute"
    ROLLOUT = "rollout"


class Correction(StrEnum):
    """What becomes of the importance weight trainer / sampler; see `offbeat_trainer.algorithms.policy_loss`.

    TRUNCATE caps it at `correction_high`; MASK zeroes what is above; ICEPOP zeroes what is outside both bounds.
    """

    NONE = "none"
    TRUNCATE = "truncate"
    MASK = "mask"
    ICEPOP = "icepop"


class CorrectionLevel(StrEnum):
    """Over what the weight is taken: each token, the product over a completion, or its geometric mean."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    GEOMETRIC = "geometric"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """The settings of an algorithm are fields of its own subclass of this, frozen and keyword-only, each with a default.

    `written_rows` 0: it learns from completions that are generated. Else nothing is: a prompt of its task comes with so many
    written ones; see `offbeat_trainer.OfflineAlgorithm`.
    """

    written_rows: ClassVar[int] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossConfig(AlgorithmConfig):
    """The loss of a policy; `offbeat_trainer.algorithms.policy_loss` has its formula.

    `clip_low` and `clip_high` bound the importance ratio in 1 - clip_low .. 1 + clip_high; `dual_clip` > 1 bounds
    the loss of negative advantages (0 = off). `kl_coef` 0 means that no reference model is loaded. `proximal` and the
    `correction*` settings say what happens to tokens that another policy sampled; docs/asynchrony.md justifies them.
    """

    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    clip_low: float = bounded(0.2, at_least=0)  # the importance ratio counts down to 1 - clip_low
    clip_high: float = bounded(0.28, at_least=0)  # the importance ratio counts up to 1 + clip_high
    dual_clip: float = bounded(0.0, at_least=0)  # > 1 bounds the loss of negative advantages; 0 = off
    kl_coef: float = bounded(0.0, at_least=0)  # weight of the KL to a reference model; 0: none is loaded
    kl_estimator: KlEstimator = KlEstimator.K3
    entropy_coef: float = 0.0  # weight of the entropy bonus in the loss; 0 = off
    proximal: Proximal = Proximal.RECOMPUTE
    correction: Correction = Correction.TRUNCATE
    correction_level: CorrectionLevel = CorrectionLevel.TOKEN
    correction_low: float = bounded(
        0.5, at_least=0
    )  # lower bound of the importance weight where the correction has one
    correction_high: float = bounded(2.0, at_least=0)  # upper bound of the importance weight


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoConfig(PolicyLossConfig):
    """GRPO (arXiv 2402.03300) with clip-higher and the mean over tokens (arXiv 2503.14476).

    With `kl_target` `kl_coef` follows the KL per token towards it, with `entropy_target` `entropy_coef` follows the entropy; 0 = off.
    """

    advantage: Advantage = Advantage.GRPO
    std_epsilon: float = bounded(
        GRPO_EPSILON, at_least=0
    )  # added to the standard deviation that advantage=grpo divides by
    per_turn: bool = False  # trajectories are compared turn by turn; see `turn_advantages`
    dynamic_sampling: bool = False  # groups of equal rewards are left out and replaced (arXiv 2503.14476)
    kl_in: KlIn = KlIn.LOSS
    kl_target: float = bounded(0.0, at_least=0)  # KL per token that `kl_coef` steers towards; 0 = off
    entropy_target: float = bounded(0.0, at_least=0)  # entropy that `entropy_coef` steers towards; 0 = off
    reference_every: int = bounded(0, at_least=0)  # steps after which the reference is made anew; 0 = never
    reference_keep: float = bounded(0.0, at_least=0, at_most=1)
    """share of the reference that stays; the rest is the policy"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrGrpoConfig(GrpoConfig):
    """Centred, not scaled, and no division by a completion's length (arXiv 2503.20783)."""

    advantage: Advantage = Advantage.DR_GRPO
    aggregation: Aggregation = Aggregation.SEQ_MEAN_TOKEN_SUM_NORM


@dataclass(frozen=True, slots=True, kw_only=True)
class RlooConfig(GrpoConfig):
    """The mean of the others as baseline (arXiv 2402.14740)."""

    advantage: Advantage = Advantage.RLOO
    aggregation: Aggregation = Aggregation.SEQ_MEAN_TOKEN_SUM


@dataclass(frozen=True, slots=True, kw_only=True)
class DapoConfig(GrpoConfig):
    """DAPO (arXiv 2503.14476).

    In the last `overlong_buffer` of the longest length (a fraction; 0 = no such part) a completion's reward falls, by 1 at its end.
    """

    dynamic_sampling: bool = True
    overlong_buffer: float = bounded(0.2, at_least=0, at_most=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoConfig(PolicyLossConfig):
    """PPO with a critic (arXiv 1707.06347); `offbeat_trainer.algorithms.ppo` has the formulas.

    `value_clip` bounds how far a value moves in a step (0 = off). `critic_path`
    "" starts the critic from the model of the run, with a new head. `critic_engine` "" is the run's: another training engine holds the
    critic on the same ranks, with what engines have in common as the run has it and its defaults for the rest. `critic_warmup_steps` first steps train the critic alone.
    """

    clip_high: float = bounded(0.2, at_least=0)
    discount: float = bounded(1.0, at_least=0, at_most=1)  # gamma of GAE
    trace: float = bounded(0.95, at_least=0, at_most=1)  # lambda of GAE
    whiten: bool = True  # whether advantages are brought to mean 0 and deviation 1: noise, where nearly all completions are right
    value_clip: float = bounded(0.5, at_least=0)
    critic_path: str = ""
    critic_engine: str = field(default="", metadata=SPEED)
    critic_lr: float = bounded(1e-5, at_least=0)  # learning rate of the critic
    critic_warmup_steps: int = bounded(0, at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectionConfig(AlgorithmConfig):
    """Rejection sampling: the `best_of_group` completions of a prompt are learned (0 = all), as far as they earn `min_reward`."""

    best_of_group: int = bounded(1, at_least=0)
    min_reward: float | None = None  # least reward of a completion that is learned; None = any


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How completions are sampled. One ends at the tokens that the task names, and with the token whose text completes
    one of `stop`.

    Truncated sampling (top-p, top-k) is no setting: `Session.sample` has it, for a loop of one's own.
    """

    max_tokens: int = bounded(32, at_least=1)  # most tokens of a completion
    temperature: float = bounded(1.0, at_least=0)  # divides the logits before sampling
    stop: tuple[str, ...] = ()


class OnFailure(StrEnum):
    """What follows a failure: what failed is left out, a completion or a group for which another comes, or the run ends."""

    DROP = "drop"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """How reward functions are called.

    `model` is the folder of a reward
    model (`algorithm=reward_model` makes one), whose score is the reward in place of the task's.
    """

    concurrency: int = bounded(32, at_least=1)
    """calls at a time, each in a process; coroutines share one loop"""
    timeout_s: float = bounded(60.0, more_than=0)  # after which a call is ended
    max_attempts: int = bounded(2, at_least=1)  # how often a call that fails is tried
    on_failure: OnFailure = OnFailure.DROP  # what follows the last failed attempt
    model: str = ""


class RewardFrom(StrEnum):
    """Who says what a trajectory of several turns is worth: its environment, the task, or both, added up."""

    ENVIRONMENT = "environment"
    TASK = "task"
    BOTH = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig:
    """What the policy acts in over several turns; without a `path` there is one turn, and no environment. docs/environments.md.

    `path` names a class, "package.module:Name" or "folder/file.py:Name", which is made with `args`. One call of an environment may
    take `timeout_s`; those that are no coroutines run in `concurrency` processes. One whose environment fails is begun anew,
    `max_attempts` times in all, before `on_failure` decides.
    """

    path: str = ""
    args: dict[str, Any] = field(default_factory=dict[str, Any], metadata={"free": True})
    max_turns: int = bounded(8, at_least=1)  # after which a trajectory ends
    max_tokens: int = bounded(1024, at_least=1)
    """most of a trajectory, sampled and observed; the prompt is not counted"""
    max_seconds: float = bounded(0.0, at_least=0)  # after which a trajectory ends; 0 = never
    timeout_s: float = bounded(60.0, more_than=0)
    concurrency: int = bounded(2, at_least=1)
    max_attempts: int = bounded(2, at_least=1)
    on_failure: OnFailure = OnFailure.DROP
    reward_from: RewardFrom = RewardFrom.ENVIRONMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """The loop's arithmetic and calendar.

    One step trains on `prompts_per_step` * `group_size` completions in `updates_per_step` equal mini-batches.
    `validate_every`, `save_every` and `sample_every` count steps; 0 = only at the ends (validation), only when the run is
    asked to stop (saving), never (samples). With `validation_prompts` 0 there is no validation. What is saved at intervals is saved at the end, too. `step_timeout_s` bounds each wait of the driver in which nothing moves.
    """

    steps: int = bounded(100, at_least=0)  # steps of reinforcement learning
    prompts_per_step: int = bounded(16, at_least=1)  # different prompts of a step
    group_size: int = bounded(16, at_least=1)
    """completions of a prompt, which are compared with each other; a step generates and trains `prompts_per_step` times as many"""
    updates_per_step: int = bounded(1, at_least=1)
    """optimizer steps of a step, each on an equal part of its completions; after the first, training is off-policy"""
    validate_every: int = bounded(10, at_least=0)  # steps between validations; 0 = only at the ends
    validation_prompts: int = bounded(256, at_least=0)
    save_every: int = bounded(20, at_least=0)  # steps between checkpoints; 0 = only when asked to stop
    keep_checkpoints: int = bounded(2, at_least=1)  # how many of the newest checkpoints stay
    sample_every: int = bounded(10, at_least=0)  # steps between those whose samples are kept; 0 = never
    step_timeout_s: float = 600.0


class Partial(StrEnum):
    """What happens to completions that are under way when new weights come.

    KEEP: they go on under the new weights, from the keys and values they have. RECOMPUTE: they go on from new ones.
    ABORT: they end, and are continued from their tokens under the new weights. WAIT: the weights come when nothing is
    under way any more.
    """

    KEEP = "keep"
    RECOMPUTE = "recompute"
    ABORT = "abort"
    WAIT = "wait"

    @property
    def goes_on(self) -> bool:
        """Whether completions go on through a sync."""
        return self in (Partial.KEEP, Partial.RECOMPUTE)


class Order(StrEnum):
    """Which finished groups a step takes first, where the staleness bound leaves a choice."""

    FIRST_IN = "first_in"  # in the order of the prompts; a step waits for its own
    OLDEST_VERSION = "oldest_version"  # those begun under the oldest weights
    LONGEST_WAITING = "longest_waiting"  # those that were finished first


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncConfig:
    """How far generation may run ahead of training, in versions (one per step); docs/asynchrony.md explains each.

    No trained token is more than `max_staleness` versions old. Weights go to the replicas every `sync_every` steps.
    `over_sampling` 0.1 begins 10 % more groups than a step takes. In order (FIRST_IN, and so in the modes that take turns) they take
    the place of groups that are dropped; otherwise the slowest are dropped, which favours short completions.
    A group is tried `max_attempts` times before it is dropped, a validation as often before the run ends.

    FIRST_IN with WAIT makes a run deterministic: what is trained, and on what, depends on the step and not on timing.
    """

    max_staleness: int = bounded(2, at_least=0)  # versions that a trained token may be old, at most
    sync_every: int = bounded(1, at_least=1)
    partial: Partial = Partial.KEEP
    order: Order = Order.OLDEST_VERSION
    over_sampling: float = bounded(0.0, at_least=0)
    max_attempts: int = bounded(3, at_least=1)

    @property
    def recompute_kv(self) -> bool:
        """Whether completions that go on through a sync get the keys and values of their tokens from the new weights."""
        return self.partial is Partial.RECOMPUTE


def check_async(config: AsyncConfig) -> None:
    """Raise `PlanRefused`, naming the setting and what to do, if `config` cannot be run."""
    checks = (
        (config.max_staleness >= 0, f"`max_staleness` must be >= 0, got {config.max_staleness}"),
        (config.sync_every >= 1, f"`sync_every` must be >= 1, got {config.sync_every}"),
        (
            config.sync_every <= config.max_staleness + 1,
            f"`sync_every` {config.sync_every} makes tokens {config.sync_every - 1} versions old before anything runs "
            f"ahead; raise `max_staleness` to at least that, or sync more often",
        ),
        (config.over_sampling >= 0, f"`over_sampling` must be >= 0, got {config.over_sampling}"),
        (config.max_attempts >= 1, f"`max_attempts` must be >= 1, got {config.max_attempts}"),
    )
    for ok, message in checks:
        if not ok:
            raise PlanRefused(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupConfig:
    """Supervised training before reinforcement learning, or alone; `steps` 0 = none.

    `lr` None: 1e-5 for a model that was trained before (1e-4 for adapters over one), 1e-3 for one whose weights are drawn.
    """

    steps: int = bounded(0, at_least=0)
    batch_size: int = bounded(64, at_least=1)  # examples of a supervised step
    lr: float | None = bounded(None, at_least=0)
    lr_warmup_steps: int = 20


class Placement(StrEnum):
    """Whether training and generation have devices of their own, or the same ones in turns.

    COLOCATED: while one works the other rests; where it can, it gives its device memory away meanwhile.
    """

    SEPARATE = "separate"
    COLOCATED = "colocated"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Where the processes run. Empty `ray_address` starts a private Ray on this machine.

    On CPU the devices of a pool are the cores: training and generation take turns in sync mode, so each pool may
    use them all. On GPU every rank and every tensor-parallel rank of a replica has a device of its own, unless
    `placement` is "colocated" (sync mode only): then ranks and replicas share theirs. `num_devices` 0 = count them.
    With `ray_address` the run may have several machines. On CPU ranks run beside the driver, and replicas are spread. Processes
    meet at `rendezvous_host`, an address of training rank 0's machine; empty, it is loopback while all are on one machine,
    else the address that Ray knows that machine by. Replicas are asked for their health every `health_period_s`; one that takes longer than `health_timeout_s` to answer
    is replaced.
    """

    ray_address: str = ""
    num_devices: int = bounded(0, at_least=0)
    placement: Placement = Placement.SEPARATE
    start_timeout_s: float = 300.0  # deadline for processes to start
    health_period_s: float = 5.0
    health_timeout_s: float = 60.0
    rendezvous_host: str = ""
    object_store_mib: int = bounded(512, more_than=0)  # size of Ray's object store


class Divergence(StrEnum):
    """What is brought down between policy and teacher: SAMPLED by sampled tokens alone, the others by whole distributions."""

    SAMPLED = "sampled"
    FORWARD_KL = "forward_kl"
    REVERSE_KL = "reverse_kl"
    JSD = "jsd"


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillConfig(PolicyLossConfig):
    """On-policy distillation; `offbeat_trainer.algorithms.distill` has the formula.

    `teacher_path` is the Hugging Face folder of a model with the policy's vocabulary. `teachers` names those of others by domain:
    completions of a prompt whose `domain` is there learn from that one. `gain_clip` bounds log teacher - log policy of
    a token on both sides (0 = off).
    """

    clip_high: float = bounded(0.2, at_least=0)
    teacher_path: str = ""
    teachers: dict[str, str] = field(default_factory=dict[str, str], metadata={"free": True})
    gain_clip: float = bounded(0.0, at_least=0)
    divergence: Divergence = Divergence.SAMPLED
    """of policy and teacher: of the sampled token alone, or of more"""
    top_k: int = bounded(64, at_least=1)
    """likeliest tokens of the teacher that a divergence compares, all of them where it has no more; the rest are one"""
    jsd_beta: float = bounded(0.5, more_than=0, at_most=0.999)  # the teacher's part in the mixture of jsd
