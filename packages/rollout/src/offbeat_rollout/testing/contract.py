"""The contract of `RolloutEngine`, as checks that run against any engine. They use no test framework.

@pytest.mark.parametrize("check", rollout_contract)
async def test_contract(check, subject):
    await rollout_contract[check](subject)

Who the contract is put to, and how its checks wait for an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import wraps
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from offbeat_rollout.errors import EngineStateError, RequestError, RolloutError
from offbeat_rollout.types import (
    Completion,
    Finish,
    GenerateRequest,
    PauseMode,
    RolloutFeature,
    SamplingParams,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

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


Check: TypeAlias = Callable[[Subject], Awaitable[None]]
_TRIES = 5


async def _lengths(subject: Subject) -> None:
    requests = [subject.request(tuple(range(1, 2 + n)), max_tokens=n, seed=n) for n in (1, 2, 7, 40)]
    for request, completion in zip(requests, await subject.engine.generate_many(requests), strict=True):
        assert completion.request_id == request.request_id, "results must be in the order of the requests"
        assert completion.num_tokens == request.sampling.max_tokens
        assert completion.finish is Finish.LENGTH
        assert all(0 <= token < subject.vocab_size for token in completion.token_ids)
        assert completion.policy_versions.tolist() == [subject.engine.version] * completion.num_tokens


async def _logprobs(subject: Subject) -> None:
    variants: list[dict[str, object]] = [
        {},
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"temperature": 1.3, "top_k": 8},
        {"temperature": 1.3, "top_p": 0.7},
    ]
    requests = [
        subject.request(tuple(range(3, 4 + 5 * i)), max_tokens=24, seed=i, **variants[i % len(variants)])
        for i in range(12)
    ]
    for request, completion in zip(requests, await subject.engine.generate_many(requests), strict=True):
        expected = subject.logprobs(request.prompt_ids, completion.token_ids.tolist(), request.sampling)
        worst = max(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True))
        assert worst <= subject.tolerance, f"log-probs differ by {worst} for {request.sampling}"


async def _top_logprobs(subject: Subject) -> None:
    num_top = 5
    variants: list[dict[str, object]] = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 3},
        {"temperature": 0.7, "top_p": 0.6},
    ]
    requests = [
        subject.request((5, 6, 7), max_tokens=4, seed=i, top_logprobs=num_top, **variant)
        for i, variant in enumerate(variants)
    ]
    plain, *done = await subject.engine.generate_many([subject.request(max_tokens=9, seed=7), *requests])
    assert plain.top_logprobs is None, "nobody asked for them"
    for request, completion in zip(requests, done, strict=True):
        top = completion.top_logprobs
        assert top is not None
        assert top.token_ids.shape == (4, num_top)
        for position in range(4):
            values, ids = top.logprobs[position].tolist(), top.token_ids[position].tolist()
            assert values == sorted(values, reverse=True), "likeliest first"
            so_far = (*request.prompt_ids, *completion.token_ids[:position].tolist())
            expected = [subject.logprobs(so_far, (token,), request.sampling)[0] for token in ids]
            assert all(
                a == b or abs(a - b) <= subject.tolerance for a, b in zip(values, expected, strict=True)
            ), f"{ids} at {position} of {request.sampling}: {values}, expected {expected}"
            drawn = int(completion.token_ids[position])
            assert drawn not in ids or values[ids.index(drawn)] == float(completion.logprobs[position])


async def _greedy(subject: Subject) -> None:
    request = subject.request(max_tokens=3, temperature=0.0)
    completion = await subject.engine.generate(request)
    token_ids = completion.token_ids.tolist()
    for position, (token, logprob) in enumerate(zip(token_ids, completion.logprobs, strict=True)):
        so_far = (*request.prompt_ids, *token_ids[:position])
        best = max(
            subject.logprobs(so_far, (other,), request.sampling)[0] for other in range(subject.vocab_size)
        )
        assert logprob >= best - subject.tolerance, f"token {token} at {position} is not the most likely one"


async def _seeds(subject: Subject) -> None:
    def requests() -> list[GenerateRequest]:
        return [subject.request(tuple(range(1, 3 + i % 9)), seed=i, max_tokens=5 + i) for i in range(20)]

    together = await subject.engine.generate_many(requests())
    alone = [await subject.engine.generate(request) for request in requests()[::5]]
    for one, many in zip(alone, together[::5], strict=True):
        assert one.token_ids.tolist() == many.token_ids.tolist(), (
            "a seeded request must not depend on what else is in the batch"
        )
    same_prompt = [subject.request(seed=seed, max_tokens=16) for seed in (0, 0, 1)]
    first, again, other = await subject.engine.generate_many(same_prompt)
    assert first.token_ids.tolist() == again.token_ids.tolist()
    assert first.token_ids.tolist() != other.token_ids.tolist(), "different seeds must give different samples"
    unseeded = await subject.engine.generate_many([subject.request(max_tokens=16) for _ in range(2)])
    assert unseeded[0].token_ids.tolist() != unseeded[1].token_ids.tolist(), (
        "requests without a seed must not repeat one another"
    )


async def _concurrent(subject: Subject) -> None:
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(subject.engine.generate(subject.request(max_tokens=1 + i, seed=i)))
            for i in range(24)
        ]
    assert [task.result().num_tokens for task in running] == [1 + i for i in range(24)]


async def _refusals(subject: Subject) -> None:
    limit = subject.engine.config.max_model_len
    bad = [
        subject.request(()),
        subject.request((1,) * limit),
        subject.request((subject.vocab_size,)),
        subject.request(max_tokens=0),
        subject.request(temperature=-1.0),
        subject.request(temperature=0.005),
        subject.request(top_p=0.0),
        subject.request(top_k=0),
        subject.request(top_logprobs=subject.vocab_size + 1),
        subject.request(stop_token_ids=(1, subject.vocab_size)),
    ]
    for request in bad:
        try:
            await subject.engine.generate(request)
        except RequestError as error:
            message = str(error)
        else:
            raise AssertionError(f"a request that cannot be served was accepted: {request}")
        assert request.request_id in message, "the error must name the request"
    good = await subject.engine.generate(subject.request(max_tokens=2))
    assert good.num_tokens == 2


async def _context_end(subject: Subject) -> None:
    limit = subject.engine.config.max_model_len
    completion = await subject.engine.generate(subject.request((1,) * (limit - 3), max_tokens=50, seed=0))
    assert completion.num_tokens == 3
    assert completion.finish is Finish.LENGTH


def _long(subject: Subject, seed: int = 0) -> GenerateRequest:
    return subject.request(max_tokens=subject.engine.config.max_model_len - 3, seed=seed)


async def _start(subject: Subject, request: GenerateRequest) -> asyncio.Task[Completion]:
    task = asyncio.create_task(subject.engine.generate(request), name=request.request_id)
    await asyncio.sleep(0.02)
    return task


async def _caught(
    subject: Subject, act: Callable[[GenerateRequest], Awaitable[None]]
) -> asyncio.Task[Completion]:
    """Do something to a long request that is under way; to another one if it was over before, as on a machine that looks away."""
    for _ in range(_TRIES):
        request = _long(subject)
        task = await _start(subject, request)
        await act(request)
        await asyncio.sleep(0.3)
        if not task.done() or (await task).finish is not Finish.LENGTH:
            return task
        await subject.engine.resume()
    raise AssertionError(
        f"{_TRIES} requests went on to their ends, whatever was said (or the model is too fast for this check)"
    )


async def _pause_keep(subject: Subject) -> None:
    alone = await subject.engine.generate(_long(subject))
    task = await _caught(subject, lambda _: subject.engine.pause(PauseMode.KEEP))
    newcomer = await _start(subject, subject.request(max_tokens=1))
    await asyncio.sleep(0.3)
    assert not newcomer.done(), "a request that arrives during a pause must wait"
    assert not task.done(), "a paused request must not go on"
    await subject.engine.resume()
    await subject.engine.resume()  # harmless
    completion = await asyncio.wait_for(task, DEADLINE_S)
    assert completion.token_ids.tolist() == alone.token_ids.tolist(), "a kept request must go on where it was"
    assert completion.finish is Finish.LENGTH
    assert (await asyncio.wait_for(newcomer, DEADLINE_S)).num_tokens == 1


async def _pause_abort(subject: Subject) -> None:
    alone = await subject.engine.generate(_long(subject))
    task = await _caught(subject, lambda _: subject.engine.pause(PauseMode.ABORT))
    completion = await asyncio.wait_for(task, DEADLINE_S)
    assert completion.finish is Finish.ABORT
    assert completion.num_tokens < alone.num_tokens
    assert completion.token_ids.tolist() == alone.token_ids[: completion.num_tokens].tolist(), (
        "an aborted request keeps what it has"
    )
    await subject.engine.resume()
    assert (await subject.engine.generate(subject.request())).finish is Finish.LENGTH


async def _pause_wait(subject: Subject) -> None:
    before = (await subject.engine.health()).tokens_made
    tasks = [await _start(subject, subject.request(max_tokens=30, seed=i)) for i in range(3)]
    if before is not None:
        # Two have no more than 60 tokens: of each there is one by then. What has none yet may wait for the end of the pause.
        await wait_for_tokens(subject.engine, 61, before)
    await subject.engine.pause(PauseMode.WAIT)
    done = await asyncio.wait_for(asyncio.gather(*tasks), DEADLINE_S)
    assert [completion.finish for completion in done] == [Finish.LENGTH] * 3
    newcomer = await _start(subject, subject.request(max_tokens=1))
    await asyncio.sleep(0.2)
    assert not newcomer.done(), "a request that arrives during a pause must wait"
    await subject.engine.resume()
    await asyncio.wait_for(newcomer, DEADLINE_S)


async def _abort(subject: Subject) -> None:
    others = await _start(subject, _long(subject, seed=2))
    doomed = await _caught(subject, lambda one: subject.engine.abort([one.request_id, "nobody"]))
    first, second = await asyncio.wait_for(asyncio.gather(doomed, others), DEADLINE_S)
    assert first.finish is Finish.ABORT
    assert first.num_tokens < second.num_tokens
    assert second.finish is Finish.LENGTH


async def _cancel(subject: Subject) -> None:
    task = await _start(subject, _long(subject))
    task.cancel()
    await asyncio.wait([task], timeout=DEADLINE_S)
    assert task.cancelled()
    completion = await subject.engine.generate(subject.request(max_tokens=2))
    assert completion.num_tokens == 2
    assert (await subject.engine.health()).num_running == 0, "a cancelled request must not go on running"


async def _health(subject: Subject) -> None:
    health = await subject.engine.health()
    assert health.ok
    assert health.version == subject.engine.version
    assert health.num_running == 0
    try:
        await subject.engine.start()
    except EngineStateError:
        return
    raise AssertionError("a second `start` must be refused")


async def _progress(subject: Subject) -> None:
    """Who says how many tokens were made must say so in the middle of a request, and must not in a pause."""
    engine = subject.engine
    before = (await engine.health()).tokens_made
    if before is None:
        return
    task = await _start(subject, _long(subject))
    async with asyncio.timeout(DEADLINE_S):
        while (health := await engine.health()).tokens_made == before:
            assert not task.done(), (
                "no progress was told of a whole request (or the model is too fast for this check)"
            )
            await asyncio.sleep(0.001)
    assert (health.num_running, health.paused) == (1, False)
    await engine.pause(PauseMode.KEEP)
    await asyncio.sleep(0.1)  # what was under way
    still = await engine.health()
    await asyncio.sleep(0.2)
    assert await engine.health() == still, "nothing moves in a pause"
    assert still.paused
    await engine.resume()
    made = len((await asyncio.wait_for(task, DEADLINE_S)).token_ids)
    after = await engine.health()
    assert (after.tokens_made, after.paused) == (before + made, False)


def _leaves_it_open(check: Check) -> Check:
    """Let nobody who comes after a failed check find the engine paused: each request would wait for its deadline."""

    @wraps(check)
    async def checked(subject: Subject) -> None:
        try:
            await check(subject)
        except BaseException:
            with suppress(RolloutError):  # an engine that is gone: the check says more
                await subject.engine.resume()
            raise

    return checked


rollout_contract: dict[str, Check] = {
    check.__name__.lstrip("_"): _leaves_it_open(check)
    for check in (
        _lengths,
        _logprobs,
        _top_logprobs,
        _greedy,
        stop_tokens,
        stop_strings,
        routed_experts,
        _seeds,
        _concurrent,
        _refusals,
        _context_end,
        _pause_keep,
        _pause_abort,
        _pause_wait,
        _abort,
        _cancel,
        _health,
        _progress,
    )
}
