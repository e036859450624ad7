"""What is known of each token of a trajectory that was kept: its text, log-prob, advantage and version."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_TOKENS, TOKENS_PER_STEP = 200_000, 2_000
"""How many tokens of a run the page has, those of the newest steps; a step has its share of them, or at least so many."""
COMPLETIONS_PER_BLOCK = 64  # they are loaded when one of them is opened


def tokens_of(turns: object) -> list[dict[str, Any] | None] | None:
    """Return for each of `turns` what is known of its tokens by column, see `_columns`; None where nothing is."""
    found = [_columns(turn) for turn in mappings(turns)]
    return found if any(found) else None


def num_tokens(tokens: Sequence[dict[str, Any] | None] | None) -> int:
    """Return of how many tokens something is known; `tokens` are those of `tokens_of`."""
    return sum(len(one["text"]) for one in tokens or () if one is not None)


def take_tokens(rows: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Return the tokens of `rows` in blocks; a row keeps where its own are: (block, place)."""
    blocks: list[list[Any]] = []
    for row in rows:
        if row["tokens"] is None:
            continue
        if not blocks or len(blocks[-1]) == COMPLETIONS_PER_BLOCK:
            blocks.append([])
        blocks[-1].append(row["tokens"])
        row["tokens"] = (len(blocks) - 1, len(blocks[-1]) - 1)
    return blocks


def mappings(value: object) -> list[dict[str, Any]]:
    """Return the mappings in a list that a file holds; none where it is no list."""
    return [cast("dict[str, Any]", item) for item in _list(value) if isinstance(item, dict)]


def _columns(turn: Mapping[str, Any]) -> dict[str, list[Any] | None] | None:
    """Return `text`, `logprob`, `advantage` and `version` of each token of `turn`, a column that is not whole as None."""
    texts = _list(turn.get("pieces"))
    if not texts or not all(isinstance(text, str) for text in texts):
        return None
    spans = [span for span in map(_list, _list(turn.get("versions"))) if len(span) == 2]
    versions = [version for version, count in spans for _ in range(min(_count(count), len(texts)))]
    columns = {
        "logprob": [_number(value) for value in _list(turn.get("logprobs"))],
        "advantage": [_number(value) for value in _list(turn.get("advantages"))],
        "version": [_number(value) for value in versions],
    }
    whole = {name: values if len(values) == len(texts) else None for name, values in columns.items()}
    return {"text": texts, **whole}


def _list(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def _number(value: object) -> float | None:
    """Return a number of four digits after the point: a report is small."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return round(value, 4)
