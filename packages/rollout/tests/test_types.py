import copy
import pickle
from dataclasses import FrozenInstanceError, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat_rollout import (
    Completion,
    CompletionError,
    Finish,
    GenerateRequest,
    RolloutConfig,
    SamplingParams,
    TopLogprobs,
    VersionSpan,
    version_spans,
)
from offbeat_rollout.interface import check_request
from offbeat_rollout.toolkit.routing import Router

runs_of = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=6)


def completion(runs, *, request_id="r", first=5, finish=Finish.STOP):
    versions = [version for version, count in runs for _ in range(count)]
    tokens = range(first, first + len(versions))
    return Completion.of(
        request_id=request_id,
        token_ids=tokens,
        logprobs=[-0.1 * token for token in tokens],
        policy_versions=versions,
        finish=finish,
    )


@given(runs_of)
def test_plain_sequences_and_arrays_are_one_completion(runs):
    versions = [version for version, count in runs for _ in range(count)]
    one = completion(runs)
    size = len(versions)
    other = Completion(
        request_id="r",
        token_ids=np.arange(5, 5 + size, dtype=np.int32),
        logprobs=np.array([-0.1 * token for token in range(5, 5 + size)], np.float32),
        spans=version_spans(runs),
        finish=Finish.STOP,
    )
    assert one == other
    assert hash(one) == hash(other)
    assert one.num_tokens == size
    assert one.token_ids.dtype == np.int32
    assert one.logprobs.dtype == np.float32
    assert one.policy_versions.tolist() == versions
    assert one.policy_versions.dtype == np.int64


@given(runs_of)
def test_spans_cover_every_token_once_and_change_the_version_each_time(runs):
    spans = version_spans(runs)
    written_out = [span.version for span in spans for _ in range(span.start, span.end)]
    assert written_out == [version for version, count in runs for _ in range(count)]
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])][: len(spans)]
    assert all(span.end > span.start for span in spans)
    assert all(a.version != b.version for a, b in pairwise(spans))


@given(runs_of, st.data())
def test_a_completion_that_is_cut_and_goes_on_is_the_whole_one(runs, data):
    whole = replace(completion(runs), stop_reason=7, num_cached_tokens=3)
    count = data.draw(st.integers(0, whole.num_tokens))
    begun = whole.cut(count, Finish.ABORT)
    assert (begun.num_tokens, begun.finish, begun.stop_reason) == (count, Finish.ABORT, None)
    assert begun.policy_versions.tolist() == whole.policy_versions[:count].tolist()
    rest = replace(
        whole,
        token_ids=whole.token_ids[count:].copy(),
        logprobs=whole.logprobs[count:].copy(),
        spans=version_spans((version, 1) for version in whole.policy_versions[count:].tolist()),
    )
    assert begun.followed_by(rest) == whole
    assert whole.cut(whole.num_tokens, Finish.STOP) == whole


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_it_travels_whole_and_stays_closed(way):
    one = replace(completion([(1, 2), (2, 3)]), stop_reason="\n\n", num_cached_tokens=4)
    there = way(one)
    assert there == one
    assert (there.stop_reason, there.num_cached_tokens) == ("\n\n", 4)
    assert all(isinstance(span, VersionSpan) for span in there.spans)
    with pytest.raises(ValueError, match="read-only"):
        there.token_ids[0] = 1


def test_what_is_sent_costs_eight_bytes_a_token():
    assert len(pickle.dumps(completion([(1, 8192)]), pickle.HIGHEST_PROTOCOL)) < 8 * 8192 + 500


def test_nobody_writes_into_it():
    tokens = np.array([5, 6], np.int32)
    one = replace(completion([(1, 2)]), token_ids=tokens)
    for array in (tokens, one.token_ids, one.logprobs):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 9
    with pytest.raises(FrozenInstanceError):
        one.finish = Finish.ABORT


@pytest.mark.parametrize(
    "change",
    [
        {"request_id": "s"},
        {"token_ids": np.array([5, 7], np.int32)},
        {"logprobs": np.array([0, 0], np.float32)},
        {"spans": version_spans([(1, 1), (2, 1)])},
        {"finish": Finish.LENGTH},
        {"stop_reason": 6},
    ],
)
def test_another_part_is_another_completion(change):
    one = completion([(1, 2)])
    assert one != replace(one, **change)
    assert one != "r"


def test_what_a_cache_gave_is_no_part_of_the_answer():
    one = completion([(1, 2)])
    assert one == replace(one, num_cached_tokens=2)
    assert len({one, replace(one, num_cached_tokens=2)}) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_ids": (5, 6)}, r"`token_ids` must be an array \[T\] of int32, got tuple; `Completion.of`"),
        ({"token_ids": np.array([5, 6])}, r"of int32, got int64 \[2\]"),
        ({"token_ids": np.zeros((2, 1), np.int32)}, r"got int32 \[2, 1\]"),
        ({"logprobs": np.zeros(2)}, r"`logprobs` must be an array \[T\] of float32, got float64 \[2\]"),
        ({"token_ids": np.zeros(3, np.int32)}, "3 tokens, 2 log-probs"),
        ({"logprobs": np.zeros(3, np.float32)}, "2 tokens, 3 log-probs"),
        ({"spans": ()}, "cover them without gaps"),
        ({"spans": (VersionSpan(1, 0, 1),)}, "cover them without gaps"),
        ({"spans": (VersionSpan(1, 1, 2),)}, "cover them without gaps"),
        ({"spans": (VersionSpan(1, 0, 1), VersionSpan(1, 1, 2))}, "cover them without gaps"),
        ({"spans": (VersionSpan(1, 0, 2), VersionSpan(2, 2, 2))}, "cover them without gaps"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, words):
    with pytest.raises(CompletionError, match=words):
        replace(completion([(1, 2)]), **change)


def test_plain_sequences_of_two_lengths_are_refused():
    with pytest.raises(CompletionError, match="2 tokens and 1 versions"):
        Completion.of(
            request_id="r", token_ids=(1, 2), logprobs=(0.0, 0.0), policy_versions=(1,), finish=Finish.STOP
        )


def test_a_token_beyond_int32_is_no_token():
    with pytest.raises(OverflowError):
        Completion.of(
            request_id="r", token_ids=(1 << 31,), logprobs=(0.0,), policy_versions=(1,), finish=Finish.STOP
        )


def tops(first, count):
    ids = np.arange(first, first + 2 * count, dtype=np.int32).reshape(count, 2)
    return TopLogprobs(token_ids=ids, logprobs=-ids.astype(np.float32))


def test_the_likeliest_tokens_are_cut_joined_compared_and_sent_with_their_completion():
    whole = replace(completion([(1, 4)]), top_logprobs=tops(0, 4))
    begun = whole.cut(1, Finish.ABORT)
    rest = replace(completion([(1, 3)], first=6), top_logprobs=tops(2, 3))
    assert begun.top_logprobs == tops(0, 1)
    assert begun.followed_by(rest) == whole
    assert begun.followed_by(replace(rest, top_logprobs=None)).top_logprobs is None
    assert whole != replace(whole, top_logprobs=tops(1, 4))
    back = pickle.loads(pickle.dumps(whole))
    assert back == whole
    with pytest.raises(ValueError, match="read-only"):
        back.top_logprobs.logprobs[0, 0] = 1


def test_likeliest_tokens_that_do_not_fit_are_refused():
    with pytest.raises(CompletionError, match="4 tokens, `top_logprobs` of 3"):
        replace(completion([(1, 4)]), top_logprobs=tops(0, 3))
    with pytest.raises(CompletionError, match=r"got int32 \[2, 2\] and float32 \[3, 2\]"):
        TopLogprobs(token_ids=tops(0, 2).token_ids, logprobs=tops(0, 3).logprobs)


@pytest.mark.parametrize("prompt", [[3, 1, 4], np.array([3, 1, 4], np.int32), range(3, 6)], ids=str)
def test_a_prompt_is_a_tuple_whatever_it_was_given_as(prompt):
    given = GenerateRequest(request_id="r", prompt_ids=prompt, sampling=SamplingParams(max_tokens=2))
    assert given.prompt_ids == tuple(int(token) for token in prompt)
    assert {type(token) for token in given.prompt_ids} == {int}
    check_request(given, RolloutConfig(model_path="m", max_model_len=9), 9)
    assert Router(["a"]).route([given], ["a"]) == {"a": [0]}
    assert pickle.loads(pickle.dumps(given)) == given


def test_a_prompt_that_is_a_tuple_stays_that_one():
    prompt = (3, 1, 4)
    given = GenerateRequest(request_id="r", prompt_ids=prompt, sampling=SamplingParams(max_tokens=2))
    assert given.prompt_ids is prompt


def test_what_is_read_of_a_message_keeps_nothing_of_it_alive():
    """Ray hands over arrays as views of its object store, which then cannot let go of them."""
    made = Completion.of(
        request_id="r", token_ids=(1, 2), logprobs=(-1.0, -1.0), policy_versions=(1, 1), finish=Finish.STOP
    )
    made = replace(made, routed_experts=np.zeros((3, 2, 2), np.int16))
    buffers = []
    message = pickle.dumps(made, protocol=5, buffer_callback=buffers.append)
    read = pickle.loads(message, buffers=buffers)
    assert read == made
    assert buffers, "experts travel beside the message"
    assert not any(
        np.shares_memory(read.routed_experts, np.frombuffer(one.raw(), np.uint8)) for one in buffers
    )
