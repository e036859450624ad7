"""Environments that others wrote, in several turns: `environment.path=offbeat_recipes.library.games:Gym environment.args.make=game.py:Game`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from offbeat_trainer import Feedback
from offbeat_trainer.data.loading import load_object

if TYPE_CHECKING:
    from offbeat_trainer import Action, Prompt


class Gym:
    """A text environment with the interface of gymnasium: `reset(seed=, options=)`, and `step(text)` of five values.

    `options` is the prompt's row. What `reset` says follows the prompt. `info["correct"]`, where it is there, is for accuracy. An
    environment whose `step` returns a mapping, as those of skyrl-gym do, is taken as well.
    """

    def __init__(self, make: str, **args: object) -> None:
        """Make what `make` names, "package.module:Name" or "file.py:Name", with `args`."""
        made: Any = load_object(make)
        self._env = made(**args)

    def reset(self, prompt: Prompt, seed: int) -> str:
        """Begin anew."""
        observation: Any = self._env.reset(seed=seed % 2**32, options=dict(prompt.data))
        return _text(observation)

    def step(self, action: Action) -> Feedback:
        """Do what the policy said."""
        answer: Any = self._env.step(action.text)
        if isinstance(answer, Mapping):
            of_skyrl = cast("Mapping[str, Any]", answer)
            observation, reward, done = (of_skyrl[name] for name in ("observations", "reward", "done"))
            correct = None
        else:
            observation, reward, terminated, truncated, info = cast(
                "tuple[object, float, bool, bool, dict[str, Any]]", answer
            )
            done, correct = terminated or truncated, info.get("correct")
        return Feedback(
            observation=_text(observation), reward=float(reward), done=bool(done), correct=correct
        )

    def close(self) -> None:
        """Close what has to be closed."""
        close = getattr(self._env, "close", None)
        if close is not None:
            close()


class TextArena:
    """A game of textarena for one player: `environment.args.game=Wordle-v0`; the reward is that of its end."""

    def __init__(self, game: str, **args: object) -> None:
        """Make `game` with `args`."""
        self._env: Any = import_module("textarena").make(env_id=game, **args)

    def reset(self, prompt: Prompt, seed: int) -> str:
        """Begin anew; the rules follow the prompt."""
        del prompt
        self._env.reset(num_players=1, seed=seed % 2**32)
        return str(self._env.get_observation()[1])

    def step(self, action: Action) -> Feedback:
        """Make a move."""
        done, _ = self._env.step(action=action.text)
        if not done:
            return Feedback(observation=str(self._env.get_observation()[1]))
        rewards, _ = self._env.close()
        return Feedback(reward=float(rewards[0]), done=True)


def _text(observation: object) -> str:
    """Return an observation as text: the first of several values; as it is, or the contents of messages."""
    if isinstance(observation, tuple):
        return _text(cast("tuple[object, ...]", observation)[0])
    if isinstance(observation, list):
        return "\n".join(str(one["content"]) for one in cast("list[dict[str, object]]", observation))
    return str(observation)
