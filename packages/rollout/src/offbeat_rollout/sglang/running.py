"""One request under way: its body for SGLang, what has come of it, and the completion that makes.

SGLang gives the log-prob of a drawn token after temperature and before truncation; of a truncated distribution it gives, where it is
asked to, the tokens that were left and their log-probs among themselves. Texts to stop at are looked for here, as tokens come: the server
reads no tokenizer.
"""

# T = tokens so far

from __future__ import annotations

import math
from base64 import b64decode
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from offbeat_rollout.errors import EngineStateError
from offbeat_rollout.types import Completion, Finish, TopLogprobs, version_spans

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    import numpy.typing as npt

    from offbeat_rollout.toolkit.stop_strings import StopStrings
    from offbeat_rollout.types import GenerateRequest


def truncates(request: GenerateRequest, vocab_size: int) -> bool:
    """Say whether `top_k` or `top_p` leaves tokens out that a log-prob would tell of."""
    sampling = request.sampling
    return sampling.temperature > 0 and (0 < sampling.top_k < vocab_size or sampling.top_p < 1)


def request_body(
    request: GenerateRequest, rid: str, *, num_tokens: int, eos: Sequence[int], vocab_size: int
) -> dict[str, Any]:
    """Return the body of `/generate` for a checked request, for `num_tokens` at most, without its seed and its salt."""
    sampling = request.sampling
    greedy = sampling.temperature == 0
    return {
        "rid": rid,
        "input_ids": list(request.prompt_ids),
        "stream": True,
        "sampling_params": {
            "max_new_tokens": num_tokens,
            "temperature": sampling.temperature,
            # Beside `top_p` SGLang wants a number of its own: that of all tokens.
            "top_k": -1 if greedy else vocab_size if sampling.top_p < 1 else sampling.top_k,
            "top_p": 1.0 if greedy else sampling.top_p,
            # SGLang stops at end-of-sequence tokens of the folder, too; told to ignore those, it would ignore these.
            "stop_token_ids": sorted({*sampling.stop_token_ids, *eos}),
        },
    }


class Running:
    """What has come of one request."""

    def __init__(
        self,
        request: GenerateRequest,
        *,
        truncated: bool,
        watch: StopStrings | None = None,
        routed: tuple[int, int] | None = None,
    ) -> None:
        """Nothing has come yet; tokens are left out of the drawn distribution if it is `truncated`; `watch` looks for texts.

        `routed` are layers and experts of a token, where experts are recorded.
        """
        self.request = request
        self._truncated = truncated
        self._routed = routed
        self._experts: npt.NDArray[np.int16] | None = None
        self._watch = watch
        self._stopped: tuple[int, str] | None = None  # after how many tokens which text was complete
        self.call: asyncio.Task[None] | None = None
        self.rid = ""  # while the server has it
        self.begin_anew = False  # it was ended because the weights changed, and had no token
        # Of the tokens before the first new version: version, number.
        self._versions: list[tuple[int, int]] = []
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._tops: list[list[tuple[float, int]]] = []
        # Of a truncated distribution, if their log-probs are asked for.
        self._left: list[dict[int, float]] = []
        self._finish = Finish.ABORT
        self._stop_reason: int | None = None
        self._spans: list[tuple[int, int]] | None = None
        self._num_cached: int | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self._token_ids)

    @property
    def stopped(self) -> bool:
        """Whether a text to stop at is complete: what the server makes after it is not wanted."""
        return self._stopped is not None

    @property
    def asked(self) -> dict[str, object]:
        """What the body of `/generate` says of log-probs."""
        num_top = self.request.sampling.top_logprobs
        body: dict[str, object] = {"return_logprob": True, "top_logprobs_num": num_top}
        if self._routed is not None:
            body["return_routed_experts"] = True
        if self._truncated:
            body |= {
                "return_sampling_mask": True,
                "sampling_logprobs_mode": "support" if num_top else "selected",
            }
        return body

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
        if reason.get("type") == Finish.ABORT:
            # Of a request that waits for room to go on, SGLang sends the last token again, and all log-probs.
            num_new = meta["completion_tokens"] - self.num_tokens
            token_ids, drawn = token_ids[:num_new], drawn[:num_new]
        if len(drawn) != len(token_ids):
            raise EngineStateError(
                f"SGLang gave {len(token_ids)} tokens and {len(drawn)} log-probs for {self.request.request_id!r}"
            )
        if self.request.sampling.top_logprobs:
            places = meta["output_top_logprobs"][: len(token_ids)]
            self._tops += [[(one[0], one[1]) for one in place] for place in places]
        truncated = self._truncated and token_ids
        self._logprobs += self._drawn(token_ids, meta) if truncated else [entry[0] for entry in drawn]
        for token in token_ids:
            self._add(token)
        self._num_cached = meta.get("cached_tokens", self._num_cached)
        if reason:
            self._end(reason, meta)
        return len(token_ids)

    def _drawn(self, token_ids: list[int], meta: dict[str, Any]) -> list[float]:
        """Return the log-probs of drawn tokens among those that truncation left."""
        num = len(token_ids)
        logprobs: list[Any] = meta["output_token_sampling_logprobs"][:num]
        if not self.request.sampling.top_logprobs:
            return logprobs
        left = [
            dict(zip(ids, of_ids, strict=True))
            for ids, of_ids in zip(meta["output_token_sampling_mask"][:num], logprobs, strict=True)
        ]
        self._left += left
        return [one[token] for token, one in zip(token_ids, left, strict=True)]

    def _add(self, token: int) -> None:
        self._token_ids.append(token)
        if self._watch is not None and self._stopped is None:
            text = self._watch.add(token)
            self._stopped = None if text is None else (len(self._token_ids), text)

    def _end(self, reason: dict[str, Any], meta: dict[str, Any]) -> None:
        self._finish = Finish(reason["type"])
        matched = reason.get("matched")
        self._stop_reason = matched if isinstance(matched, int) else None
        told: list[dict[str, Any]] = meta.get("weight_versions") or []
        self._spans = [(int(one["version"]), one["end"] - one["start"]) for one in told]
        if self._routed is not None and self._token_ids:
            self._experts = self._experts_in(meta, self._routed)

    def _experts_in(self, meta: dict[str, Any], routed: tuple[int, int]) -> npt.NDArray[np.int16] | None:
        """Return the experts of every token that was fed [P + T - 1, L, K], which come with the end; of an aborted request maybe none."""
        told = np.frombuffer(b64decode(meta.get("routed_experts") or ""), np.int32)
        experts = told.astype(np.int16).reshape(-1, *routed)
        fed = len(self.request.prompt_ids) + self.num_tokens - 1
        if len(experts) >= fed:
            return experts[:fed]
        if self._finish is Finish.ABORT:
            return None
        raise EngineStateError(
            f"SGLang told the experts of {len(experts)} tokens of {self.request.request_id!r}, and {fed} were fed"
        )

    def completion(self, version: int) -> Completion:
        """Return the completion, by weights of `version` at its end; one that the server did not end is an aborted one.

        Of such a one the tokens are kept whose version is known.
        """
        spans = self._spans
        if spans is None:
            spans = self._versions or [(version, self.num_tokens)]
        count = sum(number for _, number in spans)
        made = Completion(
            request_id=self.request.request_id,
            token_ids=np.array(self._token_ids[:count], np.int32),
            logprobs=np.array(self._logprobs[:count], np.float32),
            spans=version_spans(spans),
            finish=self._finish,
            stop_reason=self._stop_reason,
            num_cached_tokens=self._num_cached,
            top_logprobs=self._top_logprobs(count),
            routed_experts=self._experts,
        )
        if self._stopped is None or self._stopped[0] > count:
            return made
        length, text = self._stopped
        return replace(made.cut(length, Finish.STOP), stop_reason=text)

    def _top_logprobs(self, count: int) -> TopLogprobs | None:
        num = self.request.sampling.top_logprobs
        if not num:
            return None
        places = self._tops[:count]
        if self._left:
            left_out = -math.inf
            places = [
                sorted(((left.get(token, left_out), token) for _, token in place), key=lambda one: -one[0])
                for place, left in zip(places, self._left, strict=False)
            ]
        values, ids = ([[one[part] for one in place] for place in places] for part in (0, 1))
        return TopLogprobs(
            token_ids=np.array(ids, np.int32).reshape(count, num),
            logprobs=np.array(values, np.float32).reshape(count, num),
        )
