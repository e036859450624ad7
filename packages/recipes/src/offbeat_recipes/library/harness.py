"""Episodes that a harness of one's own plays as a client of the policy, over HTTP: `environment.rollout=mine.py:Mine`.

```python
class Mine(Harness):
    async def play(self, prompt, endpoint):
        client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        ...
        return reward
```

The endpoint speaks OpenAI's chat completions and completions, Anthropic's messages, and vLLM's tokens in and out. Each answer has its token
ids, the sampler's own log-probs and the version of the weights that made each token. Calls that go on from an earlier one are asked with the tokens that were
sampled, never made from text again, and are trained as one sequence with it; any other call begins a sequence of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from abc import ABC, abstractmethod
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from offbeat_recipes.library.dialects import (
    MODEL,
    REASONS,
    answered,
    body,
    from_anthropic,
    messages_of,
    most_tokens,
    payload_of,
    reading,
    refused,
    reply,
    sent,
    sent_to_anthropic,
    to_anthropic,
    tokens_of,
)
from offbeat_rollout import GenerateRequest, RolloutError
from offbeat_rollout.errors import RequestError, RequestTimeout
from offbeat_trainer.data.types import Group, Score, Trajectory, Turn, is_correct
from offbeat_trainer.errors import EnvironmentFailed, of_text, together
from offbeat_trainer.rollouts.frames import RAISED, TIMED_OUT
from offbeat_trainer.rollouts.single import derive_seed
from offbeat_trainer.watch.watchdog import GENERATION

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from aiohttp import web

    from offbeat_recipes.tasks.base import RunnableTask
    from offbeat_rollout import Completion, SamplingParams
    from offbeat_trainer import Prompt
    from offbeat_trainer.rollouts.own import RolloutSetup

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where an episode finds its policy: `model` at `base_url`, with a key that ends with the episode.

    `root` is the address without "/v1": for Anthropic's clients, and for "/inference/v1/generate".
    """

    base_url: str
    api_key: str
    model: str = MODEL

    @property
    def root(self) -> str:
        """The address of the server."""
        return self.base_url.removesuffix("/v1")


@dataclass(slots=True, kw_only=True)
class _Call:
    """What was asked and answered. `messages` are those of a chat with the answer, None of a plain completion."""

    prompt_ids: tuple[int, ...]
    completion: Completion
    messages: list[dict[str, Any]] | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self.prompt_ids, *self.completion.token_ids.tolist())


@dataclass(slots=True, kw_only=True)
class _Episode:
    """One trajectory on its way."""

    prompt: Prompt
    sampling: SamplingParams
    place: int
    calls: list[_Call] = field(default_factory=list[_Call])
    begun: itertools.count[int] = field(default_factory=itertools.count)
    lost: RolloutError | None = None  # what replicas failed of, and its client was told

    def trajectory(self) -> Trajectory:
        """Return the calls as turns: each chain of calls that go on from one another is a row."""
        chains: list[list[_Call]] = []
        for call in self.calls:
            fitting = [chain for chain in chains if call.prompt_ids[: len(chain[-1].ids)] == chain[-1].ids]
            if fitting:
                max(fitting, key=lambda chain: len(chain[-1].ids)).append(call)
            else:
                chains.append([call])
        turns = [turn for number, chain in enumerate(chains) for turn in self._turns(chain, first=not number)]
        return Trajectory(turns=tuple(turns), finish=self.calls[-1].completion.finish)

    def _turns(self, chain: list[_Call], *, first: bool) -> list[Turn]:
        prompt_ids, own = chain[0].prompt_ids, self.prompt.token_ids
        if first and prompt_ids[: len(own)] == own:
            begun = Turn(completion=chain[0].completion, observed=np.array(prompt_ids[len(own) :], np.int32))
        else:
            begun = Turn(completion=chain[0].completion, context=np.array(prompt_ids, np.int32))
        later = [
            Turn(
                completion=call.completion, observed=np.array(call.prompt_ids[len(before.ids) :], np.int32)
            ).without_past()
            for before, call in itertools.pairwise(chain)
        ]
        return [begun, *later]


class Harness(ABC):
    """Satisfies `Rollout` by episodes that `play` plays against an endpoint, on loopback unless `host` says otherwise.

    `host` is a name or an IPv4 address of this machine by which other machines reach it; the endpoint listens there,
    unencrypted. An episode may take `max_seconds`. One that raises, takes too long or asks for nothing fails its group,
    which is left out and counted; if replicas failed meanwhile the group is made again.
    """

    max_seconds: float = 600.0
    host: str = "127.0.0.1"

    def __init__(self, setup: RolloutSetup) -> None:
        """Keep the way to the replicas; the endpoint opens with the first episode."""
        self.setup = setup
        self._task = cast("RunnableTask", setup.task)
        self._episodes: dict[str, _Episode] = {}
        self._opening: asyncio.Task[tuple[web.AppRunner, str]] | None = None
        self._numbers = itertools.count()

    @abstractmethod
    async def play(self, prompt: Prompt, endpoint: Endpoint) -> float | Score | None:
        """Play one episode on `prompt`, and return what it is worth; None leaves that to the task's rewards.

        It runs beside the run's loop: what takes long is awaited, goes into a thread, or into a process.
        """

    async def run(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        n: int,
        begun: tuple[Trajectory, ...] = (),
        keep: Callable[[tuple[Trajectory, ...]], None] | None = None,
    ) -> Group:
        """See `Rollout.run`. What was begun by another process is begun anew."""
        del begun, keep
        with self.setup.timeline.generating(f"{next(self._numbers)}"):
            made = await together(
                {f"{prompt.uid} {place}": self._episode(prompt, sampling, place) for place in range(n)}
            )
        group = Group(prompt=prompt, trajectories=tuple(one for one, _ in made))
        scores = tuple(score for _, score in made)
        if any(score is None for score in scores):
            return await self.setup.scorer.score(group)
        return replace(group, scores=cast("tuple[Score, ...]", scores))

    async def interrupt(self) -> None:
        """See `Rollout.interrupt`: calls under way wait and are continued; their clients know nothing of it."""
        await self.setup.generator.interrupt()

    def go_on(self) -> None:
        """See `Rollout.go_on`."""
        self.setup.generator.go_on()

    async def close(self) -> None:
        """See `Rollout.close`."""
        opening, self._opening = self._opening, None
        if opening is not None:
            await asyncio.wait([opening])
            if opening.exception() is None:  # else the episodes that asked for it said so
                await opening.result()[0].cleanup()
        await self.setup.scorer.close()

    async def _episode(
        self, prompt: Prompt, sampling: SamplingParams, place: int
    ) -> tuple[Trajectory, Score | None]:
        episode = _Episode(prompt=prompt, sampling=sampling, place=place)
        limit = asyncio.timeout(self.max_seconds)
        try:
            async with self._endpoint(episode) as endpoint, limit:
                worth = await self.play(prompt, endpoint)
        except Exception as error:  # whatever a user's harness raises
            if episode.lost is not None:
                raise episode.lost from error
            late = limit.expired()
            reason = (
                f"took longer than {self.max_seconds:g} s"
                if late
                else f"raised {type(error).__name__}: {error}"
            )
            raise EnvironmentFailed(
                TIMED_OUT if late else RAISED, f"`play` of {prompt.uid} {reason}"
            ) from error
        if not episode.calls:
            raise episode.lost or EnvironmentFailed(
                RAISED, f"`play` of {prompt.uid} asked the policy for nothing"
            )
        self.setup.watchdog.progress(GENERATION, f"an episode of {prompt.uid}")
        if isinstance(worth, Score) or worth is None:
            return episode.trajectory(), worth
        return episode.trajectory(), Score(reward=float(worth), correct=is_correct(float(worth), None))

    @asynccontextmanager
    async def _endpoint(self, episode: _Episode) -> AsyncGenerator[Endpoint]:
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(), name="the endpoint of episodes")
        _, url = await asyncio.shield(self._opening)
        key = secrets.token_urlsafe(24)
        self._episodes[key] = episode
        try:
            yield Endpoint(base_url=url, api_key=key)
        finally:
            del self._episodes[key]

    async def _open(self) -> tuple[web.AppRunner, str]:
        from aiohttp import web  # the extra `harness`

        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/messages", self._messages)
        app.router.add_post("/inference/v1/generate", self._generate)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)  # of a client that is gone
        await runner.setup()
        await web.TCPSite(runner, self.host, 0).start()
        return runner, f"http://{self.host}:{runner.addresses[0][1]}/v1"

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._of(request)
        return answered({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        payload = await payload_of(request)
        ids, completion, message, reason = await self._talk(self._of(request), payload)
        choice = {"index": 0, "message": message, "finish_reason": reason}
        choice["logprobs"] = {"content": self._logprobs(completion)}
        return await sent(request, payload, body("chat.completion", choice, ids, completion))

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        payload = await payload_of(request)
        with reading():
            as_chat = from_anthropic(payload)
        ids, completion, message, reason = await self._talk(self._of(request), as_chat)
        return await sent_to_anthropic(request, payload, to_anthropic(message, reason, ids, completion))

    async def _talk(
        self, episode: _Episode, payload: Mapping[str, Any]
    ) -> tuple[tuple[int, ...], Completion, dict[str, Any], str]:
        """Return what a chat was asked with and answered: tokens, completion, the assistant's message, and why it ended."""
        with reading():
            messages = messages_of(payload)
        ids = await of_text(lambda: self._ids_of_chat(episode, messages, payload.get("tools")))
        completion = await self._sampled(episode, payload, ids)
        text = await of_text(lambda: self._task.decode(completion.token_ids.tolist()))
        message = reply(text, len(episode.calls))
        episode.calls.append(_Call(prompt_ids=ids, completion=completion, messages=[*messages, message]))
        reason = "tool_calls" if "tool_calls" in message else REASONS.get(completion.finish, "stop")
        return ids, completion, message, reason

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        episode, payload = self._of(request), await payload_of(request)
        prompt = payload.get("prompt")
        ids = (
            await of_text(lambda: self._ids_of(prompt))
            if isinstance(prompt, str)
            else tokens_of(prompt, "prompt")
        )
        completion = await self._plain(episode, payload, ids)
        text = await of_text(lambda: self._task.decode(completion.token_ids.tolist()))
        choice = {
            "index": 0,
            "text": text,
            "finish_reason": REASONS.get(completion.finish, "stop"),
            "logprobs": None,
        }
        return await sent(request, payload, body("text_completion", choice, ids, completion))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        episode, payload = self._of(request), await payload_of(request)
        ids = tokens_of(payload.get("token_ids"), "token_ids")
        completion = await self._plain(episode, payload.get("sampling_params") or {}, ids)
        choice: dict[str, Any] = {"index": 0, "finish_reason": REASONS.get(completion.finish, "stop")}
        choice["logprobs"] = {"content": self._logprobs(completion, as_ids=True)}
        return answered(body("generate", choice, ids, completion) | {"request_id": completion.request_id})

    async def _plain(self, episode: _Episode, payload: Mapping[str, Any], ids: tuple[int, ...]) -> Completion:
        completion = await self._sampled(episode, payload, ids)
        episode.calls.append(_Call(prompt_ids=ids, completion=completion))
        return completion

    def _of(self, request: web.Request) -> _Episode:
        key = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix(
            "Bearer "
        )
        if key not in self._episodes:
            raise refused(401, "no episode has this key, or it is over")
        return self._episodes[key]

    def _ids_of(self, text: str) -> tuple[int, ...]:
        return tuple(cast("list[int]", self._task.tokenizer(text, add_special_tokens=False)["input_ids"]))

    def _ids_of_chat(
        self, episode: _Episode, messages: list[dict[str, Any]], tools: object
    ) -> tuple[int, ...]:
        """Return the tokens of a chat: those of the longest earlier one that it goes on from, and of what was said since."""
        known = [call for call in episode.calls if call.messages and _goes_on(messages, call.messages)]
        if known:
            before = max(known, key=lambda call: len(call.ids))
            added = messages[len(before.messages or ()) :]
            return (*before.ids, *self.setup.encode(added, before.ids[-1]))
        template: Any = self._task.tokenizer
        if not template.chat_template:
            raise refused(
                400, "the model's tokenizer has no chat template; ask for completions of text or tokens"
            )
        more = {"tools": tools} if tools else {}
        return self._ids_of(
            str(template.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more))
        )

    async def _sampled(
        self, episode: _Episode, payload: Mapping[str, Any], ids: tuple[int, ...]
    ) -> Completion:
        sampling = episode.sampling
        most = most_tokens(payload, sampling)
        number = next(episode.begun)
        parts = (
            (episode.prompt.uid, episode.place)
            if not number
            else (episode.prompt.uid, episode.place, "call", number)
        )
        session = f"{episode.place}/{episode.prompt.uid}"
        wanted = replace(
            sampling,
            max_tokens=most,
            seed=None if sampling.seed is None else derive_seed(sampling.seed, *parts),
        )
        request = GenerateRequest(
            request_id=f"{number}/{session}", prompt_ids=ids, sampling=wanted, session=session
        )
        try:
            return await self.setup.generator.turn(request)
        except (RequestError, RequestTimeout) as error:
            raise refused(400, str(error)) from error
        except RolloutError as error:  # clients try such an answer again
            episode.lost = error
            raise refused(503, str(error)) from error

    def _logprobs(self, completion: Completion, *, as_ids: bool = False) -> list[dict[str, Any]]:
        """Return a log-prob a token; `as_ids` names tokens as vLLM does where it has no tokenizer."""
        ids = completion.token_ids.tolist()
        tokens = (
            [f"token_id:{one}" for one in ids] if as_ids else self._task.tokenizer.convert_ids_to_tokens(ids)
        )
        return [
            {"token": str(token), "logprob": float(logprob), "bytes": None, "top_logprobs": []}
            for token, logprob in zip(tokens, completion.logprobs.tolist(), strict=True)
        ]


def _goes_on(messages: list[dict[str, Any]], earlier: list[dict[str, Any]]) -> bool:
    """Whether a chat begins with an earlier one, the policy's answer included, and has something to say after that."""
    return len(messages) > len(earlier) and all(map(_same, messages, earlier))


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    def calls(message: Mapping[str, Any]) -> list[str]:
        return [call["id"] for call in cast("list[dict[str, Any]]", message.get("tool_calls") or [])]

    alike = one.get("role") == other.get("role") and (one.get("content") or "") == (
        other.get("content") or ""
    )
    return alike and calls(one) == calls(other)
