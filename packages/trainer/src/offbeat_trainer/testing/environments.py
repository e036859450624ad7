"""The contract of environments: hold your own against it before a run meets it."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from offbeat_trainer.rollouts.environment import Action, Feedback, asked, check_instance, checked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat_trainer.data.types import Prompt
    from offbeat_trainer.rollouts.environment import Environment, Observation


async def check_environment(
    make: Callable[[], Environment], prompt: Prompt, texts: Sequence[str], *, deterministic: bool = True
) -> list[Feedback]:
    """Act in what `make` makes, turn by turn as `texts` say, as a run would; return what it answered.

    Held are: the methods are called as a run calls them; what is said and returned is of the promised kinds and can be sent to
    another process; rewards are finite numbers; two that live at once do not disturb each other; and, unless it is not
    `deterministic`, the same seed gives the same answers.

    Raises:
        AssertionError: what it does not keep.
        EnvironmentFailed, PlanRefused: as a run would.
    """
    one, other = make(), make()
    assert one is not other, "each trajectory has an instance of its own, and `make` gave one twice"
    for each in (one, other):
        check_instance(repr(make), each)
    first = _sendable("reset", await asked("reset", one.reset, prompt, 1))
    second = _sendable("reset", await asked("reset", other.reset, prompt, 1))
    for said in (first, second):
        _check_said("reset", said)
    told: list[Feedback] = []
    again: list[Feedback] = []
    # Turn about: what one hears of the other shows in what it says.
    for place, text in enumerate(texts):
        action = Action(turn=place, text=text, token_ids=(1,), finish="stop")
        for each, heard in ((one, told), (other, again)):
            if heard and heard[-1].done:
                continue
            heard.append(checked(_sendable("step", await asked("step", each.step, action))))
            _check_said("step", heard[-1].observation)
            if heard[-1].context is not None:
                _check_said("step", heard[-1].context)
    for each in (one, other):
        if hasattr(each, "close"):
            await asked("close", getattr(each, "close"))  # noqa: B009 - not every environment has one
    if deterministic:
        assert (first, told) == (second, again), (
            f"the same prompt, seed and actions gave {(first, told)} and {(second, again)}; what is random should "
            "follow from the seed"
        )
    return told


def _sendable(what: str, value: object) -> Any:  # noqa: ANN401 - what a user's returned
    try:
        return pickle.loads(pickle.dumps(value))
    except Exception as error:
        raise AssertionError(
            f"`{what}` returned {value!r}, which cannot be sent to another process: {error}"
        ) from error


def _check_said(what: str, said: Observation | Feedback) -> None:
    if isinstance(said, Feedback):  # of `reset`: what takes the prompt's place
        what, said = "context", said.context or ()
    if isinstance(said, str):
        return
    tokens = all(isinstance(one, int) for one in said)
    messages = all(isinstance(one, dict) and {"role", "content"} <= one.keys() for one in said)
    assert tokens or messages, (
        f"`{what}` said {said!r}; an observation is text, token ids, or messages with role and content"
    )
    assert tokens or what != "reset", (
        f"`reset` returned the messages {said!r}, and the prompt already opens the assistant's turn: put them into the prompt"
    )
