"""A rank that is driven by messages, with a real mailbox and transport."""

from __future__ import annotations

import dataclasses
import json
import threading

import pytest
import torch

from offbeat_ckptsync.ends.digest import label_of
from offbeat_ckptsync.ends.rank import Rank
from offbeat_ckptsync.ends.sender import Sender
from offbeat_ckptsync.ends.sinks import DictSink
from offbeat_ckptsync.errors import LoadError, PhaseError, SyncError, TransferError, VersionError
from offbeat_ckptsync.testing import DictSource
from offbeat_ckptsync.toolkit.config import SyncConfig
from offbeat_ckptsync.toolkit.store import Store
from offbeat_ckptsync.toolkit.wire import encode
from sync_faults.planted import TornSink

CONFIG = SyncConfig(transport="loopback")


def test_a_staging_thread_that_comes_late_leaves_the_next_sync_alone():
    early, late = threading.Event(), threading.Event()
    threads = iter([late, early])

    sender = Sender(DictSource({"a": torch.ones(1000)}), CONFIG)
    mailbox = Store.serve("127.0.0.1")
    worker = Rank(DictSink(), prepare_thread=lambda: next(threads).wait(120))

    def begin(key):
        offer = sender.offer(1, ["m"])
        worker.handle(
            {
                "op": "begin",
                "offer": encode(offer),
                "config": encode(CONFIG),
                "member": "m",
                "staged": key,
                "mailbox": {"host": mailbox.host, "port": mailbox.port},
            }
        )
        return offer

    def mailed(key):
        assert mailbox.get(f"{key}/0", 120) is not None
        return json.loads(mailbox.get(f"{key}/0"))

    first = begin("first")  # its thread is held up before it takes anything
    sender.abort(first.sync_id)
    worker.handle({"op": "abort", "sync_id": first.sync_id})
    second = begin("second")
    sending = threading.Thread(target=sender.send, args=(second,))
    sending.start()
    late.set()
    assert mailed("first")["error"]["type"] == "PhaseError"
    early.set()
    sending.join(120)
    assert "echo" in mailed("second")
    sender.close()
    worker.close()


def test_a_commit_travels_with_a_request_and_may_come_again_while_the_next_sync_is_open():
    sender, worker = Sender(DictSource({"a": torch.ones(1000)}), CONFIG), Rank(DictSink())
    mailbox = Store.serve("127.0.0.1")

    def ask(op, **fields):
        where = {"host": mailbox.host, "port": mailbox.port}
        return worker.handle({"op": op, "mailbox": where, **fields})

    def begin(version, **more):
        offer = sender.offer(version, ["m"])
        ask("begin", offer=encode(offer), config=encode(CONFIG), member="m", staged=f"s{version}", **more)
        return offer

    first = begin(1)
    sent = sender.send(first)
    assert mailbox.get("s1/0", 120) is not None
    ask("flip", sync_id=first.sync_id, sent=encode(sent))
    label = encode(label_of(sent, first.bucket_bytes))
    assert ask("status")["status"]["committed"] is False
    with pytest.raises(VersionError, match="was asked to commit"):
        ask("status", committed={**label, "content_digest": "0" * 32})
    second = begin(2, committed=label)
    assert ask("abort", sync_id=second.sync_id, committed=label) == {"version": 1}
    status = ask("status")["status"]
    assert (status["label"], status["committed"], status["state"]) == (label, True, "idle")
    sender.close()
    worker.close()


def test_who_reads_the_mailbox_alone_is_raised_what_could_not_be_mailed():
    worker, mailbox = Rank(DictSink(), rank=1, num_ranks=2), Store.serve("127.0.0.1")
    where = {"host": mailbox.host, "port": mailbox.port}
    asked = {"op": "flip", "sync_id": "s", "sent": {}}
    answer = worker.handle({**asked, "mailbox": where, "reply": "first"}, quiet=True)
    assert json.loads(mailbox.get("first/1")) == {**answer, "num_ranks": 2}
    assert answer["error"]["type"]
    for unmailed in ({}, {"reply": ""}, {"mailbox": "nowhere", "reply": "second"}):
        with pytest.raises(SyncError):
            worker.handle({"mailbox": where, **asked, **unmailed}, quiet=True)
    assert mailbox.get("second/1") is None
    with pytest.raises(SyncError):
        worker.handle({**asked, "mailbox": where, "reply": "third"})
    assert mailbox.get("third/1") is not None
    worker.close()


def test_one_of_several_ranks_whose_mailbox_is_gone_logs_what_a_single_one_raises(caplog):
    """What a worker of several raises puts vLLM's executor out of step, and a manager that died hears neither."""
    asked = {"op": "status", "reply": "r"}
    for num_ranks in (1, 2):
        mailbox = Store.serve("127.0.0.1")
        where = {"host": mailbox.host, "port": mailbox.port}
        worker = Rank(DictSink(), num_ranks=num_ranks)
        assert "status" in worker.handle({**asked, "mailbox": where}, quiet=True)
        del mailbox  # with its manager
        if num_ranks == 1:
            with pytest.raises(TransferError, match="is gone"):
                worker.handle({**asked, "mailbox": where}, quiet=True)
        else:
            assert "status" in worker.handle({**asked, "mailbox": where}, quiet=True)
            assert "rank 0 has nobody left to answer to status" in caplog.text
        fresh = Store.serve("127.0.0.1")
        worker.handle({**asked, "mailbox": {"host": fresh.host, "port": fresh.port}}, quiet=True)
        assert fresh.get("r/0") is not None, "the next manager is answered"
        worker.close()


class Synced:
    """A rank and a source that has sent it version 1."""

    def __init__(self, sink):
        self.sender, self.worker = (
            Sender(DictSource({"a": torch.ones(1000), "b": torch.ones(1)}), CONFIG),
            Rank(sink),
        )
        self.mailbox = Store.serve("127.0.0.1")

    def ask(self, op, **fields):
        where = {"host": self.mailbox.host, "port": self.mailbox.port}
        return self.worker.handle({"op": op, "mailbox": where, **fields})

    def begin(self, version, config=CONFIG):
        offer = self.sender.offer(version, ["m"])
        self.ask("begin", offer=encode(offer), config=encode(config), member="m", staged=f"s{version}")
        return offer

    def flip(self, version):
        offer = self.begin(version)
        sent = self.sender.send(offer)
        assert self.mailbox.get(f"s{version}/0", 120) is not None
        self.ask("flip", sync_id=offer.sync_id, sent=encode(sent))
        return encode(label_of(sent, offer.bucket_bytes))

    def close(self):
        self.sender.close()
        self.worker.close()


def test_a_broken_rank_is_mended_by_no_other_settings():
    """They made a fresh receiver over torn weights, which said that it served version 0."""
    sink = TornSink()
    site, sink.fail = Synced(sink), True
    with pytest.raises(LoadError, match="half-way"):
        site.flip(1)
    sink.fail = False
    with pytest.raises(PhaseError, match="broken"):
        site.begin(1, dataclasses.replace(CONFIG, flip_timeout_s=61.0))
    with pytest.raises(LoadError, match="is broken and serves no version"):
        site.ask("abort", sync_id="")
    assert site.ask("status")["status"]["state"] == "broken"
    site.close()


def test_what_is_served_and_its_label_outlive_other_settings_and_a_close():
    """A commit comes with the next request, after a close too: it was refused, and every sync with it."""
    site = Synced(DictSink())
    label = site.flip(1)
    site.worker.close()
    assert site.ask("status", committed=label)["status"] == {
        "version": 1,
        "label": label,
        "committed": True,
        "state": "idle",
    }
    site.begin(2, dataclasses.replace(CONFIG, flip_timeout_s=61.0))
    assert site.ask("abort", sync_id="") == {"version": 1}
    assert site.ask("status")["status"]["label"] == label
    site.close()
