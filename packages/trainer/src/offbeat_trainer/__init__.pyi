from .config import DistillConfig as DistillConfig
from .algorithms.written.config import DpoConfig as DpoConfig, SftConfig as SftConfig
from .algorithms.distill import Distill as Distill
from .algorithms.written.pairs import Dpo as Dpo
from .algorithms.grpo import (
    DrGrpo as DrGrpo,
    GroupPolicyGradient as GroupPolicyGradient,
    Grpo as Grpo,
    Rloo as Rloo,
)
from .algorithms.advantages import (
    Samples as Samples,
    compute_advantages as compute_advantages,
    group_advantages as group_advantages,
)
from .algorithms.interface import Algorithm as Algorithm, StepShape as StepShape
from .algorithms.interface import OfflineAlgorithm as OfflineAlgorithm
from .algorithms.policy_loss import (
    PolicyLoss as PolicyLoss,
    Surrogate as Surrogate,
    Tokens as Tokens,
    SurrogateFn as SurrogateFn,
    aggregate as aggregate,
)
from .algorithms.ppo import Ppo as Ppo
from .algorithms.policy_loss import kl_estimate as kl_estimate
from .algorithms.registry import (
    algorithm_class as algorithm_class,
    algorithm_config_class as algorithm_config_class,
    algorithm_names as algorithm_names,
)
from .algorithms.written.sft import Sft as Sft
from .algorithms.ppo import ValueLoss as ValueLoss, gae as gae
from .config import (
    Advantage as Advantage,
    Aggregation as Aggregation,
    AlgorithmConfig as AlgorithmConfig,
    AsyncConfig as AsyncConfig,
    ClusterConfig as ClusterConfig,
    Correction as Correction,
    CorrectionLevel as CorrectionLevel,
    DapoConfig as DapoConfig,
    DrGrpoConfig as DrGrpoConfig,
    EnvironmentConfig as EnvironmentConfig,
    GrpoConfig as GrpoConfig,
    KlEstimator as KlEstimator,
    KlIn as KlIn,
    LoopConfig as LoopConfig,
    Order as Order,
    Partial as Partial,
    PolicyLossConfig as PolicyLossConfig,
    PpoConfig as PpoConfig,
    Proximal as Proximal,
    RewardConfig as RewardConfig,
    RewardFrom as RewardFrom,
    RlooConfig as RlooConfig,
    SamplingConfig as SamplingConfig,
    WarmupConfig as WarmupConfig,
)
from .data.assemble import assemble_examples as assemble_examples, group_metrics as group_metrics
from .data.types import (
    Example as Example,
    Group as Group,
    Labelled as Labelled,
    Limit as Limit,
    Pair as Pair,
    Prompt as Prompt,
    UNSCORED as UNSCORED,
    Score as Score,
    Trajectory as Trajectory,
    Turn as Turn,
)
from .errors import (
    DeadlineExceeded as DeadlineExceeded,
    EnvironmentFailed as EnvironmentFailed,
    GroupFailed as GroupFailed,
    LoadError as LoadError,
    PlanRefused as PlanRefused,
    ResumeError as ResumeError,
    RewardFailed as RewardFailed,
    TrainerError as TrainerError,
    WorkerGone as WorkerGone,
)
from .data.interface import (
    Generator as Generator,
    Policy as Policy,
    Publisher as Publisher,
    Reporter as Reporter,
    Rollout as Rollout,
    Scorer as Scorer,
    Supervised as Supervised,
    Task as Task,
)
from .algorithms.learner import Learner as Learner
from .data.metrics import (
    Last as Last,
    Max as Max,
    Mean as Mean,
    Metric as Metric,
    Sum as Sum,
    described as described,
    reduce_metrics as reduce_metrics,
)
from .algorithms.roles import Critic as Critic
from .algorithms.roles import RewardModel as RewardModel
from .algorithms.roles import Role as Role, RoleSpec as RoleSpec
from .rollouts.environment import (
    Action as Action,
    Environment as Environment,
    Feedback as Feedback,
    find_environment as find_environment,
)
from .rollouts.multi import MultiTurn as MultiTurn, EnvironmentSetup as EnvironmentSetup
from .rollouts.own import (
    RolloutSetup as RolloutSetup,
    ScorerSetup as ScorerSetup,
    find_rollout as find_rollout,
    find_scorer as find_scorer,
)
from .rollouts.single import SingleTurn as SingleTurn
from .loops.buffer import GroupBuffer as GroupBuffer, StalenessGate as StalenessGate
from .loops.events import Journal as Journal, MemoryJournal as MemoryJournal
from .loops.journal import SqliteJournal as SqliteJournal
from .loops.schedule import Schedule as Schedule
from .watch.console import ConsoleReporter as ConsoleReporter
from .watch.fanout import FanOut as FanOut
from .watch.jsonl import JsonlReporter as JsonlReporter
from .watch.jsonl import Silent as Silent
from .watch.trackers import TensorBoardReporter as TensorBoardReporter
from .watch.trackers import TrackioReporter as TrackioReporter
from .watch.trackers import WandbReporter as WandbReporter
from .watch.watchdog import Timeline as Timeline
from .watch.watchdog import Watchdog as Watchdog
