# pyright: basic
"""Replicas with a real SGLang server each, and a sender of such a model, that can be hurt; see `actors`.

What a server serves is judged by what it hashes of its own memory and by log-probs of a completion beside those of the trainer's
model.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import load_file

from offbeat_ckptsync.adapters.sglang import Loading, SglangMember, SglangServer, Way
from offbeat_ckptsync.adapters.sglang.server import Layout, Proof, held_by_ranks
from offbeat_ckptsync.control.agent import Agent
from offbeat_ckptsync.ends.receiver import State
from offbeat_ckptsync.errors import TransferError
from offbeat_ckptsync.toolkit.store import Store
from offbeat_rollout import GenerateRequest, SamplingParams
from offbeat_rollout.sglang import SglangConfig, SglangEngine
from offbeat_rollout.testing import reference_logprobs
from sync_faults.actors import SECRET, obey
from sync_faults.hurt import (
    SLOW_S,
    Arms,
    HurtMember,
    HurtSender,
    HurtSource,
    HurtWeights,
    content_of,
    faulty_transport,
)

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from offbeat_ckptsync.seams import Member
    from offbeat_ckptsync.toolkit.config import SyncConfig
    from offbeat_ckptsync.values import Status

START_S = 900.0
"""For a server to come up; only a defect uses it up."""

DEADLINE_S = 120.0
"""For a server to answer."""

PROMPT = (3, 4, 5)


def weights_of(folder: str, version: int) -> dict[str, torch.Tensor]:
    """Return the weights of `version`: those in the model folder, and noise of its own on each tensor."""
    noise = torch.Generator().manual_seed(version)
    whole = load_file(f"{folder}/model.safetensors")
    if version:
        for tensor in whole.values():
            tensor += 0.02 * torch.randn(tensor.shape, generator=noise)
    return whole


class Replica:
    """An engine, the member that brings it weights, and what it serves."""

    def __init__(self, name: str, folder: str, config: SyncConfig) -> None:
        self.name, self.config = name, config
        self._model = folder
        self.engine = SglangEngine(
            SglangConfig(model_path=folder, max_model_len=128, kv_cache_gib=0.1, start_timeout_s=START_S)
        )
        self._ids = itertools.count()

    async def start(self) -> Member:
        """Start the server, and return the member."""
        await self.engine.start()
        server = cast("Any", self.engine)._server
        self._asked = SglangServer(server.url, api_key=server.key)
        self.member = await self.make_member(server.url, server.key)
        return self.member

    async def make_member(self, url: str, api_key: str) -> Member:
        """Return what brings the server at `url` its weights."""
        raise NotImplementedError

    def loading(self, by: Way) -> Loading:
        """Return how the server gets its weights: a folder beside that of the model."""
        return Loading(folder=Path(self._model).with_name(f"weights-{self.name}-{os.getpid()}"), by=by)

    async def serving(self) -> list[object]:
        """Return what the member says it serves: [version, content, committed], the content as seen at the server.

        A member that was fenced off may be brought up to the version of now while it is looked at: what counts is seen
        while it says the same before and after.
        """
        deadline = time.monotonic() + DEADLINE_S
        while True:
            status = await self.member.status()
            seen = await self._serves(status)
            still = await self.member.status() == status and status.state != State.FLIPPING
            if still or time.monotonic() > deadline:
                return seen

    async def _serves(self, status: Status) -> list[object]:
        whole = weights_of(self._model, status.version)
        held = held_by_ranks(await asyncio.to_thread(self._asked.checksums, DEADLINE_S), 1)
        right = held == Proof(held[0], whole, Layout()).expected(whole.__getitem__)
        right = right and await self._gap(whole) <= 1e-4
        # Weights that were never committed are those that a server starts with: nobody has vouched for them.
        return [status.version, content_of(whole) if right else f"other weights: {held}", status.committed]

    async def _gap(self, whole: dict[str, torch.Tensor]) -> float:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self._model).eval()
        model.load_state_dict(whole)
        sampling = SamplingParams(max_tokens=12, seed=1)
        name = f"{self.name}-{next(self._ids)}"
        asked = GenerateRequest(request_id=name, prompt_ids=PROMPT, sampling=sampling)
        done = await self.engine.generate(asked)
        expected = reference_logprobs(model, PROMPT, done.token_ids.tolist(), sampling)
        return max(abs(a - b) for a, b in zip(done.logprobs, expected, strict=True))


class AimedArms(Arms):
    """Strikes at another process where there is an aim, and else at this one."""

    aim = 0

    def hit(self, phase: str) -> bool:
        """See `Arms.hit`."""
        if not self.aim:
            return super().hit(phase)
        kind = self.take(phase)
        if kind:
            os.kill(self.aim, signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
        if kind == "slow":
            threading.Timer(SLOW_S, os.kill, (self.aim, signal.SIGCONT)).start()
        return False


class HurtServer(SglangServer):
    """Faults of the flip: they strike when the server is asked to load, or spoil a byte of what it is to load."""

    def __init__(self, url: str, api_key: str, arms: Arms) -> None:
        super().__init__(url, api_key=api_key)
        self._arms = arms

    def load(self, folder: str, version: str, *, flush_cache: bool, timeout_s: float) -> None:
        """See `SglangServer.load`."""
        if self._arms.hit("flip"):
            with (Path(folder) / "model.safetensors").open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                (last,) = file.read(1)
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last ^ 1]))
        super().load(folder, version, flush_cache=flush_cache, timeout_s=timeout_s)


class HurtSglangMember(HurtMember, SglangMember):
    """The faults of a receiver, in a member of a server."""


class HurtReplica(Replica):
    """Faults of the member's process, and of the server's scheduler."""

    async def make_member(self, url: str, api_key: str) -> Member:
        """See `Replica.make_member`."""
        self._scheduler = processes_of(self.engine)[1]
        self.arms = HurtMember.arms = AimedArms()
        transport = faulty_transport(self.config, self.arms, sends=False)
        server = HurtServer(url, api_key, self.arms)
        return HurtSglangMember(self.name, server, transport, self.config, self.loading(Way.FILES))

    async def arm(self, role: str, phase: str, kind: str) -> None:
        """Plant a fault of the `server` or of the `receiver`."""
        self.arms.aim = self._scheduler if role == "server" else 0
        self.arms.arm(phase, kind)

    async def armed(self) -> bool:
        """Say whether the fault has not struck yet."""
        return self.arms.peek()[0] != ""

    async def serving(self) -> list[object]:
        """See `Replica.serving`; a stopped server goes on first, and one that is gone serves nothing."""
        try:
            os.kill(self._scheduler, signal.SIGCONT)
            return await super().serving()
        except (ProcessLookupError, TransferError):
            return [-1, "gone", False]


def processes_of(engine: SglangEngine) -> tuple[int, int]:
    """Return a server's first process, and its scheduler: the one under it with the most memory, where the weights are."""
    (first,) = _children(cast("Any", engine)._server._keeper.pid)
    own = _children(first)
    return first, max(own, key=lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]))


def _children(pid: int) -> list[int]:
    said = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(word) for word in said.stdout.split()]


def redirect(log: Path) -> None:
    """Send what this process and its server say to a file."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


async def replica(pipe: Connection, store: tuple[str, int], config: SyncConfig, name: str) -> None:
    """Be a replica with a server: commands `arm` role phase kind, `armed`, `serving`, `stop`."""
    folder = Store.join(*store, config.begin_timeout_s).get("model") or ""
    redirect(Path(folder).with_name(f"{name}.log"))
    own = HurtReplica(name, folder, config)
    agent = Agent(name, SECRET, member=await own.start())
    await agent.join(*store)
    await obey(pipe, {"arm": own.arm, "armed": own.armed, "serving": own.serving, "stop": own.engine.stop})


async def sender(pipe: Connection, store: tuple[str, int], config: SyncConfig, name: str) -> None:
    """Be a trainer: commands `arm` phase kind, `weights` version, `kill_at` bytes seconds."""
    folder = Store.join(*store, config.begin_timeout_s).get("model") or ""
    arms = Arms()
    weights = HurtWeights(arms)
    transport = faulty_transport(config, arms, sends=True)
    agent = Agent(name, SECRET, source=HurtSource(HurtSender(weights, config, arms, transport=transport)))

    async def take(version: int) -> None:
        weights.weights = weights_of(folder, version)

    async def kill_at(num_bytes: int, delay_s: float) -> None:
        arms.kill_at = num_bytes, delay_s

    async def arm(phase: str, kind: str) -> None:
        arms.arm(phase, kind)

    async def armed() -> bool:
        return arms.peek()[0] != ""

    await take(0)
    await agent.join(*store)
    await obey(pipe, {"weights": take, "kill_at": kill_at, "arm": arm, "armed": armed})
