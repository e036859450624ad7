"""Who the contract is put to, and how its checks wait for an engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from offbeat_rollout.types import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from offbeat_rollout.interface import RolloutEngine

_ids = count()
DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An engine under test: started, not paused, with nothing running; and who to compare it with.

    `decode` gives the text of tokens, special ones included, where the engine ends completions at texts
    (`RolloutFeature.STOP_STRINGS`); it must have been started with `stop_strings` then. `experts` gives those of every token of a
    sequence [N, L, K], where it was started with `record_experts`. `same_bits` says that log-probs of a
    request have the same bits whatever else is in the batch; else they are the same within `tolerance`.
    """

    engine: RolloutEngine
    vocab_size: int
    logprobs: Callable[
        [Sequence[int], Sequence[int], SamplingParams], list[float]
    ]  # (prompt, tokens, sampling) -> [T]
    tolerance: float = 1e-4  # of log-probs; what fp32 reaches
    same_bits: bool = True
    decode: Callable[[Sequence[int]], str] | None = None
    experts: Callable[[Sequence[int]], npt.NDArray[np.int16]] | None = None

    def request(self, prompt: Sequence[int] = (5, 6, 7), **sampling: object) -> GenerateRequest:
        """Return a request with an id of its own."""
        params = SamplingParams(**{"max_tokens": 12, **sampling})  # pyright: ignore[reportArgumentType] # field names
        return GenerateRequest(request_id=f"contract-{next(_ids)}", prompt_ids=tuple(prompt), sampling=params)


async def wait_for_tokens(engine: RolloutEngine, number: int = 5, since: int | None = None) -> None:
    """Wait until `engine`, which must tell its progress, has made `number` tokens from here on, or `since` it had made so many.

    Raises:
        TimeoutError: it made fewer in ten minutes.
    """
    health = await engine.health()
    first = health.tokens_made if since is None else since
    assert first is not None, "this engine does not say how many tokens it made"
    async with asyncio.timeout(DEADLINE_S):
        while (health.tokens_made or 0) < first + number:
            assert health.ok, f"the engine makes no tokens any more: {health.detail}"
            await asyncio.sleep(0.001)
            health = await engine.health()
