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


def followed_by(first: tuple[Experts | None, int], more: tuple[Experts | None, int]) -> Experts | None:
    """Return those of a completion and what followed it, each with its number of tokens: as tokens were sampled.

    The prompt of `more` is what `first` speaks of and one token. A part without tokens, which says nothing, takes nothing away.
    """
    (begun, num_begun), (rest, num_rest) = first, more
    if not num_begun or not num_rest:
        return rest if num_rest else begun
    return None if begun is None or rest is None else np.concatenate((begun, rest[len(begun) :]))
