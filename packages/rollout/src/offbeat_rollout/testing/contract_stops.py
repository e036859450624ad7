"""Where completions end: at tokens and at texts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from offbeat_rollout.errors import RequestError
from offbeat_rollout.types import Finish, RolloutFeature

if TYPE_CHECKING:
    from offbeat_rollout.testing.subject import Subject
    from offbeat_rollout.types import Completion, GenerateRequest


async def stop_tokens(subject: Subject) -> None:
    """A completion ends with the first of its stop tokens."""
    free = await subject.engine.generate(subject.request(seed=3))
    stop = int(free.token_ids[5])
    first = free.token_ids.tolist().index(stop)
    stopped = await subject.engine.generate(subject.request(seed=3, stop_token_ids=(stop,)))
    assert stopped.token_ids.tolist() == free.token_ids[: first + 1].tolist(), (
        "the stop token belongs to the completion, nothing after it"
    )
    assert stopped.finish is Finish.STOP


async def stop_strings(subject: Subject) -> None:
    """A completion ends with the token that completes a text; who cannot do it refuses the request."""
    declared = RolloutFeature.STOP_STRINGS in subject.engine.capabilities().features
    if not declared:
        try:
            await subject.engine.generate(subject.request(stop=("a",)))
        except RequestError:
            return
        raise AssertionError("who cannot end at a text must refuse a request for it")
    assert subject.decode is not None, "give the subject of an engine that reads a tokenizer its `decode`"
    seeds = range(8)
    free = await subject.engine.generate_many(
        [subject.request(seed=seed, max_tokens=30, top_logprobs=2) for seed in seeds]
    )
    wanted: list[tuple[GenerateRequest, Completion, int, str]] = []
    for seed, whole in zip(seeds, free, strict=True):
        ids = whole.token_ids.tolist()
        # A text that begins inside a token and ends inside another; more than one may be asked for.
        text = "".join(one for one in subject.decode(ids[seed : 12 + seed]) if one != "\ufffd")[1:-1]
        stop = ("never written", text[: 3 + seed % 3])
        ends = (end for end in range(1, 31) if stop[1] in subject.decode(ids[:end]))
        request = subject.request(seed=seed, max_tokens=30, top_logprobs=2, stop=stop)
        wanted.append((request, whole, next(ends, 30), stop[1]))
    assert sum(length < 30 for *_, length, _ in wanted) >= 6, "too few of these texts are ever written"
    done = await subject.engine.generate_many([request for request, *_ in wanted])
    for (request, whole, length, stop), made in zip(wanted, done, strict=True):
        finish = Finish.STOP if length < 30 else Finish.LENGTH
        expected = replace(whole.cut(length, finish), request_id=request.request_id)
        assert made.token_ids.tolist() == expected.token_ids.tolist(), (
            f"{stop!r} is complete with token {length}: that one is the last"
        )
        assert made.finish is finish
        assert made.stop_reason == (stop if finish is Finish.STOP else None)
        assert made.spans == expected.spans
        tops, expected_tops = made.top_logprobs, expected.top_logprobs
        assert tops is not None
        assert expected_tops is not None
        if subject.same_bits:
            assert made.logprobs.tolist() == expected.logprobs.tolist()
            assert tops == expected_tops
            continue
        for one, other in ((made, expected), (tops, expected_tops)):
            assert one.logprobs.shape == other.logprobs.shape
            assert float(abs(one.logprobs - other.logprobs).max()) <= subject.tolerance
