"""A reward function and what it is called with, by the names of its parameters.

One completion a call: `prompt`, `completion` (texts), `completion_ids`, `finish` ("stop", "length", "abort"), `row` (all
columns) and every column of the data by its name; it returns a number. One group a call, if it has a parameter
`completions`: `prompts`, `completions`, `completion_ids`, `finishes`, `rows` and the columns are lists with one entry a
completion; it returns as many numbers (the convention of TRL's reward functions). None for a completion says that the
reward does not apply to it. `**kwargs` gets what is left. A coroutine function is awaited.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offbeat_trainer.data.loading import load_object
from offbeat_trainer.errors import LoadError, PlanRefused

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat_trainer.data.types import Group

ONE: tuple[str, ...] = ("prompt", "completion", "completion_ids", "finish", "row")
MANY: tuple[str, ...] = ("prompts", "completions", "completion_ids", "finishes", "rows")
_OF_TRL = frozenset({"trainer_state", "log_extra", "log_metric"})
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward function by its import path, and how much it counts.

    `wants` are the names it is called with, None for all there are; `batched`: with a whole group at once.
    """

    path: str
    weight: float
    batched: bool
    wants: frozenset[str] | None

    @property
    def name(self) -> str:
        """The function's name, for metrics and messages."""
        return self.path.rpartition(":")[2]

    def calls(self, group: Group, texts: Sequence[str]) -> list[dict[str, Any]]:
        """Return the arguments of each call that scores `group`, whose completions read `texts`."""
        asks_ids = self.wants is None or "completion_ids" in self.wants
        ones: list[dict[str, Any]] = [
            {
                **group.prompt.data,
                "prompt": group.prompt.text,
                "completion": text,
                "completion_ids": completion.token_ids.tolist() if asks_ids else [],
                "finish": completion.finish.value,
                "row": dict(group.prompt.data),
            }
            for completion, text in zip(group.trajectories, texts, strict=True)
        ]
        if not self.batched:
            return [self._wanted(one) for one in ones]
        plural = dict(zip(ONE, MANY, strict=True))
        return [self._wanted({plural.get(name, name): [one[name] for one in ones] for name in ones[0]})]

    def _wanted(self, all_there_is: dict[str, Any]) -> dict[str, Any]:
        if self.wants is None:
            return all_there_is
        return {name: value for name, value in all_there_is.items() if name in self.wants}


def find_reward(path: str, weight: float, columns: Mapping[str, object]) -> Reward:
    """Return the reward function at `path`, for data with `columns`.

    Raises:
        PlanRefused: it cannot be imported, is no function, or asks for what is not there.
    """
    try:
        function = load_object(path)
    except LoadError as error:
        raise PlanRefused(str(error)) from error
    if not callable(function):
        raise PlanRefused(f"{path} is no function but {function!r}")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise PlanRefused(f"{path} does not say what it is called with: {error}; wrap it in a def") from error
    batched = any(one.name == "completions" for one in parameters)
    there = {*(MANY if batched else ONE), *columns}
    for one in parameters:
        by_name = one.kind in _BY_NAME and (one.name in there or one.default is not one.empty)
        if not by_name and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
            trl = ", which only TRL has" if one.name in _OF_TRL else ""
            raise PlanRefused(
                f"{path} asks for {one.name!r}{trl}; a reward is called by the names of its parameters, and there are "
                f"{', '.join(MANY if batched else ONE)} and the columns {', '.join(columns) or '(none)'}"
            )
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    wants = None if takes_all else frozenset(one.name for one in parameters) & there
    return Reward(path=path, weight=weight, batched=batched, wants=wants)
