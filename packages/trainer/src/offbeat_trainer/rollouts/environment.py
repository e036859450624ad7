"""What a policy acts in over several turns: the seam that users implement, in a file of their own.

One instance lives for one trajectory: `reset` is called once, then `step` after each turn of the policy, then `close` if
there is one. Any of them may be a coroutine function. A class, or any function that returns such an object, is named by its import path: "package.module:name" or "folder/file.py:name".
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from offbeat_trainer.data.loading import load_object
from offbeat_trainer.errors import EnvironmentFailed, LoadError, PlanRefused
from offbeat_trainer.rollouts.frames import NO_NUMBER, RAISED

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from offbeat_trainer.data.types import Prompt

Message: TypeAlias = Mapping[str, str]
Observation: TypeAlias = str | Sequence[int] | Sequence[Message]
"""What an environment says: text, which the run's tokenizer makes into tokens once; tokens as they are; or messages of a chat
({"role", "content"}), which the tokenizer's chat template writes as what follows an assistant's turn; `reset` may not return these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What the policy did: turn number `turn`, counted from 0, as text without special tokens and as tokens.

    `finish` is "stop", or "length" for one that was cut off, the last of its trajectory.
    """

    turn: int
    text: str
    token_ids: tuple[int, ...]
    finish: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """What the environment makes of an action. After one that is `done` nothing is sampled, and `observation` is not read.

    `reward` is for this turn; those of a trajectory add up. `parts` are rewards to be looked at by name, they add up as well.
    `correct` feeds accuracy: the last that was said counts; where none was, a trajectory
    whose rewards come to 1 is right, one of 0 is wrong, and any other is neither. `context` edits the history: the next turn is asked
    with it in place of the prompt and of all that was said (`observation` is not read then), and what came before is trained as a
    sequence of its own. Messages are written by the chat template from their start, up to where an assistant speaks.
    """

    observation: Observation = ""
    context: Observation | None = None
    reward: float = 0.0
    done: bool = False
    correct: bool | None = None
    parts: Mapping[str, float] = field(default_factory=dict[str, float])


class Environment(Protocol):
    """See the top of the module."""

    def reset(self, prompt: Prompt, seed: int) -> Observation | Feedback | Awaitable[Observation | Feedback]:
        """Begin with `prompt`, and return what is said before the first turn, after the prompt ("" for most).

        A `Feedback` with a `context` has the first turn asked with that, in place of the prompt.
        `seed` is this trajectory's own; whatever is random should follow from it, or a run does not repeat itself.
        """
        ...

    def step(self, action: Action) -> Feedback | Awaitable[Feedback]:
        """Return what `action` leads to."""
        ...


async def asked(what: str, method: Callable[..., Any], *given: object) -> Any:  # noqa: ANN401 - whatever a user's returns
    """Return what `method` returns, awaited where that is called for.

    Raises:
        EnvironmentFailed: it raised; `what` names it.
    """
    try:
        value = method(*given)
        return await value if inspect.isawaitable(value) else value
    except EnvironmentFailed:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentFailed(RAISED, f"`{what}` raised {type(error).__name__}: {error}") from error


def checked(value: object) -> Feedback:
    """Return what `step` returned, with plain numbers.

    Raises:
        EnvironmentFailed: it is no `Feedback`, or a reward is no finite number.
    """
    if not isinstance(value, Feedback):
        raise EnvironmentFailed(RAISED, f"`step` returned {value!r}, not an offbeat_trainer.Feedback")
    rewards = {"reward": value.reward, **{f"parts[{name!r}]": one for name, one in value.parts.items()}}
    for name, one in rewards.items():
        if isinstance(one, str) or not _finite(one):
            raise EnvironmentFailed(NO_NUMBER, f"`step` returned {name}={one!r}, not a finite number")
    return replace(
        value,
        reward=float(value.reward),
        done=bool(value.done),
        correct=None if value.correct is None else bool(value.correct),
        parts={str(name): float(one) for name, one in value.parts.items()},
    )


def find_environment(path: str, args: Mapping[str, Any] | None = None) -> Callable[..., Environment]:
    """Return what makes the environments named `path`, which is to be called with `args`.

    Raises:
        PlanRefused: it cannot be imported, is not to be called so, or lacks `reset` or `step`.
    """
    try:
        make = load_object(path)
    except LoadError as error:
        raise PlanRefused(str(error)) from error
    if not callable(make):
        raise PlanRefused(f"{path} is neither a class nor a function but {make!r}")
    try:
        inspect.signature(make).bind(**(args or {}))
    except TypeError as error:
        with_args = (
            f"with environment.args {', '.join(args)}"
            if args
            else "without arguments (environment.args has none)"
        )
        raise PlanRefused(f"{path} must be called {with_args}: {error}") from error
    except ValueError:
        pass  # a class in C says nothing
    if isinstance(make, type):
        _check_methods(path, make, bound=1)
    return cast("Callable[..., Environment]", make)


def is_coroutine(environment: object) -> bool:
    """Say whether one of the methods of an environment, or of its class, is a coroutine function."""
    methods = (getattr(environment, name, None) for name in ("reset", "step", "close"))
    return any(inspect.iscoroutinefunction(method) for method in methods)


def check_instance(path: str, environment: object) -> None:
    """Raise `PlanRefused` unless `environment`, which `path` made, has `reset` and `step` as they are called."""
    _check_methods(path, environment, bound=0)


def _check_methods(path: str, owner: object, *, bound: int) -> None:
    for name, given in (("reset", ("prompt", "seed")), ("step", ("action",))):
        method = getattr(owner, name, None)
        if not callable(method):
            raise PlanRefused(
                f"{path} has no `{name}`; an environment has reset(prompt, seed) and step(action)"
            )
        try:
            inspect.signature(method).bind(*("self",) * bound, *given)
        except TypeError as error:
            raise PlanRefused(f"{path}: `{name}` is called with ({', '.join(given)}): {error}") from error


def _finite(value: object) -> bool:
    try:
        return math.isfinite(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return False
