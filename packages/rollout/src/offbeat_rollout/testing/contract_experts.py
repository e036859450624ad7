"""What completions tell of a mixture's routers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from offbeat_rollout.types import Finish

if TYPE_CHECKING:
    from offbeat_rollout.testing.subject import Subject


async def routed_experts(subject: Subject) -> None:
    """Completions tell the experts of every token that was fed; nothing where nobody asked for them."""
    engine = subject.engine
    if not engine.config.record_experts:
        made = await engine.generate(subject.request(max_tokens=2))
        assert made.routed_experts is None, "nobody asked for them"
        return
    assert subject.experts is not None, "give the subject of an engine that records experts its `experts`"
    prompts = [tuple(range(3, 4 + 5 * length)) for length in (0, 2, 4)]
    prompts += [(*prompts[-1], 9), prompts[-1]]  # begun alike, and the same: caches may have them
    requests = [subject.request(prompt, max_tokens=1 + 6 * n, seed=n) for n, prompt in enumerate(prompts)]
    made = await engine.generate_many(requests)
    stop = int(made[-1].token_ids[3])
    requests.append(subject.request(prompts[-1], max_tokens=25, seed=4, stop_token_ids=(stop,)))
    made.append(await engine.generate(requests[-1]))
    assert made[-1].finish is Finish.STOP
    for request, completion in zip(requests, made, strict=True):
        fed = (*request.prompt_ids, *completion.token_ids[:-1].tolist())
        told, expected = completion.routed_experts, subject.experts(fed)
        assert told is not None
        assert told.shape == expected.shape, "of all tokens but the last, which was fed to nobody"
        assert np.array_equal(np.sort(told), np.sort(expected)), "other experts than those of a plain forward"
