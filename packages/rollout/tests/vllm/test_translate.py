"""What vLLM's own values say in ours; nothing is started."""

from __future__ import annotations

import pytest

from offbeat_rollout import GenerateRequest, SamplingParams
from offbeat_rollout.vllm.engine import completion, sampling_params

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(("num_top", "count"), [(0, 3), (2, 3), (2, 0)])
def test_drawn_and_likeliest_tokens(num_top, count):
    from vllm.logprobs import FlatLogprobs, append_logprobs_for_next_position
    from vllm.outputs import CompletionOutput, RequestOutput

    request = GenerateRequest(
        request_id="r", prompt_ids=(1,), sampling=SamplingParams(max_tokens=9, top_logprobs=num_top)
    )
    assert sampling_params(request, ()).logprobs == num_top
    flat = FlatLogprobs()
    for position in range(count):
        # Position by position as vLLM's engine does, from a batch in which somebody asked for three.
        ids, values = [50 + position, 7, 8, 9], [-3.0 - position, -1.0, -2.0, -2.5]
        append_logprobs_for_next_position(flat, ids, values, [None] * 4, rank=4, num_logprobs=num_top)
    tokens = list(range(50, 50 + count))
    answer = CompletionOutput(0, "", tokens, None, flat, finish_reason="length" if count else "abort")
    done = completion(request, RequestOutput("r", None, [1], None, [answer], finished=True))
    assert done.token_ids.tolist() == tokens
    assert done.logprobs.tolist() == [-3.0 - position for position in range(count)]
    if not num_top:
        assert done.top_logprobs is None
        return
    assert done.top_logprobs.token_ids.tolist() == [[7, 8]] * count
    assert done.top_logprobs.logprobs.tolist() == [[-1.0, -2.0]] * count
