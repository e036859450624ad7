"""vLLM's own values, translated: no engine is started."""

import pytest

from offbeat_rollout import EngineStateError, Finish, GenerateRequest, SamplingParams
from offbeat_rollout.vllm.translate import completion

pytestmark = pytest.mark.vllm

REQUEST = GenerateRequest(request_id="a", prompt_ids=(1, 2), sampling=SamplingParams(max_tokens=4))


def output(spans, *, token_ids=(7, 8, 9), logprobs=(-0.5, -0.25, -0.125), finish="stop"):
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan

    answer = CompletionOutput(
        index=0,
        text="",
        token_ids=list(token_ids),
        cumulative_logprob=None,
        logprobs=None if logprobs is None else FlatLogprobs(logprobs=list(logprobs)),
        finish_reason=finish,
        stop_reason=9,
        weight_versions=None if spans is None else [WeightVersionSpan(*span) for span in spans],
    )
    return RequestOutput(
        request_id="a",
        prompt=None,
        prompt_token_ids=[1, 2],
        prompt_logprobs=None,
        outputs=[answer],
        finished=True,
        num_cached_tokens=1,
    )


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([("default", 0, 3)], [(0, 0, 3)]),
        ([("3", 0, 1), ("4", 1, 3)], [(3, 0, 1), (4, 1, 3)]),
        ([("default", 0, 1), ("0", 1, 3)], [(0, 0, 3)]),  # two labels of one version
        ([("3", 0, 3), ("4", 3, 3)], [(3, 0, 3)]),  # a label that no token followed
        (None, [(0, 0, 3)]),  # no label was ever given
    ],
)
def test_spans_stay_spans(spans, expected):
    made = completion(REQUEST, output(spans))
    assert list(made.spans) == expected
    assert (made.token_ids.tolist(), made.logprobs.tolist()) == ([7, 8, 9], [-0.5, -0.25, -0.125])
    assert (made.finish, made.stop_reason, made.num_cached_tokens) == (Finish.STOP, 9, 1)


def test_an_answer_without_tokens_is_one():
    made = completion(REQUEST, output([], token_ids=(), logprobs=None, finish="abort"))
    assert (made.num_tokens, made.spans, made.finish) == (0, (), Finish.ABORT)


@pytest.mark.parametrize(
    ("spans", "finish", "words"),
    [
        ([("tuesday", 0, 3)], "stop", "labelled 'tuesday'"),
        ([("1", 0, 3)], "error", "ended request 'a' with 'error'"),
    ],
)
def test_what_cannot_be_is_refused(spans, finish, words):
    with pytest.raises(EngineStateError, match=words):
        completion(REQUEST, output(spans, finish=finish))
