"""Tools of an MCP server, or the methods of an object, called by the policy in turns.

`environment.path=offbeat_recipes.library.tools:McpTools environment.args.command=[python,server.py] environment.reward_from=task`. The
rows' messages tell the policy which tools there are; a call is what the templates of Qwen and Hermes write:
`<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from offbeat_trainer import Feedback
from offbeat_trainer.data.loading import load_object

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat_trainer import Action, Prompt

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_NO_TOOLS = ("reset", "get_reward", "close")


class _Tools:
    """What the policy says is calls; a turn without one ends the trajectory. What calls return are messages of the role `tool`.

    A call that cannot be read, of a tool that is not there, with arguments that are refused, or that raises is answered with what is
    wrong, and costs `penalty`.
    """

    def __init__(self, penalty: float) -> None:
        self._penalty = penalty

    async def step(self, action: Action) -> Feedback:
        """Make the calls of a turn, one after the other."""
        calls = _CALL.findall(action.text)
        if not calls:
            return self._end()
        answers = [await self._answer(text) for text in calls]
        failed = sum(not fine for _, fine in answers)
        messages = [{"role": "tool", "content": text} for text, _ in answers]
        return Feedback(
            observation=messages, reward=-self._penalty * failed, parts={"failed_calls": float(failed)}
        )

    def _end(self) -> Feedback:
        return Feedback(done=True)

    async def _call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """Return what a call came to, and whether that was well."""
        raise NotImplementedError

    async def _answer(self, text: str) -> tuple[str, bool]:
        try:
            call = json.loads(text)
            name = str(call["name"])
            arguments: Any = call.get("arguments") or {}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return (
                f'no call that can be read ({error!r}); expected {{"name": .., "arguments": {{..}}}}',
                False,
            )
        if not isinstance(arguments, dict):
            return "`arguments` must be a mapping", False
        return await self._call(name, cast("dict[str, Any]", arguments))


class McpTools(_Tools):
    """One server for each trajectory. What the whole is worth the task's rewards say."""

    def __init__(self, command: Sequence[str], penalty: float = 0.0) -> None:
        """Start servers by `command`, a program and its arguments, which speaks MCP over standard input and output."""
        self._command = list(command)
        super().__init__(penalty)
        self._session: Any = None
        self._ends = asyncio.Event()
        self._life: asyncio.Task[None] | None = None

    async def reset(self, prompt: Prompt, seed: int) -> str:
        """Start a server."""
        del prompt, seed
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(ready), name="a server of tools")
        await asyncio.wait([ready, self._life], return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            await self._life  # raises what kept it from starting
        return ""

    async def close(self) -> None:
        """End the server."""
        self._ends.set()
        if self._life is not None:
            with suppress(Exception):  # of a server that ended by itself
                await self._life

    async def _call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        try:
            result = await self._session.call_tool(name, arguments)
        except Exception as error:  # noqa: BLE001 whatever a server raises
            await self._session.send_ping()  # raises where it has ended
            return f"{type(error).__name__}: {error}", False
        parts = [str(getattr(part, "text", "")) for part in cast("list[object]", result.content)]
        return "\n".join(parts), not result.is_error

    async def _live(self, ready: asyncio.Future[None]) -> None:
        """Hold a server: its scopes must be left by the task that entered them."""
        mcp: Any = import_module("mcp")
        program, *arguments = self._command
        parameters = mcp.StdioServerParameters(command=program, args=arguments)
        async with mcp.stdio_client(parameters) as (read, write), mcp.ClientSession(read, write) as session:
            await session.initialize()
            self._session = session
            ready.set_result(None)
            await self._ends.wait()


class Methods(_Tools):
    """The public methods of an object as tools, as TRL's `environment_factory` has them.

    `reset(**row)` begins, and may say something after the prompt; `get_reward()`, where it is there, says at the end what the
    trajectory is worth.
    """

    def __init__(self, make: str, penalty: float = 0.0, **args: object) -> None:
        """Make the object that `make` names, "package.module:Name" or "file.py:Name", with `args`."""
        super().__init__(penalty)
        made: Any = load_object(make)
        self._tools: Any = made(**args)

    async def reset(self, prompt: Prompt, seed: int) -> str:
        """Begin with the prompt's row."""
        del seed
        said = await _awaited(self._tools.reset(**prompt.data))
        return "" if said is None else str(said)

    def _end(self) -> Feedback:
        worth = getattr(self._tools, "get_reward", None)
        return Feedback(reward=0.0 if worth is None else float(worth()), done=True)

    async def _call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        method = None if name.startswith("_") or name in _NO_TOOLS else getattr(self._tools, name, None)
        if not callable(method):
            return f"there is no tool {name!r}", False
        try:
            return str(await _awaited(method(**arguments))), True
        except Exception as error:  # noqa: BLE001 whatever a user's tool raises
            return f"{type(error).__name__}: {error}", False


async def _awaited(value: Any) -> Any:  # noqa: ANN401 whatever a user's method returns
    return await value if inspect.isawaitable(value) else value
