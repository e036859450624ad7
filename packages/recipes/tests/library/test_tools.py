"""Tools of a real MCP server behind an environment: calls, mistakes, a tool that lies, a server that dies."""

import sys

import pytest

from offbeat_recipes.library.tools import McpTools
from offbeat_trainer import Prompt
from offbeat_trainer.config import EnvironmentConfig
from offbeat_trainer.errors import EnvironmentFailed
from offbeat_trainer.rollouts.environment import Action
from offbeat_trainer.rollouts.processes import EnvironmentProcesses

pytestmark = pytest.mark.spawns

SERVER = """
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
def dies() -> int:
    os._exit(3)

server.run(transport="stdio")
"""
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
