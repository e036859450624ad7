"""The parties of `sync_chaos.py` over real SGLang servers: a sender, a manager and two replicas, each with a server of its own.

A replica's weights come by offbeat-ckptsync's member (`files`, `tensors`, `group`), or as in a run, through the rollout adapter
(`adapter`). The victims are the sender and, of a server, its first process or its scheduler: a call to the server is drawn from
those that a sync makes (of the session, before it, and after it), and the kill strikes up to 60 ms after the call was sent. A replica
whose server was killed is started anew. What a server serves is judged by what it hashes of its own memory and by log-probs
of a completion beside those of the trainer's model.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from offbeat_ckptsync.adapters.sglang import SglangMember, SglangServer, Way, group
from offbeat_ckptsync.control.agent import Agent
from offbeat_ckptsync.toolkit.config import make_transport
from offbeat_ckptsync.toolkit.store import Store
from offbeat_rollout.testing import make_tiny_model
from offbeat_trainer.cluster.weights import make_member
from sync_faults import over_sglang
from sync_faults.actors import SECRET, obey
from sync_faults.hurt import content_of
from sync_faults.over_sglang import DEADLINE_S, START_S, processes_of, redirect, weights_of
from sync_faults.processes import FaultProcesses

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from offbeat_ckptsync.seams import Member
    from offbeat_ckptsync.toolkit.config import SyncConfig
    from offbeat_rollout.sglang import SglangEngine

SYNC_S = 300.0
"""Of one sync, all phases together."""

ADAPTER = "adapter"
WAYS = (*map(str, Way), ADAPTER)
NUM_CALLS = {Way.FILES: 7, Way.TENSORS: 12, Way.GROUP: 14, ADAPTER: 7}
"""Calls to the server in a sync, a few less than there are, so that every kill strikes in one."""

PART_BYTES = 1 << 16
"""Of a body of the session, for there to be several."""

_SHOWN = 4000


class OverSglang:
    """See `sync_chaos.Party`."""

    def __init__(self, config: SyncConfig, way: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="offbeat-sync-")
        self._model = make_tiny_model(Path(self._folder.name) / "model", tie_word_embeddings=False)
        self._way = way
        self._kills = itertools.count()
        store = Store.serve("127.0.0.1")
        store.set("model", self._model)
        store.set("way", way)
        own = Path(__file__).stem
        self._all = FaultProcesses(
            config, store=store, sender="sync_faults.over_sglang:sender", receiver=f"{own}:replica"
        )
        self.version = 0
        self.receivers = tuple(self._all.receivers)
        self.num_bytes = sum(tensor.nbytes for tensor in weights_of(self._model, 0).values())

    def content(self, version: int) -> str:
        """See `sync_chaos.Party`."""
        return content_of(weights_of(self._model, version))

    def kill_at(self, victim: str, num_bytes: int, delay_s: float) -> None:
        """See `sync_chaos.Party`; a server is killed at the call whose place among all is that of the byte."""
        at: list[object] = [
            num_bytes,
            delay_s / 4,
        ]  # of the sender: less is packed here than over the other carriers
        if victim in self.receivers:
            call = (num_bytes - 1) * NUM_CALLS[self._way] // self.num_bytes + 1
            at = [call, delay_s, next(self._kills) % 2]
        self._all.actors[victim].ask("kill_at", *at)

    def sync(self, version: int) -> list[str]:
        """See `sync_chaos.Party`."""
        self._all.sender.ask("weights", version)
        return self._all.manager.ask("sync", version, {}, timeout_s=START_S).get("members", [])

    def was_killed(self, victim: str) -> bool:
        """See `sync_chaos.Party`."""
        actor = self._all.actors[victim]
        if victim in self.receivers:
            return actor.ask("was_killed", timeout_s=START_S)
        actor.process.join(DEADLINE_S)
        return actor.process.exitcode == -signal.SIGKILL

    def serving(self, dead: str = "") -> dict[str, tuple[int, str, bool]]:
        """See `sync_chaos.Party`."""
        names = [name for name in self.receivers if name != dead]
        held = {name: self._all.actors[name].ask("serving", timeout_s=START_S) for name in names}
        return {name: (one[0], one[1], one[2]) for name, one in held.items()}

    def heal(self, victim: str) -> None:
        """See `sync_chaos.Party`."""
        if victim in self.receivers:
            self._all.kill(victim)
        self._all.heal()

    def close(self) -> None:
        """See `sync_chaos.Party`."""
        for name in self.receivers:
            if self._all.actors[name].is_alive():
                self._all.actors[name].ask("stop", timeout_s=START_S)
            else:
                log = Path(self._folder.name) / f"{name}.log"
                print(f"{name} is dead. {log.read_text()[-_SHOWN:]}", file=sys.stderr)
        self._all.close()
        self._folder.cleanup()


class Doom:
    """Kills a process of a server while one of the calls to it is under way."""

    def __init__(self, engine: SglangEngine) -> None:
        self._pids = processes_of(engine)
        self._left = 0
        self._delay_s = 0.0
        self._victim = 0
        self._lock = threading.Lock()
        self.struck = threading.Event()

    async def plant(self, call: int, delay_s: float, process: int) -> None:
        """Strike `delay_s` after `call` calls from now, at the first process (0) or the scheduler (1)."""
        self._left, self._delay_s, self._victim = call, delay_s, self._pids[process]

    def called(self) -> None:
        """A call is sent now."""
        with self._lock:
            self._left -= 1
            if self._left == 0:
                threading.Timer(self._delay_s, self._strike).start()

    def _strike(self) -> None:
        os.kill(self._victim, signal.SIGKILL)
        self.struck.set()


class DoomedServer(SglangServer):
    """The calls of a member, counted."""

    def __init__(self, url: str, api_key: str, doom: Doom) -> None:
        super().__init__(url, api_key=api_key)
        self._doom = doom

    def _call(self, method: str, path: str, body: Any, timeout_s: float) -> Any:  # noqa: ANN401 as it is
        self._doom.called()
        return super()._call(method, path, body, timeout_s)


class Replica(over_sglang.Replica):
    """One whose server may be killed."""

    def __init__(self, name: str, folder: str, way: str, config: SyncConfig) -> None:
        super().__init__(name, folder, config)
        self._way = way

    async def make_member(self, url: str, api_key: str) -> Member:
        """Return what brings the server its weights, by calls that are counted."""
        self.doom = Doom(self.engine)
        if self._way == ADAPTER:
            client = cast("Any", self.engine)._open_client  # noqa: SLF001 for its calls to be counted
            client.call = functools.partial(_counted, self.doom, client.call)
            return await make_member(self.name, self.engine, self.config)
        group.PART_BYTES = PART_BYTES  # so that there are several, as of a large model
        transport = make_transport(self.config.transport, self.config)
        loading = self.loading(Way(self._way))
        return SglangMember(self.name, DoomedServer(url, api_key, self.doom), transport, self.config, loading)

    async def was_killed(self) -> bool:
        """Wait for the kill, and for the rest of the server to be gone; one that was not to strike yet strikes now."""
        if not await asyncio.to_thread(self.doom.struck.wait, 1.0):
            await self.doom.plant(1, 0.0, 0)
            self.doom.called()
        async with asyncio.timeout(DEADLINE_S):
            while (await self.engine.health()).ok:  # noqa: ASYNC110 processes are looked at
                await asyncio.sleep(0.05)
        return self.doom.struck.is_set()


async def replica(pipe: Connection, store: tuple[str, int], config: SyncConfig, name: str) -> None:
    """Be a replica with a server: commands `kill_at` call seconds process, `was_killed`, `serving`, `stop`."""
    told = Store.join(*store, config.begin_timeout_s)
    folder, way = told.get("model") or "", told.get("way") or ""
    redirect(Path(folder).with_name(f"{name}.log"))
    own = Replica(name, folder, way, config)
    agent = Agent(name, SECRET, member=await own.start())
    await agent.join(*store)
    handlers = {"was_killed": own.was_killed, "serving": own.serving, "stop": own.engine.stop}
    await obey(pipe, {"kill_at": own.doom.plant, **handlers})


async def _counted(doom: Doom, call: Any, *arguments: Any, **more: Any) -> Any:  # noqa: ANN401 of the client
    doom.called()
    return await call(*arguments, **more)
