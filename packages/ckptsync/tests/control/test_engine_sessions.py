"""An update session that a manager who died has left open, in an executor of several workers such as vLLM's."""

from __future__ import annotations

import json
import re
from collections import deque
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from offbeat_ckptsync.control.ranks import _IS_OPEN, EngineRanks, Mailbox
from offbeat_ckptsync.toolkit.config import SyncConfig
from offbeat_ckptsync.toolkit.wire import encode
from offbeat_ckptsync.values import Manifest, Status, SyncOffer

OFFER = SyncOffer(
    sync_id="s",
    version=1,
    manifest=Manifest(specs=(), digest=""),
    bucket_bytes=64,
    transport="shm",
    endpoint={},
)


class Executor:
    """Workers that refuse to open a session twice, and answers that are read up to the first refusal (vLLM 0.32)."""

    def __init__(self, num_workers):
        self.is_open = False
        self.answers = [deque() for _ in range(num_workers)]
        self.updates = 0
        self.label = ""

    async def control(self, op, payload):
        for answers in self.answers:
            answers.append(self.work(op))
        match op:
            case "start":
                self.is_open = True
            case "finish":
                self.is_open = False
            case "update":
                self.updates += 1
        for answers in self.answers:
            if refusal := answers.popleft():
                raise RuntimeError(f"Worker failed with error {refusal!r}")
        self.label = payload.get("version", self.label)

    def work(self, op):
        if op == "start" and self.is_open:
            return "start_weight_update called while a weight update is already active. Call finish_weight_update first."
        return "" if op == "start" or self.is_open else f"{op} called without a matching start"


@pytest.mark.parametrize("num_workers", range(1, 9))
async def test_a_manager_goes_on_where_others_died_in_an_open_session(num_workers):
    executor = Executor(num_workers)
    for version in range(1, 5):
        await executor.control("start", {})  # by one that dies
        ranks = EngineRanks("m", executor.control, Mailbox(), SyncConfig())
        for _ in range(2):
            await ranks._start()
            assert executor.is_open
            assert ranks._start_note == ""
            before = executor.updates
            await ranks._call("update", {})
            assert executor.updates == before + 1
            await ranks._call("finish", {"version": version})
            assert not executor.is_open
            assert executor.label == version


class Answering(Executor):
    """An executor each of whose ranks mails that it has done what it was asked."""

    def __init__(self, num_workers, mailbox):
        super().__init__(num_workers)
        self.mailbox = mailbox

    async def control(self, op, payload):
        try:
            await super().control(op, payload)
        finally:
            if op == "update":
                status = Status(version=0, label=None, committed=False, state="idle")
                said = json.dumps({"num_ranks": len(self.answers), "status": encode(status)})
                for rank in range(len(self.answers)):
                    self.mailbox._store.set(f"{payload['reply']}/{rank}", said)

    async def pause(self):
        """What the engine asks its workers by itself, and takes a refusal that nobody has heard for the answer to."""
        for answers in self.answers:
            answers.append("")
        for answers in self.answers:
            if refusal := answers.popleft():
                raise RuntimeError(refusal)


@pytest.mark.parametrize("num_workers", range(1, 6))
async def test_no_refusal_is_left_for_a_call_of_the_engines_own(num_workers):
    mailbox = Mailbox()
    executor = Answering(num_workers, mailbox)
    for version in range(1, 9):  # each death leaves the answers one more call behind
        await executor.control("start", {})
        ranks = EngineRanks("m", executor.control, mailbox, SyncConfig())
        await ranks.ask("begin", replace(OFFER, version=version))
        await executor.pause()
        await ranks._call("finish", {"version": version})
        assert executor.label == version


async def test_another_refusal_is_noted_once():
    asked = []

    async def control(op, payload):
        asked.append(op)
        raise RuntimeError("no such engine")

    ranks = EngineRanks("m", control, Mailbox(), SyncConfig())
    await ranks._start()
    assert asked == ["start"]
    assert "no such engine" in ranks._start_note


def test_a_session_that_is_open_is_known_by_what_this_vllm_says():
    """Its calls carry text alone, so a new wording would break the take-over."""
    found = find_spec("vllm")
    if found is None:
        pytest.skip("vLLM is not installed")
    worker = Path(found.submodule_search_locations[0]) / "v1" / "worker" / "gpu_worker.py"
    assert _IS_OPEN in re.sub(r'"\s+f?"', "", worker.read_text())
