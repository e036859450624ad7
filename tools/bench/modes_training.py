"""Real training beside a generator with a heavy tail: how much of the time is the busier of the two at work?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from modes_paced import VOCAB, Lengths, PacedReplica, PacedTask, StepLog, TimedJournal

from offbeat_ckptsync import LocalMember, RankId, Receiver, SyncConfig, SyncReport
from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.ends.sender import LocalSource, Sender
from offbeat_ckptsync.ends.sinks import DictSink
from offbeat_ckptsync.seams import NO_TRAFFIC
from offbeat_ckptsync.toolkit.config import make_transport
from offbeat_engine import Fsdp2Config, ModelConfig, OptimizerConfig, World, engine_class
from offbeat_engine.testing import make_tiny_model
from offbeat_trainer import (
    AsyncConfig,
    Grpo,
    GrpoConfig,
    Learner,
    LoopConfig,
    RewardConfig,
    Role,
    SamplingConfig,
    SqliteJournal,
    StepShape,
)
from offbeat_trainer.algorithms.learner import LocalPolicy
from offbeat_trainer.algorithms.roles import POLICY
from offbeat_trainer.cluster.weights import EngineWeights
from offbeat_trainer.loops.online import run_fully_async, run_one_step_off, run_sync
from offbeat_trainer.loops.outcome import Outcome
from offbeat_trainer.loops.run_store import RunStore
from offbeat_trainer.loops.session import Session
from offbeat_trainer.rollouts.scorer import TaskScorer
from offbeat_trainer.rollouts.single import GroupGenerator, SingleTurn

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from offbeat_engine import Engine

LENGTHS = Lengths(median=40, sigma=0.9, longest=480)  # mean about 60: the longest takes eight times that
SMALLEST = Lengths(median=4, sigma=0.9, longest=48)
PROMPTS_PER_STEP = 16
GROUP_SIZE = 4
SLOTS = 16
MAX_STALENESS = 4
GENERATION_SHARE = (
    1.2  # work of generation over work of training: generation is the bottleneck, but not by much
)
LOOPS = {"sync": run_sync, "one_step_off": run_one_step_off, "fully_async": run_fully_async}
STEP_TIMEOUT_S = 600.0
FIRST = 3  # steps that do not count: allocators, caches, and slots that fill
LAST = MAX_STALENESS + 1  # nor do the last ones, for which nothing more is begun


class Pace(NamedTuple):
    """How long completions are, and how many seconds a token takes on each slot."""

    lengths: Lengths
    token_s: float


class PacedPublisher:
    """Syncs real weights into memory, then tells the replica its version. Satisfies `Publisher`."""

    def __init__(self, engine: Engine, replica: PacedReplica) -> None:
        """Connect the two through the transport of one process."""
        config = SyncConfig(transport="loopback")
        weights = EngineWeights(engine)
        self._replica = replica
        self._manager = CheckpointEngineManager(LocalSource(Sender(weights, config)), config)
        receiver = Receiver(RankId(member="paced"), DictSink(weights.manifest()))
        self._manager.add(LocalMember(receiver, make_transport(config.transport, config), gate=NO_TRAFFIC))

    async def publish(self, version: int, gathered: Callable[[], None] | None = None) -> SyncReport:
        """See `Publisher.publish`."""
        report = await self._manager.sync(version, gathered=gathered)
        self._replica.flip(version)
        return report


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run over its counted steps: seconds a step, and what generation and training each had to do in it."""

    step_s: float
    generation_s: float
    training_s: float
    slots_busy: float
    journal_share: float

    @property
    def utilisation(self) -> float:
        """The share of the counted time in which the busier side works: at 1 no overlap could do better.

        Generation's share is the work that its slots did, over the slots. What they made may be trained later, which is
        why this is not taken from the trained tokens: in a short window those are another sample of a heavy tail.
        """
        return max(self.slots_busy, self.training_s / self.step_s)


def new_engine(model: str) -> Engine:
    """Return a real engine with the weights in `model`, built."""
    engine = engine_class("fsdp2")(
        Fsdp2Config(model=ModelConfig(path=model), optimizer=OptimizerConfig(lr=1e-4)), World()
    )
    engine.init_model()
    return engine


async def train(folder: Path, model: str, mode: str, pace: Pace, steps: int) -> Measured:
    """Run `mode` in `folder` on `model`, with real training and generation at `pace`."""
    engine = new_engine(model)
    lengths = pace.lengths
    replica = PacedReplica(lengths, pace.token_s, SLOTS)
    log = StepLog()
    algorithm = Grpo(config=GrpoConfig(), step=StepShape(max_completion_tokens=lengths.longest))
    journal = TimedJournal(SqliteJournal(folder / "journal.sqlite"))
    parts = Session(
        task=PacedTask(),
        policy=LocalPolicy(
            Learner(algorithm, {POLICY: Role(engine)}, checkpoints=str(folder), keep=2),
            timeout_s=STEP_TIMEOUT_S,
        ),
        rollout=SingleTurn(
            GroupGenerator(replica.generate_many), TaskScorer(PacedTask().score, RewardConfig())
        ),
        publisher=PacedPublisher(engine, replica),
        reporter=log,
        store=RunStore(folder / "state", keep=2),
        seed=1,
        loop=LoopConfig(
            steps=steps,
            prompts_per_step=PROMPTS_PER_STEP,
            group_size=GROUP_SIZE,
            validate_every=0,
            validation_prompts=1,
            save_every=0,
            sample_every=0,
            step_timeout_s=STEP_TIMEOUT_S,
        ),
        algorithm=algorithm,
        sampling=SamplingConfig(max_tokens=lengths.longest),
        asynchrony=AsyncConfig(max_staleness=MAX_STALENESS),
        journal=journal,
    )
    await LOOPS[mode](parts, Outcome())
    journal.close()
    engine.close()
    return _measured(log, replica, journal)


def _measured(log: StepLog, replica: PacedReplica, journal: TimedJournal) -> Measured:
    counted = log.values[FIRST:-LAST]
    from_s, to_s = log.ended[FIRST - 1], log.ended[-LAST - 1]
    tokens = sum(values["tokens/generated"] for values in counted)
    steps = len(counted)
    return Measured(
        step_s=(to_s - from_s) / steps,
        generation_s=tokens * replica.token_s / SLOTS / steps,
        training_s=sum(values["time/train_s"] for values in counted) / steps,
        slots_busy=replica.busy_s(from_s, to_s) / SLOTS / (to_s - from_s),
        journal_share=journal.seconds / (log.ended[-1] - log.began["generate"][0]),
    )


async def measure(folder: Path, steps: int, *, smallest: bool = False) -> dict[str, object]:
    """Return how busy the bottleneck is in both overlapping modes, and what the journal takes of a step.

    One short run in turns says how long training takes; generation is then paced to `GENERATION_SHARE` of that.
    """
    least = FIRST + LAST + 2
    model = make_tiny_model(
        folder / "tiny", vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_attention_heads=4,
        num_hidden_layers=4, max_position_embeddings=1024,
    )  # fmt: skip
    lengths = SMALLEST if smallest else LENGTHS
    alone = await train(folder / "alone", model, "sync", Pace(lengths, 1e-6), least)
    tokens = lengths.mean() * PROMPTS_PER_STEP * GROUP_SIZE
    pace = Pace(lengths, GENERATION_SHARE * alone.training_s * SLOTS / tokens)
    ahead = await train(folder / "fully_async", model, "fully_async", pace, max(steps, least))
    off = await train(folder / "one_step_off", model, "one_step_off", pace, max(steps // 2, least))
    return {
        "utilisation": round(ahead.utilisation, 4),
        "one_step_off_utilisation": round(off.utilisation, 4),
        "trained_over_bound": round(max(ahead.generation_s, ahead.training_s) / ahead.step_s, 4),
        "bound_step_s": round(max(ahead.generation_s, ahead.training_s), 4),
        "step_s": round(ahead.step_s, 4),
        "one_step_off_step_s": round(off.step_s, 4),
        "generation_s": round(ahead.generation_s, 4),
        "training_s": round(ahead.training_s, 4),
        "slots_busy": round(ahead.slots_busy, 4),
        "journal_share_paced": round(ahead.journal_share, 5),
    }
