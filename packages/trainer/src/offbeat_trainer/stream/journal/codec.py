"""Completions as bytes: a line of JSON, then plain arrays. Exact, small, and readable without this package.

The line holds `count` numbers of tokens per completion, their request ids, how they ended, and `spans`: who made which
tokens, rows of (version, start, end). `stop_reason` is there if any has one. The arrays follow, int32 token ids and then
float32 log-probs, each over all completions, little-endian.

Older journals have no `spans`: there, int32 versions lie between the two, one a token, and log-probs are float64. They
are read as well.
"""

from __future__ import annotations

import json
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from offbeat_rollout import Completion, Finish, VersionSpan, version_spans
from offbeat_trainer.errors import ResumeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

# As json.dumps writes it; what is written here is no cycle, and to look for one costs as much as a third of the writing.
ENCODE = json.JSONEncoder(check_circular=False).encode


def pack(completions: Sequence[Completion]) -> bytes:
    """Return `completions` as bytes."""
    head: dict[str, object] = {
        "count": [one.num_tokens for one in completions],
        "request_id": [one.request_id for one in completions],
        "finish": [one.finish.value for one in completions],
        "spans": [one.spans for one in completions],
    }
    if any(one.stop_reason is not None for one in completions):
        head["stop_reason"] = [one.stop_reason for one in completions]
    tokens = [np.asarray(one.token_ids, "<i4").tobytes() for one in completions]
    logprobs = [np.asarray(one.logprobs, "<f4").tobytes() for one in completions]
    return b"".join((ENCODE(head).encode(), b"\n", *tokens, *logprobs))


def unpack(body: bytes) -> tuple[Completion, ...]:
    """Return the completions in `body`.

    Raises:
        ResumeError: `body` was not made by `pack`, or not whole.
    """
    head, _, rest = body.partition(b"\n")
    try:
        fields = json.loads(head)
        counts: list[int] = fields["count"]
        tokens, logprobs, spans = (_read if "spans" in fields else _read_unrolled)(fields, rest, counts)
        ends = pairwise(accumulate(counts, initial=0))
        reasons: list[int | str | None] = fields.get("stop_reason", [None] * len(counts))
        return tuple(
            Completion(
                request_id=name,
                token_ids=tokens[a:b],
                logprobs=logprobs[a:b],
                spans=made_by,
                finish=Finish(finish),
                stop_reason=reason,
            )
            for name, finish, made_by, reason, (a, b) in zip(
                fields["request_id"], fields["finish"], spans, reasons, ends, strict=True
            )
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ResumeError(
            f"the journal holds completions that cannot be read ({error}); without it the run can be started anew"
        ) from error


_Parts = tuple["npt.NDArray[np.int32]", "npt.NDArray[np.float32]", "list[tuple[VersionSpan, ...]]"]


def _read(fields: dict[str, Any], rest: bytes, counts: list[int]) -> _Parts:
    """Return token ids, log-probs and spans; the arrays are copies, so that `rest` need not stay."""
    total = sum(counts)
    _check_size(rest, total, 8)
    tokens = np.frombuffer(rest, "<i4", total).astype(np.int32)
    logprobs = np.frombuffer(rest, "<f4", total, offset=4 * total).astype(np.float32)
    return tokens, logprobs, [tuple(VersionSpan(*span) for span in one) for one in fields["spans"]]


def _read_unrolled(fields: dict[str, Any], rest: bytes, counts: list[int]) -> _Parts:
    del fields
    total = sum(counts)
    _check_size(rest, total, 16)
    tokens = np.frombuffer(rest, "<i4", total).astype(np.int32)
    versions: list[int] = np.frombuffer(rest, "<i4", total, offset=4 * total).tolist()
    logprobs = np.frombuffer(rest, "<f8", total, offset=8 * total).astype(np.float32)
    spans = [
        version_spans((version, len(list(run))) for version, run in groupby(versions[a:b]))
        for a, b in pairwise(accumulate(counts, initial=0))
    ]
    return tokens, logprobs, spans


def _check_size(rest: bytes, total: int, token_bytes: int) -> None:
    if len(rest) != total * token_bytes:
        raise ValueError(f"{len(rest)} bytes of arrays for {total} tokens")
