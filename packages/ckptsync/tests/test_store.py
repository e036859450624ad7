"""The store at which ranks meet and answers are mailed."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import platform
import socket
import struct
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from offbeat_ckptsync.errors import TransferError
from offbeat_ckptsync.toolkit.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


@pytest.fixture
def served():
    return Store.serve("127.0.0.1")


def joined(store):
    return Store.join(store.host, store.port, 60.0)


def test_both_ends_see_what_either_sets_and_deletes(served):
    far = joined(served)
    far.set("a/1", "one")
    served.set("a/2", "zwö")
    assert (served.get("a/1"), far.get("a/2"), far.get("b")) == ("one", "zwö", None)
    assert sorted(far.keys("a/")) == sorted(served.keys("a/")) == ["a/1", "a/2"]
    far.delete("a/1")
    far.delete("a/1")
    assert served.keys() == ["a/2"]
    served.set("keep", "")
    served.clear("keep")
    assert far.keys() == ["keep"]


@pytest.mark.parametrize("is_far", [False, True])
def test_a_wait_ends_with_the_text_and_not_before(served, is_far):
    reader, other = (joined(served), served) if is_far else (served, joined(served))
    seen: list[str | None] = []
    waiting = [threading.Thread(target=lambda: seen.append(reader.get("key", 120.0))) for _ in range(2)]
    waiting[0].start()
    if not is_far:
        waiting[1].start()  # a connection asks one thing at a time, a process several
    other.set("another", "no")
    assert seen == []
    other.set("key", "yes")
    for thread in waiting[: 1 if is_far else 2]:
        thread.join(120)
    assert seen == ["yes"] * (1 if is_far else 2)
    assert reader.get("nothing", 0.05) is None


def test_who_speaks_otherwise_is_hung_up_on_and_the_store_goes_on(served):
    for rubbish in (b"GET / HTTP/1.1\r\n\r\n", struct.pack(">I", 1 << 31), struct.pack(">I", 2) + b"[]"):
        with socket.create_connection((served.host, served.port)) as line:
            line.settimeout(60)
            line.sendall(rubbish)
            with contextlib.suppress(ConnectionResetError):  # where something was left unread
                assert line.recv(1) == b""
    far = joined(served)
    far.set("a", "b")
    assert served.get("a") == "b"


def test_nobody_is_waited_for_longer_than_the_page_says(served, monkeypatch):
    monkeypatch.setattr("offbeat_ckptsync.toolkit.store._EACH_S", 0.1)
    with socket.create_connection((served.host, served.port)) as line:
        line.settimeout(120)
        for wait_s in (1e9, float("nan")):
            asked = json.dumps(["get", "never", wait_s]).encode()
            line.sendall(struct.pack(">I", len(asked)) + asked)
            assert line.recv(100) == struct.pack(">I", 4) + b"null"


def test_who_waits_at_a_store_that_ends_is_told():
    store = Store.serve("127.0.0.1")
    far, port = joined(store), store.port
    failures: list[str] = []
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        try:
            far.get("never", 120.0)
        except TransferError as error:
            failures.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait(120)
    del store  # the last reference: it ends with it
    gc.collect()
    thread.join(120)
    (failure,) = failures
    assert f"the store at 127.0.0.1:{port} is gone" in failure
    with pytest.raises(TransferError, match="is gone"):
        far.set("a", "b")
    with pytest.raises(TransferError, match=f"no store answers at 127.0.0.1:{port} within 0.1 s"):
        Store.join("127.0.0.1", port, 0.1)


@contextlib.contextmanager
def name_server() -> Generator[tuple[socket.socket, int]]:
    """Listen in the place of a name server that says nothing; yield the socket and its port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.setblocking(False)
        yield listener, int(listener.getsockname()[1])


def ask_only(port: int) -> None:
    """Let the calling thread ask the name server at `port`.

    glibc keeps that by thread: `struct __res_state` begins with retrans, retry, options, nscount and a sockaddr_in.
    """
    libc = ctypes.CDLL("libc.so.6")
    state_of = libc.__res_state
    state_of.restype = ctypes.c_void_p
    assert libc.__res_init() == 0
    state = state_of()
    address = (
        struct.pack("=H", socket.AF_INET) + struct.pack(">H", port) + socket.inet_aton("127.0.0.1") + bytes(8)
    )
    ctypes.memmove(state, struct.pack("=ii", 1, 1), 8)  # a second, once
    ctypes.memmove(state + 16, struct.pack("=i", 1) + address, 4 + len(address))


def asked_by(work: Callable[[], object]) -> list[bytes]:
    """Return what `work`, in a thread of its own, asks its name server."""
    asked: list[bytes] = []
    with name_server() as (listener, port):

        def run() -> None:
            ask_only(port)
            with contextlib.suppress(OSError):
                work()

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(120)
        with contextlib.suppress(BlockingIOError):
            while True:
                asked.append(listener.recv(512))
    return asked


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="knows where glibc keeps its name server")
def test_nobody_waits_for_a_name_server(served):
    """torch's store asks for the name of what it connects to, and stands still until somebody answers."""
    assert asked_by(lambda: socket.gethostbyaddr("::ffff:127.0.0.1")), (
        "the name server of the test is not asked"
    )
    assert asked_by(lambda: joined(served).set("a", "b")) == []
    assert served.get("a") == "b"


FULL = """
import os, resource, socket, time
from offbeat_ckptsync.toolkit.store import Store
store = Store.serve("127.0.0.1")
caller = socket.socket()
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
free = os.open("/dev/null", os.O_RDONLY)
os.close(free)
resource.setrlimit(resource.RLIMIT_NOFILE, (free, most))
caller.connect((store.host, store.port))
time.sleep(0.5)
resource.setrlimit(resource.RLIMIT_NOFILE, (free + 100, most))
far = Store.join(store.host, store.port, 60.0)
far.set("a", "one")
print(store.get("a"))
"""


@pytest.mark.spawns
def test_a_process_with_too_many_open_files_serves_again_once_it_has_fewer():
    done = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("one\n", 0), done.stderr
