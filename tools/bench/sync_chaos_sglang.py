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
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import load_file

from offbeat_ckptsync.adapters.sglang import Loading, SglangMember, SglangServer, Way, tensors
from offbeat_ckptsync.adapters.sglang.proof import Proof
from offbeat_ckptsync.config import make_transport
from offbeat_ckptsync.network.agent import Agent
from offbeat_ckptsync.store import Store
from offbeat_rollout import GenerateRequest, SamplingParams
from offbeat_rollout.sglang import SglangConfig, SglangEngine
from offbeat_rollout.testing import make_tiny_model, reference_logprobs
from offbeat_trainer.weights.member import make_member
from sync_faults.actors import SECRET, obey
from sync_faults.hurt import Arms, HurtSender, HurtSource, HurtWeights, content_of, faulty_transport
from sync_faults.processes import FaultProcesses

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from offbeat_ckptsync.config import SyncConfig
    from offbeat_ckptsync.seams import Member

START_S = 900.0
"""For a server to come up; only a defect uses it up."""

SYNC_S = 300.0
"""Of one sync, all phases together."""

DEADLINE_S = 120.0
"""For a killed server's processes to be gone, and for one to answer."""

ADAPTER = "adapter"
WAYS = (*map(str, Way), ADAPTER)
NUM_CALLS = {Way.FILES: 7, Way.TENSORS: 12, Way.GROUP: 14, ADAPTER: 7}
"""Calls to the server in a sync, a few less than there are, so that every kill strikes in one."""

PART_BYTES = 1 << 16
"""Of a body of the session, for there to be several."""

_SHOWN = 4000
PROMPT = (3, 4, 5)


def weights_of(folder: str, version: int) -> dict[str, torch.Tensor]:
    """Return the weights of `version`: those in the model folder, and noise of its own on each tensor."""
    noise = torch.Generator().manual_seed(version)
    whole = load_file(f"{folder}/model.safetensors")
    if version:
        for tensor in whole.values():
            tensor += 0.02 * torch.randn(tensor.shape, generator=noise)
    return whole


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
        self._all = FaultProcesses(config, store=store, sender=f"{own}:sender", receiver=f"{own}:replica")
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
        keeper = cast("Any", engine)._server._keeper.pid  # noqa: SLF001 nobody else needs to know it
        (first,) = _children(keeper)
        self._pids = (first, _scheduler(first))
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

    def __init__(self, url: str, doom: Doom) -> None:
        super().__init__(url)
        self._doom = doom

    def _call(self, method: str, path: str, body: Any, timeout_s: float) -> Any:  # noqa: ANN401 as it is
        self._doom.called()
        return super()._call(method, path, body, timeout_s)


class Replica:
    """An engine, the member that brings it weights, and what it is asked."""

    def __init__(self, name: str, folder: str, way: str, config: SyncConfig) -> None:
        self._name, self._model, self._way, self._config = name, folder, way, config
        self.engine = SglangEngine(
            SglangConfig(model_path=folder, max_model_len=128, kv_cache_gib=0.1, start_timeout_s=START_S)
        )
        self._ids = itertools.count()

    async def start(self) -> Member:
        """Start the server, and return the member."""
        await self.engine.start()
        url = cast("Any", self.engine)._server.url  # noqa: SLF001 nobody else needs to know it
        self._asked = SglangServer(url)
        self.doom = Doom(self.engine)
        if self._way == ADAPTER:
            client = cast("Any", self.engine)._open_client  # noqa: SLF001 for its calls to be counted
            client.call = functools.partial(_counted, self.doom, client.call)
            self.member: Member = await make_member(self._name, self.engine, self._config)
            return self.member
        tensors._PART_BYTES = PART_BYTES  # noqa: SLF001 as a large model has them
        transport = make_transport(self._config.transport, self._config)
        loading = Loading(
            folder=Path(self._model).with_name(f"weights-{self._name}-{os.getpid()}"), by=Way(self._way)
        )
        self.member = SglangMember(self._name, DoomedServer(url, self.doom), transport, self._config, loading)
        return self.member

    async def serving(self) -> list[object]:
        """Return what the member says it serves: [version, content, committed], the content as seen at the server."""
        status = await self.member.status()
        whole = weights_of(self._model, status.version)
        held = await asyncio.to_thread(self._asked.checksums, DEADLINE_S)
        right = held == Proof(held, whole, "cpu").expected(whole)
        right = right and await self._gap(whole) <= 1e-4
        # Weights that were never committed are those that a server starts with: nobody has vouched for them.
        return [status.version, content_of(whole) if right else f"other weights: {held}", status.committed]

    async def _gap(self, whole: dict[str, torch.Tensor]) -> float:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self._model).eval()
        model.load_state_dict(whole)
        sampling = SamplingParams(max_tokens=12, seed=1)
        name = f"{self._name}-{next(self._ids)}"
        asked = GenerateRequest(request_id=name, prompt_ids=PROMPT, sampling=sampling)
        done = await self.engine.generate(asked)
        expected = reference_logprobs(model, PROMPT, done.token_ids.tolist(), sampling)
        return max(abs(a - b) for a, b in zip(done.logprobs, expected, strict=True))

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
    _redirect(Path(folder).with_name(f"{name}.log"))
    own = Replica(name, folder, way, config)
    agent = Agent(name, SECRET, member=await own.start())
    await agent.join(*store)
    handlers = {"was_killed": own.was_killed, "serving": own.serving, "stop": own.engine.stop}
    await obey(pipe, {"kill_at": own.doom.plant, **handlers})


async def sender(pipe: Connection, store: tuple[str, int], config: SyncConfig, name: str) -> None:
    """Be a trainer: commands `weights` version, `kill_at` bytes seconds."""
    folder = Store.join(*store, config.begin_timeout_s).get("model") or ""
    arms = Arms()
    weights = HurtWeights(arms)
    transport = faulty_transport(config, arms, sends=True)
    agent = Agent(name, SECRET, source=HurtSource(HurtSender(weights, config, arms, transport=transport)))

    async def take(version: int) -> None:
        weights.weights = weights_of(folder, version)

    async def kill_at(num_bytes: int, delay_s: float) -> None:
        arms.kill_at = num_bytes, delay_s

    await take(0)
    await agent.join(*store)
    await obey(pipe, {"weights": take, "kill_at": kill_at})


async def _counted(doom: Doom, call: Any, *arguments: Any, **more: Any) -> Any:  # noqa: ANN401 of the client
    doom.called()
    return await call(*arguments, **more)


def _children(pid: int) -> list[int]:
    said = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(word) for word in said.stdout.split()]


def _scheduler(first: int) -> int:
    """Return the process under the server's first that has the most memory: the weights are there."""
    return max(_children(first), key=lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]))


def _redirect(log: Path) -> None:
    """Send what this process and its server say to a file: the command's own output is one JSON object."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
