"""How long sequences may be before a model's rotary frequencies change under them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offbeat_engine.capabilities import Refusal
from offbeat_engine.errors import BatchError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat_engine.batch import TrainBatch

# Those that follow the longest position of a forward pass.
_GROWING_ROPES = frozenset({"dynamic", "longrope", "su"})


def sequence_limit(config: Any) -> int | None:
    """Return the tokens up to which rotary frequencies stay as they are, or None where they always do.

    Dynamic scaling and longrope (arXiv 2402.13753) choose frequencies by the longest position of a forward pass, so beyond
    this a log-probability would depend on the sequences that happen to share its micro-batch.
    """
    ropes = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    each = (
        [ropes]
        if "rope_type" in ropes or "type" in ropes
        else [rope for rope in ropes.values() if isinstance(rope, dict)]
    )
    limits = [
        rope.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        or config.max_position_embeddings
        for rope in each
        if rope.get("rope_type", rope.get("type")) in _GROWING_ROPES
    ]
    return min(map(int, limits), default=None)


def refusals(config: Any, longest: int) -> Iterator[Refusal]:
    """Yield why sequences of `longest` tokens would not be exact; part of an engine's `check`."""
    limit = sequence_limit(config)
    if limit is not None and longest > limit:
        yield Refusal(
            setting="max_sequence_tokens",
            reason="the model changes its rotary frequencies with the longest sequence of a micro-batch "
            f"beyond {limit} tokens, and sequences of up to {longest} are to come",
            remedy=f"keep to {limit} tokens, or use a rope whose frequencies are fixed",
        )


def check_lengths(batch: TrainBatch, limit: int | None) -> None:
    """Raise `BatchError` where a sequence is longer than a model's `sequence_limit`."""
    longest = int(batch["lengths"].max()) if len(batch["lengths"]) else 0
    if limit is not None and longest > limit:
        raise BatchError(
            f"a sequence has {longest} tokens, and beyond {limit} this model changes its rotary frequencies with the "
            "longest sequence of a micro-batch; give shorter ones, or use a rope whose frequencies are fixed"
        )
