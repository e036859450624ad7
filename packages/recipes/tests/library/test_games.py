"""Environments of others behind ours: of gymnasium's interface, of skyrl-gym's, of textarena's; with arguments from the settings."""

import sys
from types import ModuleType

import pytest

from offbeat_recipes.cli._hydra import compose_run
from offbeat_recipes.library.games import Gym, TextArena
from offbeat_recipes.plan.facts import gather_facts
from offbeat_trainer import Prompt
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


async def test_a_game_of_textarena_is_worth_what_its_end_says(monkeypatch):
    """Its interface as of textarena 0.7, which is not among the packages of these tests: only what is called is here."""

    class Game:
        def reset(self, num_players, seed):
            assert num_players == 1
            self.turns = 0

        def get_observation(self):
            return 0, f"turn {self.turns}"

        def step(self, action):
            self.turns += 1
            return action == "win", {}

        def close(self):
            return {0: 1.0}, {}

    library = ModuleType("textarena")
    library.make = lambda env_id: Game()
    monkeypatch.setitem(sys.modules, "textarena", library)
    game = TextArena("Wordle-v0")
    assert game.reset(asked(), 3) == "turn 0"
    assert game.step(type("Action", (), {"text": "x"})()).observation == "turn 1"
    said = game.step(type("Action", (), {"text": "win"})())
    assert (said.reward, said.done) == (1.0, True)
