"""The experts that a mixture's routers chose for each token. N = tokens that were fed, L = layers, K = experts of a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from offbeat_rollout.errors import CompletionError

if TYPE_CHECKING:
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


def followed_by(first: Experts | None, more: Experts | None) -> Experts | None:
    """Return `more`, whose prompt is what `first` speaks of and one token, with `first` in front: as tokens were sampled."""
    return None if first is None or more is None else np.concatenate((first, more[len(first) :]))
