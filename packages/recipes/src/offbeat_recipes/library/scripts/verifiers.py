# /// script
# requires-python = ">=3.11"
# dependencies = ["verifiers==0.4.0", "httpx", "transformers"]
# ///
"""The process in which tasksets of verifiers v1 are played, with Python packages of its own; `verifiers.Verifiers` starts it.

`uv run --script verifiers.py TASKSET` writes the tasks of a taskset as rows for `task=file`, one JSON object a line.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from importlib import import_module
from statistics import fmean
from typing import Any

sys.path[0] = os.getcwd()  # in place of this folder, whose verifiers.py is another


def load(settings: dict[str, Any]) -> Any:  # noqa: ANN401 a library's
    """Return the environment of verifiers that `settings` describe."""
    loaders = import_module("verifiers.v1.utils.loaders")
    return loaders.load_environment(loaders.resolve_env_config(settings))


async def play(env: Any, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401 a library's
    """Play one episode on the task that a row is, and return what it is worth: the mean over the traces that train."""
    v1: Any = import_module("verifiers.v1")
    kind = env.taskset.task_type()
    task = kind(kind.data_type().model_validate(asked["row"]), env.config.taskset.task)
    client = v1.TrainClientConfig(**asked["client"], api_key_var="OFFBEAT_NONE")
    episode = await env.run_slot(env.slots(task)[0], v1.ModelContext(client=client, model=asked["model"]))
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if not episode.ok or not traces:
        errors = [error for one in (episode, *episode.traces) for error in one.errors]
        return {"error": "; ".join(f"{one.type}: {one.message}" for one in errors) or "no trace that trains"}
    rewards = [
        {name: one.value for name, one in trace.rewards.items() if one is not None} for trace in traces
    ]
    parts = {name: fmean(one.get(name, 0.0) for one in rewards) for names in rewards for name in names}
    return {"reward": fmean(trace.reward for trace in traces), "parts": parts}


async def serve(settings: dict[str, Any]) -> None:
    """Play what is posted, and say at which port, until standard input ends. What tasksets print goes where errors go."""
    from aiohttp import web  # verifiers needs it

    env, said = load(settings), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(await play(env, await request.json()))

    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/", answer)
    runner = web.AppRunner(
        app, access_log=None, handler_cancellation=True
    )  # of a harness that gave an episode up
    await runner.setup()
    async with env.serving():
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(runner.addresses[0][1], file=said)
        await asyncio.to_thread(sys.stdin.read)
        await runner.cleanup()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        for task in load({"taskset": {"id": sys.argv[1]}}).taskset:
            print(json.dumps(task.data.model_dump(mode="json", exclude_defaults=True)))  # noqa: T201 the answer
    else:
        asyncio.run(serve(json.loads(sys.stdin.readline())))
