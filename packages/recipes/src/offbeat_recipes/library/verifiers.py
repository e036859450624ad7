"""Tasksets of verifiers v1, as they are: `environment.rollout=offbeat_recipes.library.verifiers:Verifiers environment.args.taskset=gsm8k`.

They run in a process with Python packages of its own (`scripts/verifiers.py`), since those of verifiers and of vLLM cannot be installed
together. Its train client asks the endpoint of a harness for tokens, which are trained as they were sampled.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat_recipes.library.harness import Harness
from offbeat_trainer.data.types import Score, is_correct
from offbeat_trainer.rollouts.client import GRACE_S, SECRETS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat_recipes.library.harness import Endpoint
    from offbeat_trainer import Prompt
    from offbeat_trainer.rollouts.own import RolloutSetup


class Verifiers(Harness):
    """Each row of the run's task is the data of one of verifiers' tasks; `scripts/verifiers.py` writes such rows.

    `command` runs the script, which it is given: uv, or a Python that has verifiers and transformers. `env` are further settings of
    verifiers' environment (`agent.runtime.type=subprocess`), `renderer` those of the renderer (`name=qwen3`), where the model's
    name does not tell which.
    """

    scores_itself = True
    start_timeout_s: float = 300.0

    def __init__(
        self,
        setup: RolloutSetup,
        *,
        taskset: str,
        command: Sequence[str] = ("uv", "run", "--script"),
        renderer: Mapping[str, Any] | None = None,
        **env: object,
    ) -> None:
        """Play `taskset`; its process starts with the first episode."""
        super().__init__(setup)
        tokenizer: Any = self._task.tokenizer
        self._client = {"renderer_model_name": tokenizer.name_or_path, "renderer": renderer}
        self._settings = {**env, "taskset": {"id": taskset}}
        self._command = [*command, str(Path(__file__).with_name("scripts") / "verifiers.py")]
        self._log = setup.log or "stderr"
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._url = ""

    async def play(self, prompt: Prompt, endpoint: Endpoint) -> Score:
        """Have one episode played over there."""
        from aiohttp import ClientConnectionError, ClientSession, ClientTimeout

        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                await self._start()
        client = {**self._client, "base_url": endpoint.base_url, "headers": {"x-api-key": endpoint.api_key}}
        request = {"client": client, "model": endpoint.model, "row": dict(prompt.data)}
        process = self._process
        assert process is not None
        try:
            async with (
                ClientSession(timeout=ClientTimeout(self.max_seconds), raise_for_status=True) as session,
                session.post(self._url, json=request) as answer,
            ):
                found = await answer.json()
        except ClientConnectionError as error:
            with suppress(TimeoutError):  # so that the next episode knows to start another
                await asyncio.wait_for(process.wait(), GRACE_S)
            raise RuntimeError(f"the process of verifiers broke off; its log is {self._log}") from error
        if "error" in found:
            raise RuntimeError(found["error"])
        return Score(reward=found["reward"], correct=is_correct(found["reward"], None), parts=found["parts"])

    async def close(self) -> None:
        """See `Rollout.close`."""
        if self._process is not None:
            self._process.stdin.close()  # pyright: ignore[reportOptionalMemberAccess] it is a pipe
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), GRACE_S)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        await super().close()

    async def _start(self) -> None:
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
                f"the process of verifiers named no port within {self.start_timeout_s:g} s; its log is {self._log}"
            ) from None
        finally:
            if not port:  # nobody else knows of it yet
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if not port:
            raise RuntimeError(f"the process of verifiers ended; its log is {self._log}")
        self._process, self._url = process, f"http://127.0.0.1:{port}/"
