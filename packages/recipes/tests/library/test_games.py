"""Environments of others behind ours: of gymnasium's interface, of skyrl-gym's, of textarena's, of OpenEnv's, of tinker-cookbook's."""

import socket
import subprocess
import sys
from dataclasses import dataclass, field
from types import ModuleType

import pytest

from offbeat_recipes.cli._hydra import compose_run
from offbeat_recipes.library.games import Gym, OpenEnv, TextArena, Tinker
from offbeat_recipes.planning.facts import gather_facts
from offbeat_trainer import Feedback, Prompt
from offbeat_trainer.config import EnvironmentConfig
from offbeat_trainer.errors import EnvironmentFailed
from offbeat_trainer.rollouts.environment import Action
from offbeat_trainer.rollouts.processes import EnvironmentProcesses
from offbeat_trainer.testing import check_environment

GAMES = """
import random

class Guess:  # as gymnasium has it
    def __init__(self, high=9):
        self.high = high
    def reset(self, *, seed=None, options=None):
        self.number = random.Random(seed).randint(0, self.high) if "number" not in options else options["number"]
        return f"between 0 and {self.high};", {"seeded": seed}
    def step(self, action):
        guess = int(action)
        right = guess == self.number
        return "lower;" if guess > self.number else "higher;", float(right), right, guess < 0, {"correct": right}
    def close(self):
        self.closed = True

class Search:  # as skyrl-gym has it
    def reset(self, seed, options):
        return [{"role": "user", "content": options["asked"]}], {}
    def step(self, action):
        return {"observations": [{"role": "user", "content": "found"}], "reward": 0.5, "done": action == "stop", "metadata": {}}
"""


@pytest.fixture
def games(tmp_path):
    path = tmp_path / "games.py"
    path.write_text(GAMES)
    return path


def asked(**data):
    return Prompt(uid="a", text="", token_ids=(1,), data=data)


async def test_a_game_of_gymnasium_keeps_the_contract(games):
    told = await check_environment(lambda: Gym(f"{games}:Guess", high=3), asked(number=2), ["1", "3", "2"])
    assert [one.reward for one in told] == [0, 0, 1]
    assert [one.correct for one in told] == [False, False, True]
    game = Gym(f"{games}:Guess", high=3)
    assert game.reset(asked(), 7) == "between 0 and 3;"
    assert game.step(type("Action", (), {"text": "-1"})()).done, "cut off"
    game.close()


async def test_one_of_skyrl_gym_says_messages_and_a_mapping(games):
    game = Gym(f"{games}:Search")
    assert game.reset(asked(asked="what?"), 0) == "what?"
    said = game.step(type("Action", (), {"text": "look"})())
    assert (said.observation, said.reward, said.done, said.correct) == ("found", 0.5, False, None)
    assert game.step(type("Action", (), {"text": "stop"})()).done


def test_arguments_come_from_the_settings_and_wrong_ones_are_refused(games):
    def refusals(*settings):
        config = compose_run(
            ["task=calculator", "environment.path=offbeat_recipes.library.games:Gym", *settings]
        )
        return config, [
            str(one) for one in gather_facts(config).refusals if one.setting.startswith("environment")
        ]

    config, refused = refusals(f"environment.args.make={games}:Guess", "environment.args.high=3")
    assert (config.turns.args, refused) == ({"make": f"{games}:Guess", "high": 3}, [])
    _, [refused] = refusals()
    assert (
        "must be called without arguments (environment.args has none): missing a required argument: 'make'"
        in refused
    )


@pytest.mark.deep
async def test_a_game_of_textarena_is_read_once_and_worth_what_its_end_says(textarena):
    def make():
        return TextArena("GuessTheNumber-v0", max_number=4)

    rules = make().reset(asked(), 1)
    assert rules.startswith("\n[GAME] You are Player 0. You are playing Guess The Number.")
    wrong, lower, won = await check_environment(make, asked(), ["[9]", "I say [4]", "2"])
    assert wrong.observation.startswith("\n[GAME] You attempted an invalid move.")
    assert lower == Feedback(observation="\n[GAME] The target number is lower.")
    assert (won.reward, won.done, won.parts) == (1.0, True, {"invalid_moves": 0.0})
    *_, ended = await check_environment(make, asked(), ["[4]", "x", "x"])
    assert (ended.reward, ended.done, ended.parts) == (pytest.approx(1 / 3), True, {"invalid_moves": 1.0})


@pytest.mark.deep
async def test_a_game_of_textarena_that_draws_follows_its_own_seed(textarena):
    boards = await check_environment(lambda: TextArena("2048-v0"), asked(), ["[left]", "[down]"] * 4)
    assert len({one.observation for one in boards}) == 8


SERVER = """
import os, sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Guess(Action):
    guess: int

class Heard(Observation):
    text: str = ""
    turn: int = 0

class Numbers(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, number=None, **more):
        self.number, self.turn = seed % 10 if number is None else number, 0
        return Heard(text="guess")

    def step(self, action, timeout_s=None, **more):
        if action.guess == 100:
            os._exit(3)
        if action.guess < 0:
            raise RuntimeError("planted")
        self.turn += 1
        right = action.guess == self.number
        return Heard(text="higher" if action.guess < self.number else "lower", turn=self.turn, reward=float(right), done=right)

    @property
    def state(self):
        return State(step_count=self.turn)

uvicorn.run(create_fastapi_app(Numbers, Guess, Heard, max_concurrent_envs=8), fd=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture
def server(own_python, tmp_path):
    """The address of a server of OpenEnv, which speaks in an environment of its own."""
    python = own_python("openenv-core==0.3.0")
    (tmp_path / "server.py").write_text(SERVER)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = subprocess.Popen(
            [python, tmp_path / "server.py", str(taken.fileno())], pass_fds=[taken.fileno()]
        )
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"
        process.kill()
        process.wait()


def act(text, *ids, turn=0):
    return Action(turn=turn, text=text, token_ids=ids or (1,), finish="stop")


@pytest.mark.deep
@pytest.mark.spawns
async def test_a_server_of_openenv_is_played_with_over_its_socket(server, tmp_path):
    said = await check_environment(
        lambda: OpenEnv(server, action="guess", observation="text"), asked(number=4), ["2", "7", "4"]
    )
    assert [(one.observation, one.reward, one.done) for one in said][:2] == [
        ("higher", 0.0, False),
        ("lower", 0.0, False),
    ]
    assert (said[2].reward, said[2].done) == (1.0, True)
    args = {"url": server, "action": "", "penalty": 0.25}
    config = EnvironmentConfig(path="offbeat_recipes.library.games:OpenEnv", args=args, timeout_s=600.0)
    processes = EnvironmentProcesses(config, tmp_path / "log")
    try:
        one = processes.make()
        assert await one.reset(asked(), 13) == '{"text": "guess", "turn": 0}'
        for text, words in (
            ('{"guess": "x"}', "valid integer"),
            ('{"guess"', "delimiter"),
            ('{"guess": 1, "more": 2}', "not permitted"),
        ):
            wrong = await one.step(act(text))
            assert (wrong.reward, wrong.done, wrong.parts) == (-0.25, False, {"refused_actions": 1.0})
            assert words in wrong.observation
        assert (await one.step(act('{"guess": 3}'))).done, "the seed is the environment's"
        for text, words in (('{"guess": -1}', "planted"), ('{"guess": 100}', "step")):
            with pytest.raises(EnvironmentFailed, match=words):
                await one.step(act(text))
        await one.close()
    finally:
        await processes.close()


@dataclass
class ModelInput:
    ids: list

    def to_ints(self):
        return self.ids


@dataclass
class StepResult:
    reward: float
    episode_done: bool
    next_observation: ModelInput
    next_stop_condition: list = field(default_factory=list)
    metrics: dict = field(default_factory=dict)


class Count:
    """To the interface of tinker-cookbook 0.6: goes on for one turn, then forgets what was said, then ends."""

    def __init__(self, first):
        self.asked, self.turn = list(first), 0

    async def initial_observation(self):
        return ModelInput(self.asked), ["stop"]

    async def step(self, action, *, extra=None):
        assert all(isinstance(one, int) for one in action)
        self.turn += 1
        self.asked = [*self.asked, *action, 9] if self.turn == 1 else [50, self.turn]
        return StepResult(
            len(action) / 4, self.turn == 3, ModelInput(self.asked), metrics={"turn": self.turn}
        )


async def test_an_env_of_tinker_hears_tokens_and_its_observations_are_what_is_asked_with(tmp_path):
    module = ModuleType("counts")
    module.make = lambda row, first=(): Count(first or row["first"])
    sys.modules["counts"] = module
    try:
        game = Tinker("counts:make")
        assert await game.reset(asked(first=[1, 2, 3]), 0) == [2, 3], "after the prompt, which is 1"
        assert await game.step(act("", 7, 8)) == Feedback(observation=[9], reward=0.5, parts={"turn": 1.0})
        edited = await game.step(act("", 7))
        assert (edited.context, edited.reward) == ([50, 2], 0.25)
        assert (await game.step(act("", 6))).done
        other = Tinker("counts:make", first=[5])
        assert await other.reset(asked(first=[1]), 0) == Feedback(context=[5]), "in place of the prompt"
    finally:
        del sys.modules["counts"]
