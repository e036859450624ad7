# pyright: basic
"""A sender, a manager and two receivers in processes of their own, forked from one that has loaded torch already."""

from __future__ import annotations

import contextlib
import json
import multiprocessing as mp
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat_ckptsync.toolkit.store import Store
from offbeat_ckptsync.toolkit.wire import encode

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from offbeat_ckptsync.toolkit.config import SyncConfig

START_S = 600.0
"""For a process to come up; generous, because only a defect uses it up."""


class Actor:
    """One process and the pipe to it."""

    def __init__(self, role: str, name: str, store: Store, config: SyncConfig) -> None:
        """Start it; `wait_ready` returns when it has found its manager."""
        from sync_faults.actors import act

        context = mp.get_context("forkserver")
        # Not `actors`: a fork server finds what is installed.
        context.set_forkserver_preload(["offbeat_ckptsync.testing"])
        self.name = name
        self.pipe: Connection
        self.pipe, far = context.Pipe()
        self.process = context.Process(
            target=act, args=(far, role, (store.host, store.port), encode(config), name), daemon=True
        )
        self.process.start()
        far.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self.process.pid is not None
        return self.process.pid

    def wait_ready(self) -> None:
        """Wait until it takes commands."""
        self._answer("start", START_S)

    def ask(self, command: str, *arguments: object, timeout_s: float = START_S) -> Any:
        """Send a command and return its answer.

        Raises:
            EOFError: the process died.
            TimeoutError: it did not answer within `timeout_s`.
        """
        self.tell(command, *arguments)
        return self._answer(command, timeout_s)

    def tell(self, command: str, *arguments: object) -> None:
        """Send a command only; raises `EOFError` where the process is dead."""
        try:
            self.pipe.send_bytes(json.dumps([command, *arguments]).encode())
        except OSError as error:
            raise EOFError(f"{self.name} died before it was told {command}") from error

    def answer(self, timeout_s: float) -> Any:
        """Return the answer to what was told; raises as `ask`."""
        return self._answer("the last command", timeout_s)

    def is_alive(self) -> bool:
        """Say whether the process is there, stopped or not."""
        return self.process.is_alive()

    def wait_stopped(self, timeout_s: float) -> None:
        """Wait until the process is stopped, as a fault that hangs stops it; raises `TimeoutError`."""
        deadline = time.monotonic() + timeout_s
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0] != "T":
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} was not stopped within {timeout_s:g} s")
            time.sleep(0.01)

    def go_on(self) -> None:
        """Continue it where it was stopped."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.join(60)
        self.pipe.close()

    def _answer(self, what: str, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while not self.pipe.poll(0.02):
            if not self.process.is_alive() and not self.pipe.poll(0):
                raise EOFError(f"{self.name} died before it answered {what}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} did not answer {what} within {timeout_s:g} s")
        try:
            return json.loads(self.pipe.recv_bytes())
        except OSError as error:
            raise EOFError(f"{self.name} died before it answered {what}") from error


class FaultProcesses:
    """A manager, a sender and receivers in processes of their own; whoever is dead is replaced by `heal`."""

    def __init__(
        self,
        config: SyncConfig,
        *,
        receivers: tuple[str, ...] = ("r0", "r1"),
        store: Store | None = None,
        sender: str = "sender",
        receiver: str = "receiver",
    ) -> None:
        """Start all and wait until they have found one another at `store`; `sender` and `receiver` are roles, see `act`."""
        self.config = config
        self.store = Store.serve("127.0.0.1") if store is None else store
        self.receivers = receivers
        self._roles = {"sender": sender, "manager": "manager", **dict.fromkeys(receivers, receiver)}
        self.actors: dict[str, Actor] = {}
        self.version = 0
        self.heal()

    def heal(self) -> list[str]:
        """Continue the stopped, replace the dead, wait until all are together; return who was replaced."""
        for actor in self.actors.values():
            actor.go_on()
        dead = [name for name in self._roles if name not in self.actors or not self.actors[name].is_alive()]
        for name in dead:
            if name in self.actors:
                self.actors[name].end()
            self.actors[name] = Actor(self._roles[name], name, self.store, self.config)
        for name in dead:
            self.actors[name].wait_ready()
        others = [name for name in self._roles if name != "manager"]
        missing = self.manager.ask("wait", others, START_S)
        assert not missing, missing
        return dead

    @property
    def manager(self) -> Actor:
        """The manager."""
        return self.actors["manager"]

    @property
    def sender(self) -> Actor:
        """The sender."""
        return self.actors["sender"]

    def kill(self, name: str) -> None:
        """Kill one, as an operator would."""
        self.actors[name].process.kill()
        self.actors[name].process.join(60)

    def serving(self) -> dict[str, list[Any]]:
        """Return [version, content, committed, state] of every receiver that is alive; continues those stopped."""
        served: dict[str, list[Any]] = {}
        for name in self.receivers:
            if self.actors[name].is_alive():
                self.actors[name].go_on()
                with contextlib.suppress(EOFError):
                    served[name] = self.actors[name].ask("serving")
        return served

    def close(self) -> None:
        """End all."""
        for actor in self.actors.values():
            actor.go_on()
            actor.end()
