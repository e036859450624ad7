#!/usr/bin/env python3
"""The clients of `episodes.py`: each plays one episode of several turns over HTTP, as an agent does, with its whole history a turn.

episodes_clients.py TURNS OBSERVED
"""

from __future__ import annotations

import asyncio
import sys

from aiohttp import ClientSession, TCPConnector


async def talk_as_clients(turns: int, observed: str) -> None:
    """Play an episode for each line of standard input, and say when it is over."""
    lines, tasks = asyncio.StreamReader(), set[asyncio.Task[None]]()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with ClientSession(connector=TCPConnector(limit=0)) as session:

        async def talk(url: str, key: str) -> None:
            messages = [{"role": "user", "content": "begin"}]
            for _ in range(turns):
                asked = {"model": "policy", "messages": messages}
                headers = {"Authorization": f"Bearer {key}"}
                async with session.post(f"{url}/chat/completions", json=asked, headers=headers) as answer:
                    answer.raise_for_status()
                    said = (await answer.json())["choices"][0]["message"]
                messages += [said, {"role": "user", "content": observed}]
            print(key, flush=True)

        while line := (await lines.readline()).decode():
            url, key = line.split()
            task = asyncio.create_task(talk(url, key))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


if __name__ == "__main__":
    asyncio.run(talk_as_clients(int(sys.argv[1]), sys.argv[2]))
