"""Replicas without a model, for episodes: they say what they are told to, and what they were asked is kept."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from offbeat_recipes.run.modes import observation_encoder
from offbeat_rollout import Completion, Finish
from offbeat_trainer import Group, Score
from offbeat_trainer.rollouts.own import RolloutSetup
from offbeat_trainer.rollouts.single import GroupGenerator
from offbeat_trainer.watch.watchdog import Timeline, Watchdog

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from offbeat_rollout import GenerateRequest


class ScriptedReplicas:
    """They say `says`, one after the other and again from the first, each token by the weights `version` of then.

    Log-probs count down by an eighth from the first token of an answer. `reward` is what the task makes of each trajectory.
    """

    def __init__(self, tokenizer: Any, *says: str, reward: float = 7.0) -> None:  # noqa: ANN401 a library's
        """Say `says` in the tokens of `tokenizer`."""
        self.tokenizer = tokenizer
        self.says = itertools.cycle(says)
        self.reward = reward
        self.version = 1
        self.requests: list[GenerateRequest] = []

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Answer `requests`."""
        self.requests += requests
        await asyncio.sleep(0)
        return [self._made(request.request_id, next(self.says)) for request in requests]

    def setup(self, log: Path | None = None) -> RolloutSetup:
        """Return what a rollout over them is made with."""
        return RolloutSetup(
            generator=GroupGenerator(lambda requests: self.generate_many(requests)),
            scorer=self,
            task=cast("Any", SimpleNamespace(tokenizer=self.tokenizer, decode=self._decode)),
            encode=observation_encoder(self.tokenizer),
            timeline=Timeline(),
            watchdog=Watchdog(),
            log=log,
        )

    async def score(self, group: Group) -> Group:
        """See `Scorer.score`."""
        scores = tuple(Score(reward=self.reward) for _ in group.trajectories)
        return Group(prompt=group.prompt, trajectories=group.trajectories, scores=scores)

    async def close(self) -> None:
        """See `Scorer.close`."""

    def text(self, ids: Sequence[int]) -> str:
        """Return what `ids` say, special tokens included."""
        return str(self.tokenizer.decode([int(one) for one in ids]))

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def _made(self, request_id: str, text: str) -> Completion:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Completion.of(
            request_id=request_id,
            token_ids=tuple(ids),
            logprobs=tuple(-0.125 * (place + 1) for place in range(len(ids))),
            policy_versions=(self.version,) * len(ids),
            finish=Finish.STOP,
        )
