"""How long sequences may be before a model's rotary frequencies change under them."""

# transformers' configs are untyped.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

# Those that follow the longest position of a forward pass.
_GROWING_ROPES = frozenset({"dynamic", "longrope", "su"})


def sequence_limit(config: Any) -> int | None:  # noqa: ANN401
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
