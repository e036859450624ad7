"""Tools of a real MCP server behind an environment: calls, mistakes, a tool that lies, a server that dies."""

import json
import string
import sys

import pytest

from offbeat_recipes.library.tools import McpTools, Methods
from offbeat_recipes.tasks.chars import char_tokenizer
from offbeat_recipes.testing import ScriptedReplicas
from offbeat_rollout import SamplingParams
from offbeat_trainer import Prompt
from offbeat_trainer.config import EnvironmentConfig
from offbeat_trainer.errors import EnvironmentFailed
from offbeat_trainer.rollouts.environment import Action
from offbeat_trainer.rollouts.multi import EnvironmentSetup, MultiTurn
from offbeat_trainer.rollouts.processes import EnvironmentProcesses

pytestmark = pytest.mark.spawns

SERVER = """
import asyncio
import os
from mcp.server import MCPServer

server = MCPServer("sums")

@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

@server.tool()
def lies(a: int) -> int:
    raise ValueError("it said it could")

@server.tool()
def promises(a: int) -> list[int]:
    return "no list"

@server.tool()
async def hangs() -> int:
    await asyncio.sleep(3600)

@server.tool()
def dies() -> int:
    os._exit(3)

server.run(transport="stdio")
"""
HANGS_S = 30.0
"""Of a call of a tool that hangs: a server must start within it on a busy machine, too."""
ASKED = Prompt(uid="a", text="", token_ids=(1,))


def action(text, turn=0):
    return Action(turn=turn, text=text, token_ids=(1,), finish="stop")


@pytest.fixture
async def tools(tmp_path):
    (tmp_path / "server.py").write_text(SERVER)
    args = {"command": [sys.executable, str(tmp_path / "server.py")], "penalty": 0.1}
    config = EnvironmentConfig(path="offbeat_recipes.library.tools:McpTools", args=args, timeout_s=600.0)
    processes = EnvironmentProcesses(config, tmp_path / "log")
    yield processes.make
    await processes.close()


async def test_calls_of_a_turn_are_answered_and_a_turn_without_one_ends_it(tools):
    one, other = tools(), tools()
    assert await one.reset(ASKED, 0) == ""
    await other.reset(ASKED, 1)
    both = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call> and <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 1}}\n</tool_call>'
    said = await one.step(action(both))
    assert said.observation == [{"role": "tool", "content": "5"}, {"role": "tool", "content": "2"}]
    assert (said.reward, said.done) == (0, False)
    assert (await one.step(action("It is 5."))).done
    await one.close()
    assert (await other.step(action(both))).reward == 0, "another trajectory's server lives on"
    await other.close()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("{", "no call that can be read"),
        ("[1]", "no call that can be read"),
        ('{"name": "add", "arguments": 3}', "must be a mapping"),
        ('{"name": "subtract", "arguments": {}}', "subtract"),
        ('{"name": "add", "arguments": {"a": "x"}}', "add"),
        ('{"name": "lies", "arguments": {"a": 1}}', "lies"),
        ('{"name": "promises", "arguments": {"a": 1}}', "promises"),  # a list, by its schema
        ('{"name": "add", "arguments": {"a": 1, "c": 2}}', "add"),  # a schema that the policy made up
    ],
)
async def test_a_call_that_fails_is_said_and_costs(tools, call, words):
    one = tools()
    await one.reset(ASKED, 0)
    said = await one.step(action(f"<tool_call>{call}</tool_call>"))
    [message] = said.observation
    assert words in message["content"]
    assert (said.reward, said.done, said.parts) == (-0.1, False, {"failed_calls": 1.0})
    again = await one.step(action('<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>', 1))
    assert again.observation == [{"role": "tool", "content": "5"}]
    await one.close()


@pytest.mark.deep
async def test_a_tool_that_hangs_ends_its_trajectory_with_its_name_and_another_is_begun(tmp_path):
    (tmp_path / "server.py").write_text(SERVER)
    args = {"command": [sys.executable, str(tmp_path / "server.py")]}
    path = "offbeat_recipes.library.tools:McpTools"
    config = EnvironmentConfig(path=path, args=args, timeout_s=HANGS_S, max_attempts=2)
    processes = EnvironmentProcesses(config, tmp_path / "log")
    call = '<tool_call>{"name": "hangs"}</tool_call>~'
    replicas = ScriptedReplicas(char_tokenizer(string.printable), call)
    setup = replicas.setup()
    own = EnvironmentSetup(
        make=processes.make, decode=setup.task.decode, encode=setup.encode, close=processes.close
    )
    rollout = MultiTurn(setup.generator, own, config)
    try:
        with pytest.raises(EnvironmentFailed, match=rf"it took longer than {HANGS_S:g} s") as caught:
            await rollout.run(ASKED, SamplingParams(max_tokens=60, temperature=1.0, seed=1), 1)
    finally:
        await rollout.close()
    assert caught.value.counted_as == "environment timed out"
    assert len(replicas.requests) == 2, "tried once more, from the start"


async def test_a_server_that_dies_or_never_starts_fails_its_trajectory_alone(tools, tmp_path):
    one, other = tools(), tools()
    await one.reset(ASKED, 0)
    await other.reset(ASKED, 1)
    with pytest.raises(EnvironmentFailed):
        await one.step(action('<tool_call>{"name": "dies"}</tool_call>'))
    await one.close()
    said = await other.step(action('<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'))
    assert said.observation == [{"role": "tool", "content": "5"}]
    await other.close()
    absent = McpTools([str(tmp_path / "absent")])
    with pytest.raises(FileNotFoundError, match="absent"):
        await absent.reset(ASKED, 0)


async def test_methods_of_an_object_are_tools_as_trl_has_them(tmp_path):
    file = tmp_path / "shop.py"
    file.write_text(
        "class Shop:\n"
        "    def __init__(self, most=3):\n"
        "        self.most = most\n"
        "    def reset(self, item, **row):\n"
        "        self.item, self.bought = item, 0\n"
        "        return f'buy {item}'\n"
        "    async def buy(self, count):\n"
        "        if count > self.most: raise ValueError('so many')\n"
        "        self.bought += count\n"
        "        return self.bought\n"
        "    def get_reward(self):\n"
        "        return self.bought / 4\n"
    )
    shop = Methods(f"{file}:Shop", penalty=0.5, most=2)
    assert (
        await shop.reset(Prompt(uid="a", text="", token_ids=(1,), data={"item": "tea", "more": 1}), 0)
        == "buy tea"
    )
    said = await shop.step(action('<tool_call>{"name": "buy", "arguments": {"count": 2}}</tool_call>'))
    assert (said.observation, said.reward, said.done) == ([{"role": "tool", "content": "2"}], 0, False)
    for call, words in (
        ("buy", "ValueError: so many"),
        ("get_reward", "no tool 'get_reward'"),
        ("_x", "no tool '_x'"),
        ("sell", "no tool 'sell'"),
    ):
        text = json.dumps({"name": call, "arguments": {"count": 9}})
        said = await shop.step(action(f"<tool_call>{text}</tool_call>"))
        assert words in said.observation[0]["content"]
        assert said.reward == -0.5
    said = await shop.step(action("done"))
    assert (said.reward, said.done) == (0.5, True)
