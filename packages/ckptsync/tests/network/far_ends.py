# pyright: basic
"""The two ends of test_two_hosts.py, each a process on a host of its own: `near` sends and manages, `far` receives."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys

from offbeat_ckptsync.control.agent import agent_of
from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.control.membership import Membership
from offbeat_ckptsync.ends.receiver import Receiver
from offbeat_ckptsync.ends.sender import LocalSource, Sender
from offbeat_ckptsync.ends.sinks import DictSink
from offbeat_ckptsync.errors import SyncError
from offbeat_ckptsync.seams import NO_TRAFFIC
from offbeat_ckptsync.testing import DictSource, awkward_weights, prints_of
from offbeat_ckptsync.toolkit.config import SyncConfig
from offbeat_ckptsync.toolkit.threads import in_thread
from offbeat_ckptsync.values import RankId

SECRET = "of the tests only"
CONFIG = SyncConfig(
    transport="auto", begin_timeout_s=5.0, transfer_timeout_s=10.0, secret=SECRET, bucket_mib=0.01
)


def say(**told: object) -> None:
    print(json.dumps(told), flush=True)


async def commands() -> list[str]:
    return (await in_thread(sys.stdin.readline, name="commands")).split()


async def near(host: str, source_host: str) -> None:
    source = DictSource(awkward_weights(0))
    membership = Membership.serve(SECRET, dataclasses.replace(CONFIG, host=host))
    sender = Sender(source, dataclasses.replace(CONFIG, host=source_host))
    manager = CheckpointEngineManager(LocalSource(sender), CONFIG, on_fence=membership.fenced)
    await membership.start()
    membership.attach(manager)
    say(port=membership.address[1])
    while words := await commands():
        match words:
            case ["wait", timeout_s]:
                try:
                    await membership.wait_for(["far"], float(timeout_s))
                    say(members=manager.members)
                except SyncError as error:
                    say(error=str(error))
            case ["sync", version]:
                source.weights = awkward_weights(int(version))
                try:
                    report = await manager.sync(int(version))
                    say(members=[*report.members], transport=report.transport, why=report.why)
                except SyncError as error:
                    say(error=str(error))
            case _:
                raise AssertionError(words)
    await membership.close()
    sender.close()


async def far(host: str, near_host: str, port: str) -> None:
    sink = DictSink()
    receiver = Receiver(RankId(member="far"), sink)
    agent = agent_of(receiver, CONFIG, SECRET, gate=NO_TRAFFIC)  # it finds its own address
    await agent.join(near_host, int(port))
    say(joined=True)
    while words := await commands():
        if words == ["managed"]:
            say(managed=agent.has_manager)
            continue
        status = receiver.status()
        say(version=status.version, committed=status.committed, prints=prints_of(sink.weights))
    await agent.leave()


asyncio.run({"near": near, "far": far}[sys.argv[1]](*sys.argv[2:]))
