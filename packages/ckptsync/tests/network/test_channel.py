from __future__ import annotations

import asyncio
import json
import struct

import pytest

from offbeat_ckptsync.control.channel import Channel, ChannelClosed, answer, dial
from offbeat_ckptsync.errors import SyncError, TransferError, WireError

SECRET = "only we two know it"


class Called:
    """Who answers one call."""

    def __init__(self, secret=SECRET, name="r0"):
        self.secret, self.name = secret, name
        self.channel = asyncio.get_running_loop().create_future()

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.on_call, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def on_call(self, reader, writer):
        try:
            self.channel.set_result(await answer(reader, writer, self.secret, name=self.name, timeout_s=60))
        except SyncError as error:
            self.channel.set_exception(error)

    async def __aexit__(self, *_):
        self.server.close()
        if self.channel.done() and self.channel.exception() is None:
            self.channel.result().close()


def call(called, secret=SECRET, name="r0"):
    return dial("127.0.0.1", called.port, secret, name=name, timeout_s=60)


async def test_two_that_share_a_secret_talk_both_ways():
    async with Called() as called:
        caller, other = await call(called), await called.channel
        for number in range(3):
            await caller.send({"n": number})
            await other.send({"m": [number, "ü"]})
        assert [await other.receive() for _ in range(3)] == [{"n": 0}, {"n": 1}, {"n": 2}]
        assert (await caller.receive())["m"] == [0, "ü"]
        caller.close()
        with pytest.raises(ChannelClosed):
            await other.receive()


async def test_a_caller_without_the_secret_is_hung_up_on():
    async with Called() as called:
        with pytest.raises(TransferError, match="hung up on our proof; is the secret the same"):
            await call(called, secret="a guess")
        with pytest.raises(TransferError, match="a caller does not know the secret"):
            await called.channel


async def test_somebody_who_only_pretends_to_be_called_learns_nothing_and_is_left():
    async def pretend(reader, writer):
        body = json.dumps({"protocol": "offbeat-sync/1", "nonce": "0" * 64}).encode()
        writer.write(struct.pack(">I", len(body)) + bytes(32) + body)
        (size,) = struct.unpack(">I", await reader.readexactly(4))
        told = json.loads((await reader.readexactly(32 + size))[32:])
        assert SECRET not in json.dumps(told)
        # The best that can be done without the secret: send the caller's own proof back.
        body = json.dumps({"name": "r0", "proof": told["proof"]}).encode()
        writer.write(struct.pack(">I", len(body)) + bytes(32) + body)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(pretend, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(TransferError, match="does not know the secret; hung up"):
        await dial("127.0.0.1", port, SECRET, name="r0", timeout_s=60)
    server.close()


async def test_another_one_at_the_same_address_is_not_taken_for_who_was_there():
    async with Called(name="r7") as called:
        with pytest.raises(TransferError, match=r"r0 at .* is not there any more: r7 answers"):
            await call(called)


async def test_who_says_nothing_is_given_up():
    async def silent(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(TransferError, match=r"no answer from 127.0.0.1:\d+ within 0.2 s"):
        await dial("127.0.0.1", port, SECRET, name="r0", timeout_s=0.2)
    server.close()
    with pytest.raises(TransferError, match="nobody answers at"):
        await dial("127.0.0.1", port, SECRET, name="r0", timeout_s=60)


class Tampering:
    """Between two channels: hands on frames after `change` has had its way with them."""

    def __init__(self, change):
        self.change = change

    async def carry(self, messages):
        key = b"k" * 32
        frames = []

        class Out:
            def write(self, data):
                frames.append(data)

            async def drain(self):
                pass

            def close(self):
                pass

        sender = Channel(asyncio.StreamReader(), Out(), key, is_caller=True)
        for message in messages:
            await sender.send(message)
        reader = asyncio.StreamReader()
        for frame in self.change(frames):
            reader.feed_data(frame)
        reader.feed_eof()
        return Channel(reader, Out(), key, is_caller=False)


def flip_last_byte(frames):
    return [frames[0][:-2] + b"1" + frames[0][-1:]]


@pytest.mark.parametrize(
    "change",
    [flip_last_byte, lambda f: [f[1], f[0]], lambda f: f[1:]],
    ids=["changed", "reordered", "left out"],
)
async def test_a_frame_that_was_tampered_with_ends_the_line(change):
    channel = await Tampering(change).carry([{"a": 0}, {"b": 0}])
    with pytest.raises(WireError, match="was changed on the way"):
        await channel.receive()


async def test_a_frame_cannot_be_repeated():
    channel = await Tampering(lambda frames: frames * 2).carry([{"a": 0}])
    assert await channel.receive() == {"a": 0}
    with pytest.raises(WireError, match="was changed on the way"):
        await channel.receive()


async def test_a_frame_that_is_too_large_is_not_read():
    reader = asyncio.StreamReader()
    reader.feed_data(struct.pack(">I", 1 << 31))
    writer = type("W", (), {"close": lambda self: None})()
    with pytest.raises(WireError, match="a frame of 2147483648 bytes came"):
        await Channel(reader, writer, b"k", is_caller=True).receive()


async def test_a_message_that_is_too_large_is_refused_and_the_line_goes_on(monkeypatch):
    monkeypatch.setattr("offbeat_ckptsync.control.channel.MAX_FRAME_BYTES", 1000)
    async with Called() as called:
        caller, other = await call(called), await called.channel
        with pytest.raises(WireError, match=r"a message of .* bytes is larger than a frame may be"):
            await caller.send({"text": "x" * 1000})
        await caller.send({"n": 1})
        assert await other.receive() == {"n": 1}
        caller.close()
