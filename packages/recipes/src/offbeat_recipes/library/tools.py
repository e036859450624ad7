"""Tools of an MCP server, called by the policy in turns.

`environment.path=offbeat_recipes.library.tools:McpTools environment.args.command=[python,server.py] environment.reward_from=task`. The
rows' messages tell the policy which tools there are; a call is what the templates of Qwen and Hermes write:
`<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`.
"""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from offbeat_trainer import Feedback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat_trainer import Action, Prompt

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


class McpTools:
    """One server for each trajectory. What calls return is said as messages of the role `tool`; a turn without a call ends it.

    A call that cannot be read, of a tool that is not there, with arguments that the server refuses, or that raises over there is
    answered with what is wrong, and costs `penalty`. What the whole is worth the task's rewards say.
    """

    def __init__(self, command: Sequence[str], penalty: float = 0.0) -> None:
        """Start servers by `command`, a program and its arguments, which speaks MCP over standard input and output."""
        self._command = list(command)
        self._penalty = penalty
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

    async def step(self, action: Action) -> Feedback:
        """Make the calls of a turn, one after the other."""
        asked = _CALL.findall(action.text)
        if not asked:
            return Feedback(done=True)
        answers = [await self._answer(text) for text in asked]
        failed = sum(not fine for _, fine in answers)
        said = [{"role": "tool", "content": text} for text, _ in answers]
        return Feedback(
            observation=said, reward=-self._penalty * failed, parts={"failed_calls": float(failed)}
        )

    async def close(self) -> None:
        """End the server."""
        self._ends.set()
        if self._life is not None:
            with suppress(Exception):  # of a server that ended by itself
                await self._life

    async def _answer(self, text: str) -> tuple[str, bool]:
        """Return what one call came to, and whether that was well."""
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
        try:
            result = await self._session.call_tool(name, cast("dict[str, Any]", arguments))
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
