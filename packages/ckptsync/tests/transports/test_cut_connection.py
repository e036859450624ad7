"""A connection to the source's store that somebody between them cuts: one sync fails, the next one makes a new one."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading

import pytest

from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.control.members import LocalMember
from offbeat_ckptsync.ends.receiver import Receiver
from offbeat_ckptsync.ends.sender import LocalSource, Sender
from offbeat_ckptsync.ends.sinks import DictSink
from offbeat_ckptsync.errors import SyncFailed
from offbeat_ckptsync.seams import NO_TRAFFIC
from offbeat_ckptsync.testing import DictSource, awkward_weights
from offbeat_ckptsync.toolkit.config import SyncConfig, make_transport
from offbeat_ckptsync.values import RankId


class Proxy:
    """Passes on what comes, until it is told to cut."""

    def __init__(self, port):
        self.door = socket.create_server(("127.0.0.1", 0))
        self.port, self.to, self.ends = self.door.getsockname()[1], port, []
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        with contextlib.suppress(OSError):
            while True:
                near, far = self.door.accept()[0], socket.create_connection(("127.0.0.1", self.to))
                self.ends += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self.pump, args=pair, daemon=True).start()

    def pump(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        self.cut()

    def cut(self):
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.door.close()
        for end in self.ends:
            end.close()


class Via(LocalMember):
    """Reaches the source's store through a proxy."""

    proxy = None

    async def begin(self, offer):
        if self.proxy is None:
            self.proxy = Proxy(offer.endpoint["port"])
        endpoint = {**offer.endpoint, "port": self.proxy.port}
        return await super().begin(dataclasses.replace(offer, endpoint=endpoint))


@pytest.mark.parametrize("name", ["broadcast", "auto"])
async def test_a_connection_that_was_cut_costs_one_sync(name):
    config = SyncConfig(transport=name)
    sender, sink = Sender(DictSource(awkward_weights(1)), config), DictSink()
    manager = CheckpointEngineManager(LocalSource(sender), config)
    transport = make_transport(name, config)
    member = Via(Receiver(RankId(member="r"), sink), transport, gate=NO_TRAFFIC)
    manager.add(member)
    await manager.sync(1)
    member.proxy.cut()
    with pytest.raises(SyncFailed, match="Nothing was changed"):
        await manager.sync(2)
    await manager.sync(3)
    assert (await member.status()).version == 3
    sender.close()
    transport.close()
    member.proxy.close()
