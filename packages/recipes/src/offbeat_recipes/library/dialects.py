"""What clients send and are sent: OpenAI's chat completions and completions, Anthropic's messages, vLLM's tokens in and out.

Each answer has, beside what its dialect has, `token_ids`, `token_logprobs` and `policy_versions`, one for each token.
"""

from __future__ import annotations

import json
import re
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from offbeat_rollout import Finish

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping

    from aiohttp import web

    from offbeat_rollout import Completion, SamplingParams

MODEL = "policy"
_OF_THE_RUN = ("temperature", "top_p", "top_k", "stop", "logit_bias", "presence_penalty", "frequency_penalty")
_MOST = ("max_completion_tokens", "max_tokens")
REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length"}
_OF_ANTHROPIC = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_READ = (
    "text",
    "input_text",
    "output_text",
    "refusal",
    "thinking",
    "redacted_thinking",
    "tool_use",
    "tool_result",
)
_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def reply(text: str, number: int) -> dict[str, Any]:
    """Return the assistant's message of `text`, with the calls of tools in it, as Qwen and Hermes write them, taken out."""
    calls: list[dict[str, Any]] = []
    for index, found in enumerate(_TOOL_CALL.findall(text)):
        try:
            call = json.loads(found)
            function = {"name": str(call["name"]), "arguments": json.dumps(call.get("arguments") or {})}
        except (ValueError, KeyError, TypeError):
            return {"role": "assistant", "content": text}
        calls.append({"id": f"call_{number}_{index}", "type": "function", "function": function})
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": _TOOL_CALL.sub("", text).strip() or None, "tool_calls": calls}


def own_of(completion: Completion) -> dict[str, Any]:
    """Return what no dialect has: tokens, the sampler's own log-probs, and versions."""
    return {
        "token_ids": completion.token_ids.tolist(),
        "token_logprobs": completion.logprobs.tolist(),
        "policy_versions": completion.policy_versions.tolist(),
    }


def body(kind: str, choice: dict[str, Any], ids: tuple[int, ...], completion: Completion) -> dict[str, Any]:
    """Return an answer of OpenAI's kind."""
    usage = {
        "prompt_tokens": len(ids),
        "completion_tokens": completion.num_tokens,
        "total_tokens": len(ids) + completion.num_tokens,
    }
    head = {"id": completion.request_id, "object": kind, "created": int(time.time()), "model": MODEL}
    return head | {"choices": [choice | own_of(completion)], "usage": usage, "prompt_token_ids": list(ids)}


async def payload_of(request: web.Request) -> dict[str, Any]:
    """Return the JSON object that a request is."""
    try:
        payload: object = await request.json()
    except ValueError as error:
        raise refused(400, f"no JSON: {error}") from error
    if not isinstance(payload, dict):
        raise refused(400, "expected a JSON object")
    return cast("dict[str, Any]", payload)


async def sent(request: web.Request, payload: Mapping[str, Any], body: dict[str, Any]) -> web.StreamResponse:
    """Answer with `body`, as one piece of a stream where that was asked for."""
    if not payload.get("stream"):
        return answered(body)
    (choice,) = body["choices"]
    if "message" in choice:
        calls = [
            dict(call, index=index) for index, call in enumerate(choice["message"].get("tool_calls", []))
        ]
        choice = {**choice, "delta": choice["message"] | ({"tool_calls": calls} if calls else {})}
        del choice["message"]
    piece = body | {
        "object": body["object"].removesuffix(".chunk") + (".chunk" if "delta" in choice else ""),
        "choices": [choice],
    }
    return await _streamed(request, [f"data: {json.dumps(piece)}", "data: [DONE]"])


async def _streamed(request: web.Request, pieces: Iterable[str]) -> web.StreamResponse:
    from aiohttp import web

    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for piece in pieces:
        await response.write(f"{piece}\n\n".encode())
    await response.write_eof()
    return response


def answered(body: dict[str, Any]) -> web.Response:
    """Return `body` as JSON."""
    from aiohttp import web

    return web.json_response(body)


def refused(status: int, message: str) -> Exception:
    """Return what is raised to refuse a request with a sentence."""
    from aiohttp import web

    kinds = {400: web.HTTPBadRequest, 401: web.HTTPUnauthorized, 503: web.HTTPServiceUnavailable}
    kind = "invalid_request_error" if status < 500 else "server_error"
    text = json.dumps({"error": {"message": message, "type": kind, "code": status}})
    return kinds[status](text=text, content_type="application/json")


@contextmanager
def reading() -> Generator[None]:
    """Refuse a request in which what is read in the block is not there, or of another kind."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise refused(400, f"the request cannot be read: {type(error).__name__}: {error}") from error


def messages_of(payload: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat as templates take them: content as one text, arguments of tool calls as mappings.

    Called in `reading`.
    """
    messages = cast("list[dict[str, Any]]", payload.get("messages") or [])
    if not messages:
        raise refused(400, "`messages` is empty")
    return [_for_template(message) for message in messages]


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    made = {**message, "role": message["role"]}
    if isinstance(message.get("content"), list):
        made["content"] = _text_of(message["content"])
    if message.get("tool_calls"):
        made["tool_calls"] = [_with_mapping(call) for call in message["tool_calls"]]
    return made


def _with_mapping(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    read = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    return {**call, "function": {**call["function"], "arguments": read}}


def most_tokens(payload: Mapping[str, Any], sampling: SamplingParams) -> int:
    """Return how many tokens an answer may have, at most the run's; what else the run decides may not be asked otherwise."""
    for name in _OF_THE_RUN:
        same: tuple[object, ...] = (
            None,
            [],
            {},
            getattr(sampling, name, None),
            0 if "penalty" in name else None,
        )
        if payload.get(name) not in same:
            raise refused(
                400, f"`{name}` is the run's: it trains what is sampled by its own settings; leave it out"
            )
    if payload.get("n") not in (None, 1):
        raise refused(400, "`n` is 1: ask several times")
    most = next((payload[name] for name in _MOST if payload.get(name) is not None), None)
    if most is not None and (not isinstance(most, int) or most < 1):
        raise refused(400, f"`max_tokens` must be a number of at least 1, got {most!r}")
    return sampling.max_tokens if most is None else min(most, sampling.max_tokens)


def tokens_of(value: object, name: str) -> tuple[int, ...]:
    """Return token ids as they were given."""
    ids = cast("list[object]", value) if isinstance(value, list) else []
    if not ids or not all(isinstance(one, int) for one in ids):
        raise refused(
            400, f"`{name}` must be a list of token ids" + (", or one text" if name == "prompt" else "")
        )
    return tuple(cast("list[int]", ids))


def from_anthropic(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request of Anthropic's as one of OpenAI's chat completions."""
    turns: list[dict[str, Any]] = cast("list[dict[str, Any]]", payload.get("messages") or [])
    system = _text_of(payload.get("system"))
    messages = [{"role": "system", "content": system}] if system else []
    messages += [made for message in turns for made in _messages_of(message)]
    tools = [
        {
            "type": "function",
            "function": {
                "name": one["name"],
                "description": one.get("description", ""),
                "parameters": one["input_schema"],
            },
        }
        for one in cast("list[dict[str, Any]]", payload.get("tools") or [])
    ]
    return {**payload, "messages": messages, "tools": tools}


def _messages_of(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    content: Any = message.get("content")
    blocks = cast("list[dict[str, Any]]", content) if isinstance(content, list) else []
    for block in blocks:
        if block.get("type") == "tool_result":
            yield {
                "role": "tool",
                "content": _text_of(block.get("content")),
                "tool_call_id": block.get("tool_use_id"),
            }
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": json.dumps(block.get("input") or {})},
        }
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    text = _text_of(content)
    if text or calls or not blocks:
        yield {"role": message.get("role"), "content": text or None if calls else text} | (
            {"tool_calls": calls} if calls else {}
        )


def _text_of(content: Any) -> str:  # noqa: ANN401 text, or blocks
    if not isinstance(content, list):
        return str(content or "")
    blocks = cast("list[dict[str, Any]]", content)
    if foreign := [str(block.get("type")) for block in blocks if block.get("type") not in _READ]:
        raise refused(400, f"the policy reads text, and no `{foreign[0]}`")
    return "".join(str(block.get("text", "")) for block in blocks)


def to_anthropic(
    message: Mapping[str, Any], reason: str, ids: tuple[int, ...], completion: Completion
) -> dict[str, Any]:
    """Return the assistant's message of a chat as an answer of Anthropic's."""
    calls: list[dict[str, Any]] = message.get("tool_calls", [])
    content: list[dict[str, Any]] = (
        [{"type": "text", "text": message["content"]}] if message["content"] else []
    )
    content += [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": json.loads(call["function"]["arguments"]),
        }
        for call in calls
    ]
    return {
        "id": completion.request_id,
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": content,
        "stop_reason": _OF_ANTHROPIC[reason],
        "stop_sequence": None,
        "usage": {"input_tokens": len(ids), "output_tokens": completion.num_tokens},
        "prompt_token_ids": list(ids),
        **own_of(completion),
    }


async def sent_to_anthropic(
    request: web.Request, payload: Mapping[str, Any], whole: dict[str, Any]
) -> web.StreamResponse:
    """Answer with `whole`, as the events of a stream where that was asked for."""
    if not payload.get("stream"):
        return answered(whole)
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": whole | {"content": [], "stop_reason": None}}
    ]
    for index, block in enumerate(whole["content"]):
        is_text = block["type"] == "text"
        empty = block | ({"text": ""} if is_text else {"input": {}})
        piece = (
            {"type": "text_delta", "text": block["text"]}
            if is_text
            else {
                "type": "input_json_delta",
                "partial_json": json.dumps(block["input"]),
            }
        )
        events += [
            {"type": "content_block_start", "index": index, "content_block": empty},
            {"type": "content_block_delta", "index": index, "delta": piece},
            {"type": "content_block_stop", "index": index},
        ]
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    events += [{"type": "message_delta", "delta": ended, "usage": whole["usage"]}, {"type": "message_stop"}]
    return await _streamed(request, [f"event: {one['type']}\ndata: {json.dumps(one)}" for one in events])
