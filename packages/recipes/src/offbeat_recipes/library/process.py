"""Harnesses of libraries that cannot be installed beside vLLM: they run in a process with Python packages of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from abc import ABC
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from offbeat_recipes.library.harness import Harness
from offbeat_trainer.rollouts.client import GRACE_S, SECRETS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from offbeat_trainer.rollouts.own import RolloutSetup


class ProcessHarness(Harness, ABC):
    """Its episodes are asked of `script`, which `command` runs: uv, or a Python that has the library.

    The script reads settings from the first line of standard input, writes the port that it serves at on 127.0.0.1 to the first line of
    standard output and nothing after it, answers a POST of JSON with JSON for each episode, and ends when standard input does.
    """

    library: ClassVar[str]  # what messages call it
    script: ClassVar[Path]
    start_timeout_s: float = 300.0

    def __init__(self, setup: RolloutSetup, command: Sequence[str], settings: Mapping[str, object]) -> None:
        """Keep what it starts with; the process starts with the first episode, and anew where it broke off."""
        super().__init__(setup)
        self._settings = dict(settings)
        self._command = [*command, str(self.script)]
        self._log = setup.log or "stderr"
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._url = ""

    async def ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        """Return the script's answer.

        Raises:
            RuntimeError: the process ended, named no port in time, or broke off; or its answer has an `error`, which is the message.
        """
        from aiohttp import ClientConnectionError, ClientSession, ClientTimeout

        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                self._process = await self._start()
            process = self._process
        try:
            async with (
                ClientSession(timeout=ClientTimeout(self.max_seconds), raise_for_status=True) as session,
                session.post(self._url, json=request) as answer,
            ):
                found: dict[str, Any] = await answer.json()
        except ClientConnectionError as error:
            with suppress(TimeoutError):  # so that the next episode knows to start another
                await asyncio.wait_for(process.wait(), GRACE_S)
            raise RuntimeError(f"the process of {self.library} broke off; its log is {self._log}") from error
        if "error" in found:
            raise RuntimeError(found["error"])
        return found

    async def close(self) -> None:
        """See `Rollout.close`."""
        if self._process is not None:
            self._process.stdin.close()  # pyright: ignore[reportOptionalMemberAccess] it is a pipe
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), GRACE_S)
            await _kill(self._process)
        await super().close()

    async def _start(self) -> asyncio.subprocess.Process:
        log = None if self.setup.log is None else self.setup.log.open("ab")
        env = {name: value for name, value in os.environ.items() if name not in SECRETS}  # noqa: TID251
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env, start_new_session=True
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(self._settings).encode() + b"\n")
        port = ""
        try:
            async with asyncio.timeout(self.start_timeout_s):
                port = (await process.stdout.readline()).decode().strip()
        except TimeoutError:
            raise RuntimeError(
                f"the process of {self.library} named no port within {self.start_timeout_s:g} s; its log is {self._log}"
            ) from None
        finally:
            if not port:  # nobody else knows of it yet
                await _kill(process)
        if not port:
            raise RuntimeError(f"the process of {self.library} ended; its log is {self._log}")
        self._url = f"http://127.0.0.1:{port}/"
        return process


async def _kill(process: asyncio.subprocess.Process) -> None:
    """End it and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
