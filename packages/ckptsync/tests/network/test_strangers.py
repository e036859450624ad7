"""What another user of the same machine can do to a sync: nothing, and no words of his end in a traceback."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from offbeat_ckptsync.control.agent import agent_of
from offbeat_ckptsync.control.channel import dial
from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.control.members import LocalMember
from offbeat_ckptsync.control.membership import Membership, register
from offbeat_ckptsync.ends.receiver import Receiver
from offbeat_ckptsync.ends.sender import LocalSource, Sender
from offbeat_ckptsync.ends.sinks import DictSink
from offbeat_ckptsync.errors import TransferError
from offbeat_ckptsync.seams import NO_TRAFFIC
from offbeat_ckptsync.testing import DictSource, assert_same, awkward_weights
from offbeat_ckptsync.toolkit.config import SyncConfig, make_transport
from offbeat_ckptsync.toolkit.store import Store
from offbeat_ckptsync.transports.line import Line, Reception
from offbeat_ckptsync.values import RankId
from strangers import AS_NOBODY, run_stranger, stranger_at_work

pytestmark = pytest.mark.spawns
SECRET = "of the tests only"
LOOPBACK = SyncConfig(transport="loopback", bucket_mib=4096 / (1 << 20))

FLOOD = r"""
def addresses():  # of what /proc lists to everybody
    with open("/proc/net/unix") as lines:
        found = {line.split()[-1] for line in lines if "offbeat" in line}
    return [(b"\0" + name[1:].encode()) if name.startswith("@") else name.encode() for name in found]

begun = False
while True:
    held = []
    for address in addresses():
        for _ in range(200):
            line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            line.setblocking(False)
            try:
                line.connect(address)
            except OSError:
                line.close()
            else:
                held.append(line)
    for line in held:
        line.close()
    if not begun:
        print("begun", flush=True)
        begun = True
"""


class Shm:
    def __init__(self, **settings):
        config = SyncConfig(transport="shm", bucket_mib=4096 / (1 << 20), **settings)
        self.source = DictSource(awkward_weights(1))
        self.sender = Sender(self.source, config)
        self.manager = CheckpointEngineManager(LocalSource(self.sender), config)
        self.sink = DictSink()
        self.end = make_transport("shm", config)
        self.manager.add(LocalMember(Receiver(RankId(member="m"), self.sink), self.end, gate=NO_TRAFFIC))

    def close(self):
        self.sender.close()
        self.end.close()


@pytest.fixture
def shm():
    made = Shm()
    yield made
    made.close()


@AS_NOBODY
async def test_nobody_else_ends_a_sync_by_calling_its_source_all_the_time(shm):
    await shm.manager.sync(1)
    with stranger_at_work(FLOOD):
        for version in range(2, 12):
            shm.source.weights = awkward_weights(version)
            await shm.manager.sync(version)
            assert_same(shm.sink.weights, awkward_weights(version))


def test_a_source_listens_where_only_its_user_may_enter_and_leaves_nothing():
    reception = Reception()
    folder = Path(str(reception.open("s")["address"])).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    reception.close()
    assert not folder.exists()


def test_what_a_process_that_was_killed_left_is_removed_by_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead, young, living = Reception(), Reception(), Reception()
    folders = [Path(str(each.open("s")["address"])).parent for each in (dead, young, living)]
    for each in (dead, young):
        each._socket.close()  # as the kernel does; the folder stays
    long_ago = time.time() - 3600
    for folder in (folders[0], folders[2]):
        os.utime(folder, (long_ago, long_ago))
    Reception().close()
    assert [folder.exists() for folder in folders] == [False, True, True]
    living.close()


def test_one_that_finds_the_queue_full_calls_again_until_its_deadline():
    reception = Reception()
    address = str(reception.open("s")["address"])
    held = [Line.connect(address, time.monotonic() + 60, who="r") for _ in range(129)]  # backlog and one
    with pytest.raises(TransferError, match=r"r finds no source at .* more call it than it can take"):
        Line.connect(address, time.monotonic() + 0.1, who="r")
    got = []
    thread = threading.Thread(
        target=lambda: got.append(Line.connect(address, time.monotonic() + 600, who="r"))
    )
    thread.start()
    time.sleep(0.1)
    accepted, _ = reception._socket.accept()
    thread.join(600)
    assert len(got) == 1
    for line in (*held, *got, accepted):
        line.close()
    reception.close()


@AS_NOBODY
def test_a_store_for_which_there_are_no_more_threads_listens_on(tmp_path):
    """In a process of its own, which may start few: as where TasksMax or pids.max is set."""
    script = tmp_path / "served.py"
    script.write_text(
        "import sys, threading, time\n"
        "import offbeat_ckptsync.toolkit.store as stores\n"
        "start = threading.Thread.start\n"
        "def limited(thread):\n"
        '    if threading.active_count() > 50: raise RuntimeError("can\'t start new thread")\n'
        "    start(thread)\n"
        "store = stores.Store.serve('127.0.0.1')\n"
        "threading.Thread.start = limited\n"
        "print(store.port, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        port = int(process.stdout.readline())
        run_stranger(
            "held = [socket.create_connection(('127.0.0.1', int(sys.argv[1]))) for _ in range(300)]\ntime.sleep(1)",
            port,
        )
        deadline = time.monotonic() + 120
        while True:  # the strangers have gone
            try:
                Store.join("127.0.0.1", port, 60).set("key", "text")
                break
            except TransferError:
                assert time.monotonic() < deadline, "it listens no more"
        process.stdin.close()


def test_a_store_keeps_no_more_than_it_may(monkeypatch):
    monkeypatch.setattr("offbeat_ckptsync.toolkit.store._MAX_HELD_CHARS", 1000)
    store = Store.serve("127.0.0.1")
    for _ in range(10):
        far = Store.join(store.host, store.port, 60)
        far.set("a", "x" * 900)  # in place of what was there
        with pytest.raises(TransferError, match="gone"):
            far.set("b", "x" * 900)
    with pytest.raises(TransferError, match="at most 1000 characters, and 'b'"):
        store.set("b", "x" * 900)
    store.delete("a")
    store.set("b", "x" * 900)
    assert store.keys() == ["b"]


def test_a_store_has_no_more_connections_than_it_may(monkeypatch):
    monkeypatch.setattr("offbeat_ckptsync.toolkit.store._MAX_LINES", 3)
    store = Store.serve("127.0.0.1")
    held = [Store.join(store.host, store.port, 60) for _ in range(3)]
    held[0].set("key", "text")
    with pytest.raises(TransferError):
        Store.join(store.host, store.port, 60).get("key")
    del held
    deadline = time.monotonic() + 120
    while True:
        try:
            assert Store.join(store.host, store.port, 60).get("key") == "text"
            break
        except TransferError:
            assert time.monotonic() < deadline


class Party:
    """A membership with a manager and a replica."""

    async def __aenter__(self):
        self.membership = Membership.serve(SECRET, LOOPBACK)
        self.manager = CheckpointEngineManager(
            LocalSource(Sender(DictSource(awkward_weights(1)), LOOPBACK)), LOOPBACK
        )
        await self.membership.start()
        self.membership.attach(self.manager)
        self.agent = self.replica("one")
        await self.agent.join(*self.membership.address, timeout_s=120)
        await self.membership.wait_for(["one"], 120)
        return self

    def replica(self, name):
        return agent_of(Receiver(RankId(member=name), DictSink()), LOOPBACK, SECRET, gate=NO_TRAFFIC)

    async def __aexit__(self, *_):
        await self.agent.close()
        await self.membership.close()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"registration": ' + "[" * 50_000])
async def test_deep_json_at_the_store_loses_nobody_who_registers_beside_it(text, caplog):
    async with Party() as party:
        store = Store.join(*party.membership.address, 60)
        store.set("offbeat/member/a stranger", text)
        late = party.replica("late")
        await register(*party.membership.address, await late.start(), SECRET)
        await party.membership.wait_for(["late"], 120)
        await late.close()
        assert "the store of the members fails" not in caplog.text


async def test_a_name_that_a_stranger_writes_cannot_forge_a_line_of_the_log(caplog):
    name = "x\n2026-11-23 00:00:00 offbeat ERROR \x1b[2Jforged"
    async with Party() as party:
        registration = {"name": name, "role": "member", "host": "127.0.0.1", "port": 1}
        store = Store.join(*party.membership.address, 60)
        store.set("offbeat/member/x", json.dumps({"registration": registration, "proof": "no"}))
        store.set("offbeat/members", "other")
        async with asyncio.timeout(120):
            while name not in party.membership.refused:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    (told,) = [
        record.getMessage() for record in caplog.records if "without the secret" in record.getMessage()
    ]
    assert "\n" not in told
    assert "\x1b" not in told


WORDS = r"""
port, name = int(sys.argv[1]), sys.argv[2]
line = socket.create_connection(("127.0.0.1", port))
size, = struct.unpack(">I", line.recv(4, socket.MSG_WAITALL))
line.recv(32 + size, socket.MSG_WAITALL)
hello = {"protocol": "offbeat-sync/1", "nonce": "0" * 64, "proof": "0" * 64}
body = {
    "a proof": json.dumps({**hello, "proof": "\u00e9"}),
    "a nonce": json.dumps({**hello, "nonce": "\ud800"}),
    "a surrogate proof": json.dumps({**hello, "proof": "\ud800"}),
    "depth": "[" * 4000,
}[name].encode()
line.sendall(struct.pack(">I", len(body)) + bytes(32) + body)
line.settimeout(60)
print(line.recv(1))
"""


@AS_NOBODY
@pytest.mark.parametrize("word", ["a proof", "a nonce", "a surrogate proof", "depth"])
async def test_no_word_of_a_stranger_ends_in_a_traceback(word, caplog):
    async with Party() as party:
        port = party.agent._server.sockets[0].getsockname()[1]
        told = await asyncio.to_thread(run_stranger, WORDS, port, word)
        assert told == "b''\n", "it is hung up on"
        await party.manager.sync(1)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    (refused,) = [
        record.getMessage() for record in caplog.records if "refused 1 callers" in record.getMessage()
    ]
    assert "Traceback" not in refused


async def test_a_caller_is_told_by_name_of_an_answer_that_is_no_proof():
    async def pretends(reader, writer):
        def say(told):
            body = json.dumps(told).encode()
            writer.write(len(body).to_bytes(4, "big") + bytes(32) + body)

        say({"protocol": "offbeat-sync/1", "nonce": "\ud800"})
        await reader.read(1000)
        say({"name": "\ud800", "proof": "\u00e9"})
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(pretends, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(TransferError, match="does not know the secret"):
        await dial("127.0.0.1", port, SECRET, name="r0", timeout_s=60)
    server.close()


async def test_many_callers_who_prove_nothing_do_not_fill_the_log(caplog):
    async with Party() as party:
        port = party.agent._server.sockets[0].getsockname()[1]
        for number in range(40):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            async with asyncio.timeout(120):
                while party.agent._num_refused <= number:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            del reader
    assert sum("refused" in record.getMessage() for record in caplog.records) == 6  # 1, 2, 4 .. 32


async def test_two_processes_of_one_name_are_told_apart_and_the_first_one_stays():
    """Each registration hung up on the other, which registered again; syncs failed, and nobody said why."""
    async with Party() as party:
        second = party.replica("one")
        with pytest.raises(TransferError, match="no manager called within 1 s"):
            await second.join(*party.membership.address, timeout_s=1)
        refused = party.membership.refused["one"]
        assert re.match(
            r"two processes call themselves 'one': the one at 127.0.0.1:\d+ is on the line", refused
        )
        for version in range(1, 6):
            assert list((await party.manager.sync(version)).members) == ["one"]
        await party.agent.close()
        third = party.replica("one")
        await third.join(*party.membership.address, timeout_s=120)
        await party.membership.wait_for(["one"], 120)
        await third.close()
