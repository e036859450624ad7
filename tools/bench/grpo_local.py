"""A few GRPO steps in one process, without Ray: engine, Transformers adapter, manager and transport are the real ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from offbeat_ckptsync import SyncConfig
from offbeat_engine import Dtype, Fsdp2Config, ModelConfig, OptimizerConfig, World
from offbeat_engine.fsdp2 import Fsdp2Engine
from offbeat_rollout import RolloutConfig
from offbeat_rollout.hf import HfEngine
from offbeat_trainer import (
    Grpo,
    GrpoConfig,
    Learner,
    LoopConfig,
    Prompt,
    RewardConfig,
    Role,
    SamplingConfig,
    Score,
    StepShape,
)
from offbeat_trainer.algorithms.learner import LocalPolicy
from offbeat_trainer.algorithms.roles import POLICY
from offbeat_trainer.cluster.weights import LocalPublisher
from offbeat_trainer.loops.online import run_sync
from offbeat_trainer.loops.outcome import Outcome
from offbeat_trainer.loops.run_store import RunStore
from offbeat_trainer.loops.session import Session
from offbeat_trainer.rollouts.scorer import TaskScorer
from offbeat_trainer.rollouts.single import GroupGenerator, SingleTurn, derive_seed
from offbeat_trainer.watch.jsonl import JsonlReporter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from engine_loops import Size

    from offbeat_trainer import Trajectory

PROMPT_TOKENS = 64
MAX_TOKENS = 64
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LowTokens:
    """A task: completions earn the share of their tokens in the lower half of the vocabulary. Satisfies `Task`."""

    vocab: int

    def prompts(self, step: int, num_prompts: int) -> list[Prompt]:
        """See `Task.prompts`."""
        return [self._prompt(derive_seed("train", step, index)) for index in range(num_prompts)]

    def validation_prompts(self, num_prompts: int) -> list[Prompt]:
        """See `Task.validation_prompts`."""
        return [self._prompt(derive_seed("held out", index)) for index in range(num_prompts)]

    def score(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """See `Task.score`."""
        del prompt
        low = float((trajectory.token_ids < self.vocab // 2).mean())
        return Score(reward=low, correct=low == 1)

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Task.decode`."""
        return " ".join(map(str, token_ids))

    def stop_token_ids(self) -> tuple[int, ...]:
        """Nothing ends a completion early."""
        return ()

    def _prompt(self, seed: int) -> Prompt:
        ids = tuple(1 + (seed + 7919 * place) % (self.vocab - 1) for place in range(PROMPT_TOKENS))
        return Prompt(uid=str(seed), text=str(ids[:4]), token_ids=ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoRun:
    """`steps` steps of 8 prompts with 8 completions each, on the device and in the dtype of `size`."""

    model: str
    size: Size
    steps: int

    async def run(self, folder: Path) -> None:
        """Run; metrics go to `folder`."""
        device = cast("Literal['cpu', 'cuda']", self.size.device)
        config = Fsdp2Config(
            model=ModelConfig(path=self.model),
            optimizer=OptimizerConfig(lr=1e-5),
            dtype=Dtype(self.size.dtype),
            device=device,
        )
        engine = Fsdp2Engine(config, World(device=device))
        engine.init_model()
        algorithm = Grpo(config=GrpoConfig(), step=StepShape(max_completion_tokens=MAX_TOKENS))
        replica = HfEngine(
            RolloutConfig(
                model_path=self.model,
                device=device,
                dtype=cast("Literal['float32', 'bfloat16']", self.size.dtype),
                max_model_len=PROMPT_TOKENS + MAX_TOKENS,
            )
        )
        await replica.start()
        learner = Learner(algorithm, {POLICY: Role(engine)}, checkpoints=str(folder), keep=1)
        policy = LocalPolicy(learner, timeout_s=TIMEOUT_S)
        generator = GroupGenerator(replica.generate_many, replica.abort)
        parts = Session(
            task=(task := LowTokens(vocab=self.size.vocab)),
            policy=policy,
            rollout=SingleTurn(generator, TaskScorer(task.score, RewardConfig())),
            publisher=await LocalPublisher.between(engine, replica, SyncConfig(transport="loopback")),
            reporter=JsonlReporter(folder),
            store=RunStore(folder / "state", keep=1),
            seed=0,
            loop=LoopConfig(
                steps=self.steps,
                prompts_per_step=8,
                group_size=8,
                validate_every=0,
                save_every=0,
                sample_every=0,
            ),
            algorithm=algorithm,
            sampling=SamplingConfig(max_tokens=MAX_TOKENS),
        )
        try:
            await run_sync(parts, Outcome(), 0)
        finally:
            await replica.stop()
            parts.reporter.close()
            engine.close()
