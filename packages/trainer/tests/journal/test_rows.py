"""Bytes of a journal that come back as they went, and those of versions before."""

import json
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat_rollout import Completion, Finish
from offbeat_trainer.data.types import Limit, Trajectory, Turn
from offbeat_trainer.errors import ResumeError
from offbeat_trainer.loops.journal import pack, unpack


@given(
    st.lists(
        st.builds(
            lambda tokens, finish, name, reason: replace(
                Completion.of(
                    request_id=name,
                    token_ids=[token for token, _, _ in tokens],
                    logprobs=[logprob for _, logprob, _ in tokens],
                    policy_versions=[version for _, _, version in tokens],
                    finish=finish,
                ),
                stop_reason=reason,
            ),
            st.lists(
                st.tuples(
                    st.integers(0, 2**31 - 1),
                    st.floats(allow_nan=False, width=32),
                    st.integers(0, 3) | st.integers(0, 2**40),
                ),
                max_size=5,
            ),
            st.sampled_from(Finish),
            st.text(max_size=5),
            st.none() | st.integers(0, 2**31 - 1) | st.text(max_size=3),
        ),
        max_size=4,
    )
)
def test_completions_come_back_to_the_bit(completions):
    plain = tuple(map(Trajectory.of, completions))
    back = unpack(pack(plain))
    assert back == plain
    for one, other in zip(back, completions, strict=True):
        assert one.logprobs.tobytes() == other.logprobs.tobytes(), "-0.0 is not 0.0"


def test_what_older_versions_wrote_is_read():
    """Then every token had a version of its own, and log-probs were float64."""
    head = {"count": [3, 0, 2], "request_id": ["a", "b", "c"], "finish": ["stop", "abort", "length"]}
    arrays = (
        struct.pack("<5i", 1, 2, 3, 4, 5), struct.pack("<5i", 7, 7, 8, 8, 8),
        struct.pack("<5d", -0.1, -0.2, -0.3, -0.4, -0.5),
    )  # fmt: skip
    assert unpack(json.dumps(head).encode() + b"\n" + b"".join(arrays)) == (
        written("a", (1, 2, 3), (-0.1, -0.2, -0.3), (7, 7, 8), Finish.STOP),
        written("b", (), (), (), Finish.ABORT),
        written("c", (4, 5), (-0.4, -0.5), (8, 8), Finish.LENGTH),
    )


def written(name, token_ids, logprobs, policy_versions, finish):
    return Trajectory.of(
        Completion.of(
            request_id=name,
            token_ids=token_ids,
            logprobs=logprobs,
            policy_versions=policy_versions,
            finish=finish,
        )
    )


turns = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2**31 - 1), max_size=3),
        st.lists(st.integers(0, 2**31 - 1), max_size=4),
        st.floats(allow_nan=False, allow_infinity=False),
    ),
    max_size=3,
)


@given(st.lists(st.tuples(turns, st.sampled_from([*Finish, *Limit])), max_size=4))
def test_trajectories_of_several_turns_come_back_to_the_bit(drawn):
    whole = tuple(
        Trajectory(
            turns=tuple(
                Turn(completion=completion_of(sampled), observed=np.array(observed, np.int32), reward=reward)
                for observed, sampled, reward in some
            ),
            finish=finish,
        )
        for some, finish in drawn
    )
    back = unpack(pack(whole))
    assert back == whole
    for one, other in zip(back, whole, strict=True):
        assert type(one.finish) is type(other.finish)
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.token_ids.dtype == np.int32


def completion_of(token_ids):
    return Completion.of(
        request_id="r",
        token_ids=token_ids,
        logprobs=[-0.5] * len(token_ids),
        policy_versions=[3] * len(token_ids),
        finish=Finish.STOP,
    )


def test_what_one_version_before_wrote_is_read_and_a_later_one_is_told_apart():
    """Then there were no turns, and no `format`."""
    head, _, arrays = pack([written("a", (1, 2), (-0.5, -0.25), (7, 8), Finish.STOP)]).partition(b"\n")
    fields = json.loads(head)
    assert fields.pop("format") == 2
    assert unpack(json.dumps(fields).encode() + b"\n" + arrays) == (
        written("a", (1, 2), (-0.5, -0.25), (7, 8), Finish.STOP),
    )
    with pytest.raises(ResumeError, match=r"written by a later version \(format 5, this one reads 4\)"):
        unpack(json.dumps({**fields, "format": 5}).encode() + b"\n" + arrays)


WHOLE = pack([written("a", (1, 2), (-0.5, -0.25), (7, 8), Finish.STOP)])


@pytest.mark.parametrize("body", [b"", b"{}", b"[]\n", WHOLE[:-1], WHOLE + b"x"])
def test_bytes_that_are_not_whole_are_refused(body):
    with pytest.raises(ResumeError, match="cannot be read"):
        unpack(body)
