"""Rewards that a row's columns decide: `task.reward=offbeat_recipes.library.checks:exact`."""

from __future__ import annotations

import json
import re
from typing import Any

_JSON_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


def exact(completion: str, answer: str | float) -> bool:
    """Whether the completion is the column `answer`, but for blanks around it."""
    return completion.strip() == str(answer).strip()


def ends_with(completion: str, answer: str | float) -> bool:
    """Whether the last word of the completion is the column `answer`; a full stop behind it does not count."""
    words = completion.split()
    return bool(words) and words[-1].rstrip(".") == str(answer).strip()


def matches(completion: str, pattern: str) -> bool:
    """Whether the regular expression in the column `pattern` is found in the completion."""
    return re.search(pattern, completion) is not None


def mathematics(completion: str, answer: str | float) -> bool:
    """Whether the completion's last formula, number or boxed answer is worth the column `answer`, by math-verify.

    Both may be LaTeX. It has no limit of time of its own: `reward.timeout_s` ends the process.
    """
    import math_verify  # the extra `rewards`

    library: Any = math_verify  # typed as it is not: None takes its limit away, which needs the main thread

    def parsed(text: str) -> list[Any]:
        return library.parse(text, parsing_timeout=None)

    # A bare number or formula is one that is set as such.
    gold = parsed(f"${answer}$") or parsed(str(answer))
    return bool(library.verify(gold, parsed(completion), timeout_seconds=None))


def valid_json(completion: str, schema: dict[str, Any] | str) -> bool:
    """Whether the completion, or the last block of JSON in it, is valid by the JSON schema in the column `schema`."""
    from jsonschema import Draft202012Validator  # the extra `rewards`

    blocks: list[str] = _JSON_FENCE.findall(completion)
    try:
        value = json.loads(blocks[-1] if blocks else completion)
    except ValueError:
        return False
    rules: Any = json.loads(schema) if isinstance(schema, str) else schema
    return bool(Draft202012Validator(rules).is_valid(value))
