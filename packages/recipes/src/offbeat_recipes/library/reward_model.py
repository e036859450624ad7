"""A reward model as the reward of a run: `reward.model` names a folder that `algorithm=reward_model` saved."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from offbeat_engine import Fsdp2Config, ModelConfig, World, engine_class
from offbeat_trainer import (
    Example,
    RewardConfig,
    RewardFailed,
    RewardModel,
    Score,
    TrainerError,
    assemble_examples,
)
from offbeat_trainer.config import OnFailure

if TYPE_CHECKING:
    from offbeat_engine import Engine
    from offbeat_trainer import Group


class ModelScorer:
    """Satisfies `Scorer` by a reward model, which reads a completion's own tokens, its last row where it has several.

    It is an FSDP2 engine of one rank on this machine's CPU cores, in a thread: groups are scored when they are whole, and training
    ranks meet only in steps. A model that is too large for that goes behind an endpoint (`library.judge`). Groups take turns, and
    each may take `reward.timeout_s`; the first one loads the model.
    """

    def __init__(self, config: RewardConfig) -> None:
        """Score with the model in the folder `config.model`, which is loaded by the first call."""
        self._config = config
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward model")

    async def score(self, group: Group) -> Group:
        """See `Scorer.score`."""
        async with self._turn:
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    loop = asyncio.get_running_loop()
                    rewards = await loop.run_in_executor(self._thread, self._rewards, group)
            except TimeoutError as error:
                message = f"the reward model took longer than {self._config.timeout_s:g} s for {group.prompt.uid} (reward.timeout_s)"
                if self._config.on_failure is OnFailure.STOP:
                    raise TrainerError(message) from error
                raise RewardFailed("timed out", message) from error
        return replace(group, scores=tuple(Score(reward=reward) for reward in rewards))

    async def close(self) -> None:
        """Let go of the model, after what is under way."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
        if "_engine" in self.__dict__:
            self._engine.close()
            del self._engine

    @cached_property
    def _engine(self) -> Engine:
        config = Fsdp2Config(model=ModelConfig(path=self._config.model, head="value"), inference_only=True)
        engine = engine_class("fsdp2")(config, World())
        engine.init_model()
        return engine

    def _rewards(self, group: Group) -> list[float]:
        rows = [one.rows[-1] for one in group.trajectories]
        examples = [
            Example(
                prompt_ids=group.prompt.token_ids if row.context is None else tuple(row.context.tolist()),
                completion_ids=tuple(row.token_ids.tolist()),
            )
            for row in rows
        ]
        return [float(score) for score in RewardModel(self._engine).scores(assemble_examples(examples))]
