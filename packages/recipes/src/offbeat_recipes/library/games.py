"""Environments that others wrote, in several turns: `environment.path=offbeat_recipes.library.games:Gym environment.args.make=game.py:Game`."""

from __future__ import annotations

import inspect
import json
import random
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
    """A game of textarena (0.7) for one player: `environment.args.game=GuessTheNumber-v0`; the reward is that of its end.

    The policy reads what the game says, once. The observations of textarena's wrappers, which are the whole game so far in every turn,
    are not taken; its wrappers of actions are.
    """

    def __init__(self, game: str, **args: object) -> None:
        """Make `game` with `args`."""
        self._env: Any = import_module("textarena").make(env_id=game, **args)

    def reset(self, prompt: Prompt, seed: int) -> str:
        """Begin anew; the rules follow the prompt."""
        del prompt
        self._env.reset(num_players=1, seed=seed % 2**32)
        return self._said()

    def step(self, action: Action) -> Feedback:
        """Make a move."""
        random.setstate(self._random)
        done, _ = self._env.step(action=action.text)
        said = self._said()
        if not done:
            return Feedback(observation=said)
        rewards, info = self._env.close()
        parts = {"invalid_moves": float(info[0]["invalid_move"])}
        return Feedback(observation=said, reward=float(rewards[0]), done=True, parts=parts)

    def _said(self) -> str:
        """Return what the game has said since; games draw from Python's one generator, and others in this process do so, too."""
        self._random = random.getstate()
        messages = self._env.state.get_current_player_observation()
        return "".join(f"\n[GAME] {text}" for _, text, kind in messages if kind.name != "PLAYER_ACTION")


class OpenEnv:
    """A session of a server of OpenEnv (openenv-core 0.3), over its WebSocket: `environment.args.url=http://127.0.0.1:8000`.

    `reset` is given the prompt's row, of which the server takes what its environment names. What the policy says is the field `action`
    of an action of that environment; "" has it write whole actions, in JSON. An action that is refused is answered with what is
    wrong, and costs `penalty`. The policy reads the field `observation`, all fields as JSON where that is "".
    """

    def __init__(
        self, url: str, action: str = "message", observation: str = "", penalty: float = 0.0
    ) -> None:
        """Meet the server at `url`."""
        self._url = url.rstrip("/") + "/ws"
        self._action, self._observation, self._penalty = action, observation, penalty
        self._session: Any = None

    async def reset(self, prompt: Prompt, seed: int) -> str:
        """Begin a session."""
        aiohttp: Any = import_module("aiohttp")
        self._session = aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(self._url, max_msg_size=0)
        began = await self._ask("reset", {**prompt.data, "seed": seed % 2**31})
        return self._said(began["data"])

    async def step(self, action: Action) -> Feedback:
        """Do what the policy said."""
        try:
            data = {self._action: action.text} if self._action else json.loads(action.text)
            answer = await self._ask("step", data)
            if answer["type"] == "error":
                raise ValueError("; ".join(str(one["msg"]) for one in answer["data"]["errors"]))
        except ValueError as error:
            return Feedback(observation=str(error), reward=-self._penalty, parts={"refused_actions": 1.0})
        data = answer["data"]
        done = bool(data["done"])
        return Feedback(observation=self._said(data), reward=float(data["reward"] or 0.0), done=done)

    async def close(self) -> None:
        """End the session."""
        if self._session is not None:
            await self._session.close()

    async def _ask(self, kind: str, data: object) -> dict[str, Any]:
        await self._socket.send_json({"type": kind, "data": data})
        answer = await self._socket.receive_json()
        if answer["type"] == "error" and (kind == "reset" or "errors" not in answer["data"]):
            raise RuntimeError(f"the server of OpenEnv: {answer['data']}")
        return answer

    def _said(self, data: dict[str, Any]) -> str:
        whole = data["observation"]
        return str(whole[self._observation]) if self._observation else json.dumps(whole)


class Tinker:
    """An `Env` of tinker-cookbook (0.6), which speaks tokens: `environment.args.make=mine.py:make`, called with the prompt's row.

    A turn is asked with the env's observation as it is: what goes on from the turns before is one row with them, anything else
    begins another. Turns end as `sampling` says, not by the env's stop condition; what its group builder adds is not asked for.
    """

    def __init__(self, make: str, **args: object) -> None:
        """Make the env by what `make` names, "package.module:name" or "file.py:name", with `args`."""
        self._make, self._args = cast("Any", load_object(make)), args
        self._asked: list[int] = []

    async def reset(self, prompt: Prompt, seed: int) -> list[int] | Feedback:
        """Make the env, and return its first observation."""
        del seed
        made = self._make(dict(prompt.data), **self._args)
        self._env: Any = await made if inspect.isawaitable(made) else made
        observation, _ = await self._env.initial_observation()
        self._asked = [int(one) for one in observation.to_ints()]
        count = len(prompt.token_ids)
        goes_on = tuple(self._asked[:count]) == prompt.token_ids
        return self._asked[count:] if goes_on else Feedback(context=self._asked)

    async def step(self, action: Action) -> Feedback:
        """Hand the turn's tokens over."""
        found = await self._env.step(list(action.token_ids))
        before, now = (
            [*self._asked, *action.token_ids],
            [int(one) for one in found.next_observation.to_ints()],
        )
        self._asked, goes_on = now, now[: len(before)] == before
        return Feedback(
            observation=now[len(before) :] if goes_on else (),
            context=None if goes_on or found.episode_done else now,
            reward=float(found.reward),
            done=bool(found.episode_done),
            parts={name: float(value) for name, value in found.metrics.items()},
        )


def _text(observation: object) -> str:
    """Return an observation as text: the first of several values; as it is, or the contents of messages."""
    if isinstance(observation, tuple):
        return _text(cast("tuple[object, ...]", observation)[0])
    if isinstance(observation, list):
        return "\n".join(str(one["content"]) for one in cast("list[dict[str, object]]", observation))
    return str(observation)
