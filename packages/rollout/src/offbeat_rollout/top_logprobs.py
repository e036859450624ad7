"""The most likely tokens at each position of a completion. T = tokens, K = how many were asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from offbeat_rollout.errors import CompletionError

if TYPE_CHECKING:
    import numpy.typing as npt


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
        return _read, (self.token_ids, self.logprobs)


def _read(token_ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]) -> TopLogprobs:
    return TopLogprobs(token_ids=token_ids, logprobs=logprobs)
