"""Requests that compute beside syncs, in threads and in tasks of a server: each sees one version."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from offbeat_ckptsync import (
    LocalMember,
    LockGate,
    ModuleSink,
    ModuleSource,
    RankId,
    Receiver,
    Sender,
    agent_of,
)
from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.ends.sender import LocalSource
from offbeat_ckptsync.errors import SyncFailed
from offbeat_ckptsync.toolkit.config import SyncConfig, make_transport

CONFIG = SyncConfig(transport="loopback", bucket_mib=64 / 1024)
LAYERS = 24
SYNCS = 30


class Layers(torch.nn.Module):
    """Each filled with one number, so that a request that sees two of them has seen two versions."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ParameterList(torch.zeros(64, 64) for _ in range(LAYERS))

    def fill(self, number):
        with torch.no_grad():
            for layer in self.layers:
                layer.fill_(number)

    def seen(self):
        return {float(layer.detach()[-1, -1]) for layer in self.layers}


async def syncs(served, gate):
    trained = Layers()
    manager = CheckpointEngineManager(LocalSource(Sender(ModuleSource(trained), CONFIG)), CONFIG)
    receiver = Receiver(RankId(member="m"), ModuleSink(served))
    manager.add(LocalMember(receiver, make_transport("loopback", CONFIG), gate=gate))
    for version in range(1, SYNCS + 1):
        trained.fill(version)
        await manager.sync(version)
        yield version


async def test_threads_that_serve_inside_the_gate_see_whole_versions():
    served, gate, stop = Layers(), LockGate(), threading.Event()
    torn, versions = [], set()

    def serve():
        while not stop.is_set():
            with gate:
                seen = served.seen()
            versions.update(seen)
            if len(seen) > 1:
                torn.append(seen)

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        async for version in syncs(served, gate):
            while version not in versions:  # noqa: ASYNC110 -- a thread sees it
                await asyncio.sleep(0.001)
    finally:
        stop.set()
        for thread in threads:
            thread.join(600)
    assert torn == []
    assert versions >= {*range(1, SYNCS + 1)}


async def test_tasks_that_serve_inside_the_gate_see_whole_versions_and_hold_up_no_loop():
    served, gate = Layers(), LockGate()
    seen, done = [], False

    async def serve():
        while not done:
            async with gate:
                before = served.seen()
                await asyncio.sleep(0)
                seen.append(before | served.seen())
            await asyncio.sleep(0)

    task = asyncio.create_task(serve())
    async for version in syncs(served, gate):
        while version not in seen[-1]:  # noqa: ASYNC110 -- the task sees it
            await asyncio.sleep(0)
    done = True
    await task
    assert [each for each in seen if len(each) > 1] == []


async def test_a_request_that_does_not_end_costs_the_flip_and_nobody_is_let_in_meanwhile():
    served, gate = Layers(), LockGate()
    with gate:
        pause = asyncio.create_task(gate.pause())
        await asyncio.sleep(0.05)
        assert not pause.done()
        entered = asyncio.create_task(gate.__aenter__())
        await asyncio.sleep(0.05)
        assert not entered.done()
    await pause
    await gate.resume()
    await entered
    await gate.__aexit__()
    assert served.seen() == {0.0}


def test_nobody_leaves_the_gate_out_by_accident():
    receiver = Receiver(RankId(member="m"), ModuleSink(Layers()))
    with pytest.raises(TypeError, match="gate"):
        LocalMember(receiver, make_transport("loopback", CONFIG))
    with pytest.raises(TypeError, match="gate"):
        agent_of(receiver, CONFIG, "secret")


class StepsBeside(ModuleSource):
    """An optimizer steps in the middle of a pass over the weights."""

    def __init__(self, module):
        super().__init__(module)
        self.module, self.steps_at = module, None

    def tensors(self):
        for number, (name, tensor) in enumerate(super().tensors()):
            if number == self.steps_at:
                self.module.fill(99.0)
            yield name, tensor


@pytest.mark.parametrize("steps_at", [0, LAYERS // 2, LAYERS - 1])
async def test_a_sync_beside_an_optimizer_step_fails_and_commits_no_mixture(steps_at):
    """Digests prove that what was copied arrived, not that it is of one moment."""
    from offbeat_ckptsync.seams import NO_TRAFFIC

    trained, served = Layers(), Layers()
    source = StepsBeside(trained)
    manager = CheckpointEngineManager(LocalSource(Sender(source, CONFIG)), CONFIG)
    receiver = Receiver(RankId(member="m"), ModuleSink(served))
    manager.add(LocalMember(receiver, make_transport("loopback", CONFIG), gate=NO_TRAFFIC))
    trained.fill(1.0)
    await manager.sync(1)
    trained.fill(2.0)
    source.steps_at = steps_at
    with pytest.raises(
        SyncFailed, match=rf"{LAYERS} tensors were written to while they were copied out, 'layers\.0' first"
    ):
        await manager.sync(2)
    assert served.seen() == {1.0}
    source.steps_at = None
    await manager.sync(2)
    assert served.seen() == {99.0}
