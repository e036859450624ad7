"""Whose a process is, with real processes named as vLLM's are, and no vLLM."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from offbeat_rollout import EngineStateError
from offbeat_rollout.testing import make_tiny_model
from offbeat_rollout.vllm import VllmConfig, VllmEngine, vllm_environment
from offbeat_rollout.vllm.processes import Forking, Launched

pytestmark = pytest.mark.spawns

WAIT_S = 60
spawn = multiprocessing.get_context("spawn")


class Engine:
    """What a build leaves: one process."""

    def __init__(self, process):
        self.process = process

    def shutdown(self, timeout=None):
        self.process.terminate()
        self.process.join(timeout)


def build(folder="", name="EngineCore", begun=None, go=None):
    """Start a process and, if told so, take until `go` to be ready."""
    process = spawn.Process(target=time.sleep, args=(300,), name=name)
    process.start()
    if begun is not None:
        begun.set()
        assert go.wait(WAIT_S)
    return Engine(process)


def test_two_engines_that_start_at_once_own_a_process_each():
    begun, go = threading.Event(), threading.Event()
    first, second = Launched(lambda folder: build(folder, begun=begun, go=go)), Launched(build)
    other = build(name="somebody else's")
    with ThreadPoolExecutor() as threads:
        one = threads.submit(first.run, WAIT_S)
        assert begun.wait(WAIT_S)
        two = threads.submit(second.run, WAIT_S)
        late = build(name="somebody else's, started meanwhile")
        assert [child.pid for child in first.children()]
        go.set()
        processes = [one.result(WAIT_S).process, two.result(WAIT_S).process]
    try:
        assert [first.children(), second.children()] == [[processes[0]], [processes[1]]]
        first.end()
        first.end()
        alive = [p.is_alive() for p in (*processes, other.process, late.process)]
        assert alive == [False, True, True, True]
    finally:
        for engine in (other, late):
            engine.shutdown()
        second.end()


def test_an_engine_ended_while_it_starts_leaves_nothing():
    begun, go = threading.Event(), threading.Event()
    launched = Launched(lambda folder: build(folder, begun=begun, go=go))
    with ThreadPoolExecutor() as threads:
        run = threads.submit(launched.run, WAIT_S)
        assert begun.wait(WAIT_S)
        [child] = launched.children()
        launched.end()
        assert not child.is_alive()
        go.set()
        with pytest.raises(EngineStateError, match="ended while it came up"):
            run.result(WAIT_S)


def test_an_engine_whose_turn_does_not_come_says_so():
    begun, go = threading.Event(), threading.Event()
    first = Launched(lambda folder: build(folder, begun=begun, go=go))
    with ThreadPoolExecutor() as threads:
        run = threads.submit(first.run, WAIT_S)
        assert begun.wait(WAIT_S)
        with pytest.raises(EngineStateError, match="another engine of this process was still starting"):
            Launched(build).run(0.05)
        go.set()
        run.result(WAIT_S)
    first.end()


async def test_a_cancelled_start_leaves_no_engine(tmp_path, monkeypatch):
    begun, go = threading.Event(), threading.Event()
    config = VllmConfig(model_path=make_tiny_model(tmp_path), max_model_len=64)
    for name, value in vllm_environment(config).items():
        monkeypatch.setenv(name, value)
    built = []
    monkeypatch.setattr(
        "offbeat_rollout.vllm.engine.build_vllm",
        lambda *_: built.append(build(begun=begun, go=go)) or built[0],
    )
    engine = VllmEngine(config)
    start = asyncio.create_task(engine.start())
    assert await asyncio.to_thread(begun.wait, WAIT_S)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    go.set()
    while not built:  # noqa: ASYNC110 - the thread tells nobody
        await asyncio.sleep(0.01)
    assert not built[0].process.is_alive()
    with pytest.raises(EngineStateError, match="call `start` first"):
        await engine.generate(None)


def computed(pipe):
    pipe.send(torch.full((1 << 20,), 2.0).sqrt().square().sum().item())


async def test_a_fork_of_a_thread_that_computed_with_others_computes():
    """OpenMP keeps the threads of each thread that computes, and a fork has none of them."""
    before = torch.get_num_threads()

    def fork():
        torch.set_num_threads(2)
        torch.full((1 << 20,), 2.0).sqrt()
        ours, theirs = Forking().Pipe()
        process = Forking().Process(target=computed, args=(theirs,))
        process.start()
        try:
            return ours.recv() if ours.poll(WAIT_S) else None
        finally:
            process.kill()
            process.join()

    try:
        assert await asyncio.to_thread(fork) == pytest.approx(2 << 20)
    finally:
        torch.set_num_threads(before)


def signalled(pipe):
    signal.signal(signal.SIGTERM, lambda *_: pipe.send("heard"))
    pipe.send("ready")
    time.sleep(300)


async def test_a_signal_to_a_fork_is_none_to_its_parent():
    loop, heard = asyncio.get_running_loop(), []
    loop.add_signal_handler(signal.SIGTERM, heard.append, "the parent")
    ours, theirs = Forking().Pipe()
    process = Forking().Process(target=signalled, args=(theirs,))
    process.start()
    try:
        assert ours.recv() == "ready"
        os.kill(process.pid, signal.SIGTERM)
        assert ours.recv() == "heard"
        for _ in range(3):
            await asyncio.sleep(0)  # what woke the loop would be seen here
        assert not heard
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        process.kill()
        process.join()
