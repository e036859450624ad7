"""Completions as bytes: a line of JSON, then plain arrays. Exact, small, and readable without this package.

The line holds `count` numbers of tokens per completion, their request ids and how they ended. The arrays follow in the
order int32 token ids, int32 versions, float64 log-probs, each over all completions, little-endian.
"""

from __future__ import annotations

import json
import sys
from array import array
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, TypeVar

from offbeat_rollout import Completion, Finish
from offbeat_trainer.errors import ResumeError

if TYPE_CHECKING:
    from collections.abc import Sequence

_Number = TypeVar("_Number", int, float)

assert array("i").itemsize == 4


def pack(completions: Sequence[Completion]) -> bytes:
    """Return `completions` as bytes."""
    head = {
        "count": [len(one.token_ids) for one in completions],
        "request_id": [one.request_id for one in completions],
        "finish": [one.finish.value for one in completions],
    }
    arrays = (
        array("i", chain.from_iterable(one.token_ids for one in completions)),
        array("i", chain.from_iterable(one.policy_versions for one in completions)),
        array("d", chain.from_iterable(one.logprobs for one in completions)),
    )
    return b"\n".join([json.dumps(head).encode(), b"".join(map(_little_endian, arrays))])


def unpack(body: bytes) -> tuple[Completion, ...]:
    """Return the completions in `body`.

    Raises:
        ResumeError: `body` was not made by `pack`, or not whole.
    """
    head, _, rest = body.partition(b"\n")
    try:
        fields = json.loads(head)
        counts: list[int] = fields["count"]
        total = sum(counts)
        if len(rest) != total * 16:
            raise ValueError(f"{len(rest)} bytes of arrays for {total} tokens")
        tokens = _read(array("i"), rest[: total * 4])
        versions = _read(array("i"), rest[total * 4 : total * 8])
        logprobs = _read(array("d"), rest[total * 8 :])
        ends = list(pairwise(accumulate(counts, initial=0)))
        return tuple(
            Completion(
                request_id=name,
                token_ids=tuple(tokens[a:b]),
                logprobs=tuple(logprobs[a:b]),
                policy_versions=tuple(versions[a:b]),
                finish=Finish(finish),
            )
            for name, finish, (a, b) in zip(fields["request_id"], fields["finish"], ends, strict=True)
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ResumeError(
            f"the journal holds completions that cannot be read ({error}); without it the run can be started anew"
        ) from error


def _little_endian(values: array[int] | array[float]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _read(values: array[_Number], data: bytes) -> array[_Number]:
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
