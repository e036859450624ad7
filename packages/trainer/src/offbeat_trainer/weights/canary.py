"""A few fixed questions that show whether the weights behind a version have changed."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from offbeat_rollout import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from offbeat_rollout import RolloutEngine


class EngineCanary:
    """Asks an engine for the log-prob of the likeliest next token after four fixed prompts.

    One token each: the largest log-prob changes as little as the arithmetic does, while a longer greedy answer may take
    another turn at a near tie. Prompts of four tokens fill no block of a prefix cache, so none is answered from
    keys and values of the version before.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        """Ask `engine`, which must have room for four requests within the deadline of the commit."""
        self._engine = engine

    async def __call__(self) -> list[float]:
        """Return four log-probs, in nats."""
        requests = [
            GenerateRequest(
                request_id=f"canary-{uuid.uuid4().hex}",
                prompt_ids=tuple(range(first, first + 4)),
                sampling=SamplingParams(max_tokens=1, temperature=0.0),
            )
            for first in (1, 5, 9, 13)
        ]
        return [float(answer.logprobs[0]) for answer in await self._engine.generate_many(requests)]
