"""What a server streams: cut into events, and taken for a request."""

from __future__ import annotations

import pytest

from offbeat_rollout import GenerateRequest, SamplingParams
from offbeat_rollout.sglang.client import events
from offbeat_rollout.sglang.running import Running


async def in_pieces(said, size):
    for start in range(0, len(said), size):
        yield said[start : start + size]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
async def test_events_are_the_same_however_they_are_cut(size):
    said = b"data: 1\n\ndata: a\nb\n\n\n\ndata: [DONE]\n\nrest"
    assert [one async for one in events(in_pieces(said, size))] == [
        b"data: 1",
        b"data: a\nb",
        b"",
        b"data: [DONE]",
    ]


async def test_a_large_event_in_many_pieces_is_copied_once():
    """Two million pieces of a byte: copied for each piece, that would be two terabytes."""
    said = b"x" * 2_000_000
    assert [one async for one in events(in_pieces(said + b"\n\n", 1))] == [said]


@pytest.mark.parametrize("num_top", [0, 2])
@pytest.mark.parametrize("num_before", [1, 3])
@pytest.mark.parametrize("num_more", [0, 2], ids=lambda num: f"{num}_unread")
def test_what_an_abort_repeats_is_not_taken_again(num_before, num_more, num_top):
    """Of a request without room, SGLang sends the last token again with all log-probs, behind what was not sent yet."""

    def said(tokens, drawn, reason=None, total=None):
        logprobs = {
            "output_token_logprobs": [(-0.5 - token, token, None) for token in drawn],
            "output_top_logprobs": [[(-0.5 - token, token, None)] * 2 for token in drawn],
        }
        total = len(drawn) if total is None else total
        meta = {**logprobs, "finish_reason": reason, "completion_tokens": total}
        return {"output_ids": tokens, "meta_info": meta}

    sampling = SamplingParams(max_tokens=9, top_logprobs=num_top)
    request = GenerateRequest(request_id="one", prompt_ids=(3,), sampling=sampling)
    running = Running(request, truncated=False)
    every = list(range(num_before + num_more))
    before, more = every[:num_before], every[num_before:]
    running.take(said(before, before))
    end = said([*more, every[-1]], [*more, *every], {"type": "abort"}, len(every))
    end["meta_info"]["weight_versions"] = [{"version": "0", "start": 0, "end": len(every)}]
    running.take(end)
    done = running.completion(0)
    assert done.token_ids.tolist() == every
    assert done.logprobs.tolist() == [-0.5 - token for token in every]
    assert [span.end for span in done.spans] == [len(every)]
