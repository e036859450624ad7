"""The server's processes: started, waited for, and ended with all that they started."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat_rollout.errors import EngineStateError
from offbeat_rollout.interface import ServerUpdates
from offbeat_rollout.sglang import keeper
from offbeat_rollout.sglang.arguments import server_command
from offbeat_rollout.toolkit.folders import HeldFolder
from offbeat_rollout.toolkit.weight_files import folder_specs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from offbeat_rollout.sglang.client import Client
    from offbeat_rollout.sglang.config import SglangConfig
    from offbeat_rollout.types import WeightSpec


_LOOK_S = 0.2
_MEMORY = Path("/dev/shm")
_END_S = 1.5 * keeper.LEAVE_S  # more than a keeper waits
_KILLED_S = 5.0
STOP_TIMEOUT_S = _END_S + _KILLED_S
"""The longest that `Server.end` takes."""


class Server:
    """One server behind a keeper, which see. Its output goes where this process's goes. Only calls with `key` are answered."""

    def __init__(self, config: SglangConfig) -> None:
        """Start the processes, which take their time to come up."""
        self._port = held_port()
        # Unix sockets lie in the one, whose paths must be short; new weights wait in the other.
        self._folders = [HeldFolder(Path(tempfile.gettempdir())), HeldFolder(_MEMORY)]
        self.key = secrets.token_hex(32)
        arguments = self._folders[0].path / "arguments.yaml"  # every user can list the words of a command
        arguments.write_text(json.dumps({"api-key": self.key}))
        self._keeper = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                str(Path(keeper.__file__)),
                *(str(each.path) for each in self._folders),
                *server_command(config, self.port, arguments),
            ],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    @property
    def port(self) -> int:
        """Where it listens once it has come up."""
        return int(self._port.getsockname()[1])

    @property
    def memory(self) -> Path:
        """A folder that the server can read, in memory where there is such a place."""
        return self._folders[1].path

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def ended(self) -> bool:
        """Whether it is there no more."""
        return self._keeper.poll() is not None

    async def ready(self, client: Client) -> None:
        """Wait until it answers; the caller sets the limit.

        Raises:
            EngineStateError: it ended.
        """
        while not await client.answers(_LOOK_S):
            if self.ended:
                raise EngineStateError(
                    f"SGLang's server ended with exit code {self._keeper.returncode} while it came up; its log says why"
                )
            await asyncio.sleep(_LOOK_S)

    def end(self) -> None:
        """End it and all that it started. Blocks."""
        stdin = self._keeper.stdin
        assert stdin is not None
        with suppress(BrokenPipeError):
            stdin.close()
        try:
            self._keeper.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()  # the server's first process goes with it
            self._keeper.wait(_KILLED_S)
        self._port.close()
        for folder in self._folders:
            folder.close()


def held_port() -> socket.socket:
    """Return a socket that keeps its free port from others, who bind it later, but for a server that wants to listen on it.

    The server binds it half a minute after it was chosen. As every server does it allows `SO_REUSEADDR`, and nobody listens here; the
    system gives the port to nobody who asks for any.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


class SglangUpdates(ServerUpdates):
    """The updates of one `SglangEngine`."""

    def __init__(
        self,
        config: SglangConfig,
        server: Callable[[], Server],
        resting: Callable[[int, bool], AbstractAsyncContextManager[None]],
    ) -> None:
        """Tell of `server()`; within `resting(version, recompute_kv)` it rests, and after it serves `version`."""
        self._config = config
        self._server = server
        self._resting = resting
        self._specs: list[WeightSpec] = []
        self._one_at_a_time = asyncio.Lock()  # SGLang would give one update the answer to another, and end

    @property
    def url(self) -> str:
        """See `ServerUpdates`."""
        return self._server().url

    @property
    def key(self) -> str:
        """See `ServerUpdates`."""
        return self._server().key

    @property
    def folder(self) -> Path:
        """See `ServerUpdates`."""
        return self._server().memory

    @property
    def way(self) -> str:
        """See `ServerUpdates`."""
        return self._config.updates_by

    async def specs(self) -> list[WeightSpec]:
        """Return what the model folder holds, in the dtype served; no engine has to run for it."""
        if not self._specs:
            self._specs = await asyncio.to_thread(
                lambda: folder_specs(self._config.model_path, self._config.dtype)
            )
        return list(self._specs)

    async def load(
        self, load: Callable[[], Awaitable[None]], version: int, *, recompute_kv: bool = False
    ) -> None:
        """See `ServerUpdates`; a second call waits for the first one's end."""
        async with self._one_at_a_time, self._resting(version, recompute_kv):
            await load()
