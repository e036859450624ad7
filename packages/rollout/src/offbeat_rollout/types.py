"""The values rollout hands out. T = tokens of a completion, P = tokens of a prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np

from offbeat_rollout.errors import CompletionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    Experts = npt.NDArray[np.int16]
    """[N, L, K]. Fed were the prompt's tokens and the completion's but its last: the first rows are the prompt's."""


def close(request_id: str, experts: Experts, num_tokens: int) -> None:
    """Take an array over: nobody writes into it any more.

    Raises:
        CompletionError: it is of another dtype or shape than a completion of `num_tokens` can have.
    """
    if experts.dtype != np.int16 or experts.ndim != 3 or len(experts) < num_tokens or not num_tokens:
        raise CompletionError(
            f"{request_id!r}: `routed_experts` must be int16 [tokens that were fed, layers, experts of a token], got "
            f"{experts.dtype} {list(experts.shape)} for {num_tokens} tokens"
        )
    experts.setflags(write=False)


def cut(experts: Experts | None, num_tokens: int, count: int) -> Experts | None:
    """Return those of a completion of `num_tokens` that is cut to its first `count`; None where nothing is left of it."""
    kept = min(count, num_tokens)
    return None if experts is None or not kept else experts[: len(experts) - (num_tokens - kept)]


def followed_by(first: tuple[Experts | None, int], more: tuple[Experts | None, int]) -> Experts | None:
    """Return those of a completion and what followed it, each with its number of tokens: as tokens were sampled.

    The prompt of `more` is what `first` speaks of and one token. A part without tokens, which says nothing, takes nothing away.
    """
    (begun, num_begun), (rest, num_rest) = first, more
    if not num_begun or not num_rest:
        return rest if num_rest else begun
    return None if begun is None or rest is None else np.concatenate((begun, rest[len(begun) :]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopLogprobs:
    """The K most likely tokens at each position, likeliest first, of the distribution that was drawn from.

    Their log-probs are as `Completion.logprobs`: after temperature and truncation, -inf for a token that truncation leaves
    out; of greedy requests at temperature 1. The token that was drawn need not be among them. Nobody may write into these.

    Raises:
        CompletionError: arrays of other dtypes or shapes.
    """

    token_ids: npt.NDArray[np.int32]  # [T, K]
    logprobs: npt.NDArray[np.float32]  # [T, K]

    def __post_init__(self) -> None:
        ids, values = self.token_ids, self.logprobs
        if ids.shape != values.shape or ids.ndim != 2 or (ids.dtype, values.dtype) != (np.int32, np.float32):
            raise CompletionError(
                f"expected int32 ids and float32 log-probs [T, K] of one shape, got {ids.dtype} {list(ids.shape)} and "
                f"{values.dtype} {list(values.shape)}"
            )
        ids.setflags(write=False)
        values.setflags(write=False)

    def cut(self, count: int) -> TopLogprobs:
        """Return the first `count` positions."""
        return TopLogprobs(token_ids=self.token_ids[:count], logprobs=self.logprobs[:count])

    def followed_by(self, more: TopLogprobs) -> TopLogprobs:
        """Return these positions and those of `more`, of the same K."""
        return TopLogprobs(
            token_ids=np.concatenate((self.token_ids, more.token_ids)),
            logprobs=np.concatenate((self.logprobs, more.logprobs)),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TopLogprobs):
            return NotImplemented
        return np.array_equal(self.token_ids, other.token_ids) and np.array_equal(
            self.logprobs, other.logprobs
        )

    def __hash__(self) -> int:
        return hash((self.token_ids.tobytes(), self.logprobs.tobytes()))

    def __reduce__(self) -> tuple[object, ...]:
        return _read_top_logprobs, (self.token_ids, self.logprobs)


def _read_top_logprobs(token_ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]) -> TopLogprobs:
    return TopLogprobs(token_ids=token_ids, logprobs=logprobs)


INT32, FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)

WeightSpec: TypeAlias = tuple[str, tuple[int, ...], str]
"""Name, shape and dtype name ("float32") of one tensor of an update."""


class Finish(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class PauseMode(StrEnum):
    """What happens to running requests at a pause.

    KEEP freezes them where they are; ABORT ends them with `Finish.ABORT` and what they have; WAIT lets them end.
    """

    KEEP = "keep"
    ABORT = "abort"
    WAIT = "wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample. `temperature` 0 is greedy, else at least 0.01; `top_k` -1 and `top_p` 1 are off.

    `seed` makes one request reproducible, whatever else is in the batch. `top_logprobs` asks for the log-probs of so many
    most likely tokens at each position, beside the drawn token's own. The token whose text completes one of `stop` ends the
    completion and is its last; texts are those of the completion alone, special tokens included. An engine takes them that
    was started with `RolloutConfig.stop_strings`.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int | None = None
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One completion to make from `prompt_ids` [P]; token in, token out.

    Requests with the same `session` go to the same replica while that is fair: the turns of one trajectory, say, whose
    prompts grow. A list or an array of token ids is made a tuple: who sends a prompt many times gives one tuple.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    session: str | None = None

    def __post_init__(self) -> None:
        if type(self.prompt_ids) is not tuple:
            object.__setattr__(self, "prompt_ids", tuple(int(token) for token in self.prompt_ids))


class VersionSpan(NamedTuple):
    """Tokens `start` to `end`, that one left out, were made by the weights of `version`."""

    version: int
    start: int
    end: int


def version_spans(runs: Iterable[tuple[int, int]]) -> tuple[VersionSpan, ...]:
    """Return the spans of `runs` (version, number of tokens) laid end to end: neighbours of one version are one span."""
    spans: list[VersionSpan] = []
    end = 0
    for version, count in runs:
        if count == 0:
            continue
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, end + count)
        else:
            spans.append(VersionSpan(version, end, end + count))
        end += count
    return tuple(spans)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """What one request gave. The arrays are handed over: nobody may write into them from then on.

    `logprobs` are the sampler's own, after temperature and truncation; for greedy requests they are taken at
    temperature 1. `spans` names the weights that made the tokens: every token once, in order, neighbours of different
    versions. A token that ended the completion (end of sequence) is part of `token_ids`. `stop_reason` is the token or
    the string that ended it and `num_cached_tokens` how much of the prompt came from a cache, where the adapter says.

    Completions are equal if all but `num_cached_tokens` is, which tells of the way there and not of the answer. One
    travels by pickle as a few strings of bytes.

    Raises:
        CompletionError: arrays of other dtypes or lengths, or spans that leave tokens out; `of` takes plain sequences.
    """

    request_id: str
    token_ids: npt.NDArray[np.int32]  # [T]
    logprobs: npt.NDArray[np.float32]  # [T]
    spans: tuple[VersionSpan, ...]
    finish: Finish
    stop_reason: int | str | None = None
    num_cached_tokens: int | None = None
    top_logprobs: TopLogprobs | None = None  # where the request asked for them
    routed_experts: npt.NDArray[np.int16] | None = (
        None  # [P + T - 1, L, K], where `RolloutConfig.record_experts`
    )

    def __post_init__(self) -> None:
        _close(self.request_id, "token_ids", self.token_ids, INT32)
        _close(self.request_id, "logprobs", self.logprobs, FLOAT32)
        self._check_spans()
        if self.routed_experts is not None:
            close(self.request_id, self.routed_experts, self.num_tokens)
        if self.top_logprobs is not None and len(self.top_logprobs.token_ids) != self.num_tokens:
            raise CompletionError(
                f"{self.request_id!r}: {self.num_tokens} tokens, `top_logprobs` of {len(self.top_logprobs.token_ids)}"
            )

    @classmethod
    def of(
        cls,
        *,
        request_id: str,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        policy_versions: Sequence[int],
        finish: Finish,
        top_logprobs: TopLogprobs | None = None,
    ) -> Completion:
        """Return a completion from plain sequences, one entry a token; log-probs are rounded to float32.

        Raises:
            CompletionError: the three are of different lengths.
        """
        if len(policy_versions) != len(token_ids):
            raise CompletionError(
                f"{request_id!r}: {len(token_ids)} tokens and {len(policy_versions)} versions; give one of each a token"
            )
        return cls(
            request_id=request_id,
            token_ids=np.array(token_ids, INT32),
            logprobs=np.array(logprobs, FLOAT32),
            spans=version_spans((int(version), len(list(run))) for version, run in groupby(policy_versions)),
            finish=finish,
            top_logprobs=top_logprobs,
        )

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def policy_versions(self) -> npt.NDArray[np.int64]:
        """The version of the weights that made each token [T], written out."""
        versions = np.array([span.version for span in self.spans], np.int64)
        return versions.repeat(np.array([span.end - span.start for span in self.spans], np.int64))

    def cut(self, count: int, finish: Finish) -> Completion:
        """Return the first `count` tokens as a completion that ended by `finish`."""
        kept = ((span.version, max(0, min(span.end, count) - span.start)) for span in self.spans)
        return replace(
            self,
            token_ids=self.token_ids[:count],
            logprobs=self.logprobs[:count],
            spans=version_spans(kept),
            finish=finish,
            stop_reason=self.stop_reason if finish is self.finish else None,
            top_logprobs=None if self.top_logprobs is None else self.top_logprobs.cut(count),
            routed_experts=cut(self.routed_experts, self.num_tokens, count),
        )

    def followed_by(self, more: Completion) -> Completion:
        """Return `more`, the answer to a request that went on after these tokens, with these in front."""
        runs = ((span.version, span.end - span.start) for one in (self, more) for span in one.spans)
        tops, more_tops = self.top_logprobs, more.top_logprobs
        return replace(
            more,
            token_ids=np.concatenate((self.token_ids, more.token_ids)),
            logprobs=np.concatenate((self.logprobs, more.logprobs)),
            spans=version_spans(runs),
            top_logprobs=None if tops is None or more_tops is None else tops.followed_by(more_tops),
            routed_experts=followed_by(
                (self.routed_experts, self.num_tokens), (more.routed_experts, more.num_tokens)
            ),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Completion):
            return NotImplemented
        mine = (self.request_id, self.spans, self.finish, self.stop_reason)
        return (
            mine == (other.request_id, other.spans, other.finish, other.stop_reason)
            and np.array_equal(self.token_ids, other.token_ids)
            and np.array_equal(self.logprobs, other.logprobs)
            and self.top_logprobs == other.top_logprobs
            and np.array_equal(self.routed_experts, other.routed_experts)  # pyright: ignore[reportArgumentType] # or None
        )

    def __hash__(self) -> int:
        return hash((self.request_id, self.spans, self.finish, self.token_ids.tobytes()))

    def __reduce__(self) -> tuple[object, ...]:
        # As bytes, not as arrays: two short objects take less time to be read than the arrays' own protocol, what comes
        # of them cannot be written to, and nothing of the message is kept alive.
        spans = tuple(map(tuple, self.spans))
        data = (self.token_ids.tobytes(), self.logprobs.tobytes())
        more = (self.stop_reason, self.num_cached_tokens, self.top_logprobs, self.routed_experts)
        return _read, (self.request_id, *data, spans, self.finish, *more)

    def _check_spans(self) -> None:
        end, before = 0, None
        for version, start, stop in self.spans:
            if start != end or stop <= start or version == before:
                break
            end, before = stop, version
        else:
            if end == len(self.token_ids) == len(self.logprobs):
                return
        raise CompletionError(
            f"{self.request_id!r}: {len(self.token_ids)} tokens, {len(self.logprobs)} log-probs, spans {self.spans}; "
            "expected one log-prob a token and spans that cover them without gaps (`version_spans` makes such)"
        )


def _read(
    request_id: str,
    token_ids: bytes,
    logprobs: bytes,
    spans: Iterable[tuple[int, int, int]],
    finish: Finish,
    *more: Any,  # noqa: ANN401 the four fields below
) -> Completion:
    stop_reason, num_cached_tokens, top_logprobs, experts = more
    return Completion(
        request_id=request_id,
        token_ids=np.frombuffer(token_ids, INT32),
        logprobs=np.frombuffer(logprobs, FLOAT32),
        spans=tuple(VersionSpan(*span) for span in spans),
        finish=finish,
        stop_reason=stop_reason,
        num_cached_tokens=num_cached_tokens,
        top_logprobs=top_logprobs,
        routed_experts=None if experts is None else experts.copy(),  # a view would keep the whole message
    )


def _close(request_id: str, name: str, values: object, dtype: np.dtype[Any]) -> None:
    """Take an array over: nobody writes into it any more."""
    if isinstance(values, np.ndarray):
        array = cast("npt.NDArray[Any]", values)
        if array.dtype == dtype and array.ndim == 1:
            array.setflags(write=False)
            return
        got = f"{array.dtype} {list(array.shape)}"
    else:
        got = type(values).__name__
    raise CompletionError(
        f"{request_id!r}: `{name}` must be an array [T] of {dtype}, got {got}; `Completion.of` takes plain sequences"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Answer to "are you there?": the version served, requests running, and words for a person.

    `version` is None while there are no weights. `tokens_made` tells progress: it rises while the engine generates. None:
    the adapter cannot tell.
    """

    ok: bool
    version: int | None
    num_running: int
    detail: str = ""
    tokens_made: int | None = None
    paused: bool = False


class RolloutFeature(StrEnum):
    """What adapters may have and users ask for. An adapter adds names of its own beside these as plain strings."""

    SEED = "seed"  # requests with a seed are reproducible
    PAUSE = "pause"
    ABORT = "abort"
    RECOMPUTE_KV = "recompute_kv"  # of requests under way, at an update
    SLEEP_1 = "sleep_1"
    SLEEP_2 = "sleep_2"
    CONTINUOUS_BATCHING = "continuous_batching"
    PREFIX_CACHING = "prefix_caching"
    TENSOR_PARALLEL = "tensor_parallel"
    TOP_LOGPROBS = "top_logprobs"
    STOP_STRINGS = "stop_strings"  # a completion can end at a text, where the model folder holds a tokenizer
    LORA = "lora"  # low-rank matrices alone can be served and updated
    ROUTED_EXPERTS = "routed_experts"  # which experts each token went to is told
    PEER_COPY = "peer_copy"  # a replacement can be given the weights that a replica serves, past the trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCapabilities:
    """What an adapter can do, declared before anything starts.

    `features` are of `RolloutFeature`, or names of the adapter's own. `missing` names absent features with the reason, to
    be printed by the dry run. `sleep_devices` are those whose memory `sleep` gives back; on others it may be accepted, and
    frees nothing.
    """

    adapter: str
    devices: frozenset[str]
    dtypes: frozenset[str]
    features: frozenset[str]
    missing: dict[str, str]
    sleep_devices: frozenset[str] = frozenset()
