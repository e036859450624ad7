"""One request under way: its body for SGLang, what has come of it, and the completion that makes.

SGLang gives the log-prob of a drawn token after temperature and before truncation. Over the `top_k` likeliest it is made whole
here, from their log-probs, which are asked for; `top_p` is refused before (see `engine`).
"""

# T = tokens so far, K = tokens of a truncated distribution

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from offbeat_rollout.errors import EngineStateError
from offbeat_rollout.top_logprobs import TopLogprobs
from offbeat_rollout.types import Completion, Finish, version_spans

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from offbeat_rollout.types import GenerateRequest


def num_kept(request: GenerateRequest, vocab_size: int) -> int:
    """Return how many of the likeliest tokens `top_k` leaves; 0 where it cuts nothing off that a log-prob would tell."""
    top_k = request.sampling.top_k
    return top_k if request.sampling.temperature > 0 and 0 < top_k < vocab_size else 0


def request_body(
    request: GenerateRequest, rid: str, *, num_tokens: int, eos: Sequence[int]
) -> dict[str, Any]:
    """Return the body of `/generate` for a checked request, for `num_tokens` at most, without its seed and its salt."""
    sampling = request.sampling
    return {
        "rid": rid,
        "input_ids": list(request.prompt_ids),
        "stream": True,
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": num_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            # SGLang stops at end-of-sequence tokens of the folder, too; told to ignore those, it would ignore these.
            "stop_token_ids": sorted({*sampling.stop_token_ids, *eos}),
        },
    }


class Running:
    """What has come of one request."""

    def __init__(self, request: GenerateRequest, kept: int) -> None:
        """Nothing has come yet; the drawn distribution has the `kept` likeliest tokens alone, or all (0)."""
        self.request = request
        self.kept = kept
        self.call: asyncio.Task[None] | None = None
        self.rid = ""  # while the server has it
        self.begin_anew = False  # it was ended because the weights changed, and had no token
        self._versions: list[
            tuple[int, int]
        ] = []  # of the tokens before the first new version: version, number
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._tops: list[list[tuple[float, int]]] = []
        self._finish = Finish.ABORT
        self._stop_reason: int | None = None
        self._spans: list[tuple[int, int]] | None = None
        self._num_cached: int | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self._token_ids)

    @property
    def num_top(self) -> int:
        """How many of the likeliest tokens the server is asked for at each position."""
        return max(self.kept, self.request.sampling.top_logprobs)

    def flipped(self, before: int) -> None:
        """The tokens so far are of the version `before`; of those that come next, only the end will tell."""
        if not self._versions:
            self._versions.append((before, self.num_tokens))

    def take(self, said: dict[str, Any]) -> int:
        """Add what the server says and return how many tokens that is.

        Raises:
            EngineStateError: it says that the request failed.
        """
        meta: dict[str, Any] = said.get("meta_info", {})
        reason: dict[str, Any] = meta.get("finish_reason") or {}
        if "error" in said or reason.get("status_code") is not None:
            why: object = said.get("error") or reason.get("message")
            raise EngineStateError(f"SGLang failed on request {self.request.request_id!r}: {why}")
        token_ids, drawn = said["output_ids"], meta["output_token_logprobs"]
        if len(drawn) != len(token_ids):
            raise EngineStateError(
                f"SGLang gave {len(token_ids)} tokens and {len(drawn)} log-probs for {self.request.request_id!r}"
            )
        self._token_ids += token_ids
        self._logprobs += [entry[0] for entry in drawn]
        if self.num_top:
            self._tops += [[(one[0], one[1]) for one in place] for place in meta["output_top_logprobs"]]
        self._num_cached = meta.get("cached_tokens", self._num_cached)
        if reason:
            self._end(reason, meta)
        return len(token_ids)

    def _end(self, reason: dict[str, Any], meta: dict[str, Any]) -> None:
        self._finish = Finish(reason["type"])
        matched = reason.get("matched")
        self._stop_reason = matched if isinstance(matched, int) else None
        told: list[dict[str, Any]] = meta.get("weight_versions") or []
        self._spans = [(int(one["version"]), one["end"] - one["start"]) for one in told]

    def completion(self, version: int) -> Completion:
        """Return the completion, by weights of `version` at its end; one that the server did not end is an aborted one.

        Of such a one the tokens are kept whose version is known.
        """
        spans = self._spans
        if spans is None:
            spans = self._versions or [(version, self.num_tokens)]
        count = sum(number for _, number in spans)
        logprobs = np.array(self._logprobs[:count], np.float32)
        tops = np.array([[one[0] for one in place] for place in self._tops[:count]], np.float64).reshape(
            count, self.num_top
        )
        if self.kept and count:
            kept_TK = tops[:, : self.kept]
            whole = np.logaddexp.reduce(kept_TK, axis=1)
            logprobs = (logprobs - whole).astype(np.float32)
            tops = np.where(np.arange(tops.shape[1]) < self.kept, tops - whole[:, None], -np.inf)
        return Completion(
            request_id=self.request.request_id,
            token_ids=np.array(self._token_ids[:count], np.int32),
            logprobs=logprobs,
            spans=version_spans(spans),
            finish=self._finish,
            stop_reason=self._stop_reason,
            num_cached_tokens=self._num_cached,
            top_logprobs=self._top_logprobs(tops.astype(np.float32), count),
        )

    def _top_logprobs(self, logprobs: Any, count: int) -> TopLogprobs | None:  # noqa: ANN401 an array [T, top]
        num = self.request.sampling.top_logprobs
        if not num:
            return None
        ids = np.array([[one[1] for one in place[:num]] for place in self._tops[:count]], np.int32)
        return TopLogprobs(token_ids=ids.reshape(count, num), logprobs=logprobs[:, :num].copy())
