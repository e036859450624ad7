from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from offbeat_ckptsync.ends.buckets import plan_buckets
from offbeat_ckptsync.ends.sender import Sender
from offbeat_ckptsync.ends.sinks import DictSink
from offbeat_ckptsync.errors import TransferError
from offbeat_ckptsync.testing import DictSource, LocalSync, awkward_weights
from offbeat_ckptsync.toolkit.config import SyncConfig, make_transport
from offbeat_ckptsync.toolkit.wire import encode
from offbeat_ckptsync.transports.broadcast import BroadcastTransport
from offbeat_ckptsync.transports.rendezvous import Rendezvous
from offbeat_ckptsync.values import RankId

CONFIG = SyncConfig(bucket_mib=4096 / (1 << 20))


class Line:
    """A source transport and receiving rank_ids in threads."""

    def __init__(self, *rank_ids):
        self.source = DictSource(awkward_weights(1))
        self.transport = BroadcastTransport(CONFIG)
        self.sender = Sender(self.source, CONFIG, transport=self.transport)
        self.rank_ids = {rank_id: BroadcastTransport(CONFIG) for rank_id in rank_ids}
        self.version = 0

    def sync(self, rank_ids=None):
        rank_ids = list(self.rank_ids) if rank_ids is None else rank_ids
        self.version += 1
        offer = self.sender.offer(self.version, list(dict.fromkeys(rank_id.member for rank_id in rank_ids)))
        buckets = plan_buckets(offer.manifest, offer.bucket_bytes)
        got = {}

        def take(rank_id):
            receiver = self.rank_ids[rank_id].receiver(offer, rank_id)
            parts = [torch.empty(bucket.num_bytes, dtype=torch.uint8) for bucket in buckets]
            for bucket, part in zip(buckets, parts, strict=True):
                receiver.receive(bucket, part)
            got[rank_id] = parts

        threads = [threading.Thread(target=take, args=(rank_id,)) for rank_id in rank_ids]
        for thread in threads:
            thread.start()
        self.sender.send(offer)
        for thread in threads:
            thread.join(120)
        assert len(got) == len(rank_ids)
        first = next(iter(got.values()))
        assert all(torch.equal(a, b) for parts in got.values() for a, b in zip(first, parts, strict=True))

    def close(self):
        for transport in [self.transport, *self.rank_ids.values()]:
            transport.close()


A, B0, B1 = (
    RankId(member="a"),
    RankId(member="b", rank=0, num_ranks=2),
    RankId(member="b", rank=1, num_ranks=2),
)


def test_the_group_is_kept_while_the_membership_is_the_same_and_built_anew_when_not():
    line = Line(A, B0, B1)
    line.sync()
    group = line.transport._group
    line.sync()
    assert line.transport._group is group
    line.sync([A])
    assert line.transport._group is not group
    line.sync()
    line.close()


def test_a_receiver_that_was_started_anew_gets_a_new_group():
    line = Line(A, B0, B1)
    line.sync()
    line.rank_ids[B1].close()
    line.rank_ids[B1] = BroadcastTransport(CONFIG)
    line.sync()
    line.close()


@pytest.mark.parametrize("name", ["broadcast", "auto", "relay"])
async def test_a_store_holds_no_more_keys_after_twenty_syncs_than_after_one(name):
    config = dataclasses.replace(CONFIG, transport=name)
    local = LocalSync(
        DictSource(awkward_weights(1)), {"a": DictSink()}, config, lambda: make_transport(name, config)
    )
    counts = {}
    for version in range(1, 21):
        local.source.weights = awkward_weights(version)
        await local.manager.sync(version)
        counts[version] = len(local.sender._transport.rendezvous.store.keys())
    assert counts[1] == counts[10] == counts[20]
    local.close()


def test_groups_and_syncs_that_are_over_leave_no_keys():
    line = Line(A, B0, B1)
    counts = []
    for _ in range(3):
        line.sync()
        line.sync([A])
        counts.append(len(line.transport.rendezvous.store.keys()))
    assert counts[0] == counts[1] == counts[2]
    line.close()


def test_the_roll_call_names_who_is_missing_and_the_wait_ends_on_time():
    config = SyncConfig(begin_timeout_s=0.3)
    transport = BroadcastTransport(CONFIG)
    sender = Sender(DictSource(awkward_weights(1)), config, transport=transport)
    offer = sender.offer(1, ["here", "b", "gone"])
    say_here(offer, RankId(member="here"))
    say_here(offer, B0)
    with pytest.raises(TransferError, match=r"no answer within 0\.3 s .* missing: rank 0 of gone$"):
        sender.send(offer)
    offer = sender.offer(1, ["b"])
    say_here(offer, B0)
    with pytest.raises(TransferError, match=r"missing: rank 1 of b$"):
        sender.send(offer)
    transport.close()


def say_here(offer, rank_id, secret=""):
    config = dataclasses.replace(CONFIG, secret=secret)
    Rendezvous("broadcast", config, asked="here", told="go").answer(offer, rank_id, {"group": ""})


def test_who_does_not_know_the_secret_gets_no_rank_id_and_no_word():
    config = dataclasses.replace(CONFIG, begin_timeout_s=0.5, secret="ours")
    transport = BroadcastTransport(config)
    sender = Sender(DictSource(awkward_weights(1)), config, transport=transport)
    offer = sender.offer(1, ["a"])
    say_here(offer, A, secret="theirs")
    with pytest.raises(TransferError, match=r"missing: rank 0 of a \(it answered without our secret\)$"):
        sender.send(offer)
    offer = sender.offer(1, ["a"])
    transport.rendezvous.store.set(f"{offer.sync_id}/here/a/0", '{"num_ranks": 1, "group": ""}')
    with pytest.raises(TransferError, match=r"rank 0 of a \(it answered without our secret\)$"):
        sender.send(offer)
    offer = sender.offer(1, ["a"])
    transport.rendezvous.store.set(f"{offer.sync_id}/go", '{"group": "g", "rank_ids": [["a", 0]]}')
    with pytest.raises(TransferError, match="what is there was written without our secret"):
        BroadcastTransport(config).receiver(offer, A)
    transport.close()


async def test_a_stranger_who_answers_first_is_passed_over():
    config = dataclasses.replace(CONFIG, transport="broadcast", secret="ours")
    local = LocalSync(
        DictSource(awkward_weights(1)), {"a": DictSink()}, config, lambda: BroadcastTransport(config)
    )
    opened = local.sender._transport.open

    def open_with_a_stranger(sync_id, members):
        endpoint = opened(sync_id, members)
        local.sender._transport.rendezvous.store.set(f"{sync_id}/here/a/0", '{"num_ranks": 5, "group": ""}')
        return endpoint

    local.sender._transport.open = open_with_a_stranger
    await local.manager.sync(1)
    assert local.receivers["a"].version == 1
    local.close()


def test_the_secret_is_in_no_offer_and_in_no_print():
    config = dataclasses.replace(CONFIG, transport="auto", secret="not to be told")
    sender = Sender(DictSource(awkward_weights(1)), config)
    assert "not to be told" not in json.dumps(encode(sender.offer(1, ["a"]))) + repr(config)
    sender.close()


@pytest.mark.parametrize("name", ["broadcast", "auto", "relay"])
def test_loopback_of_another_machine_is_refused_with_the_remedy(name):
    config = dataclasses.replace(CONFIG, transport=name)
    sender, receiving = Sender(DictSource(awkward_weights(1)), config), make_transport(name, config)
    offer = sender.offer(1, ["replica 3"])
    offer.endpoint.update(machine="of another boot/1", hostname="far")
    told = (
        r"on loopback, but rank 0 of replica 3 is on another machine \(.*; the source is on far\): let `host`"
    )
    with pytest.raises(TransferError, match=told):
        receiving.receiver(offer, RankId(member="replica 3"))
    receiving.close()
    sender.close()


def go_of(line, offer, rank_ids):
    """Let the source's word be there that leads `rank_ids` into a group that nobody else comes to."""
    line.transport.rendezvous.tell(
        offer, {"group": f"of {offer.sync_id}", "rank_ids": [[s.member, s.rank] for s in rank_ids]}
    )


def wait_for_key(line, prefix):
    deadline = time.monotonic() + 60
    while not line.transport.rendezvous.store.keys(prefix):
        assert time.monotonic() < deadline, f"nobody wrote {prefix}"
        time.sleep(0.01)


def late_rank(line, offer):
    """Return a thread that takes part in a sync, with all the time there is, and what it raises."""
    raised = []
    patient = dataclasses.replace(offer, endpoint={**offer.endpoint, "rendezvous_s": 600.0})

    def take():
        try:
            line.rank_ids[A].receiver(patient, A)
        except TransferError as error:
            raised.append(str(error))

    thread = threading.Thread(target=take)
    thread.start()
    return thread, raised


def test_a_source_that_stood_still_leads_no_rank_of_an_aborted_sync_into_the_way_of_the_next():
    """It says where to meet before it hears of the abort. What a rank waited for there, the next sync waited for, too."""
    line = Line(A)
    offer = line.sender.offer(1, ["a"])
    thread, raised = late_rank(line, offer)
    wait_for_key(line, f"{offer.sync_id}/here/a/0")
    line.rank_ids[A].abort(offer.sync_id)
    go_of(line, offer, [A])
    thread.join(0.5)  # time enough for it to go astray
    line.sender.abort(offer.sync_id)
    line.sync()
    thread.join(60)
    assert "the sync was aborted" in raised[0]
    line.close()


def test_an_abort_while_the_group_forms_ends_that_and_the_next_sync_is_not_held_up():
    line = Line(A)
    offer = line.sender.offer(1, ["a"])
    thread, raised = late_rank(line, offer)
    go_of(line, offer, [A])
    wait_for_key(line, line.transport.rendezvous.private(f"of {offer.sync_id}"))
    line.rank_ids[A].abort(offer.sync_id)
    line.sender.abort(offer.sync_id)
    line.sync()
    thread.join(60)
    assert "did not form: " in raised[0]
    line.close()


def test_an_abort_ends_the_wait_at_once():
    transport = BroadcastTransport(CONFIG)
    sender = Sender(DictSource(awkward_weights(1)), CONFIG, transport=transport)
    offer = sender.offer(1, ["gone"])
    threading.Timer(0.1, sender.abort, args=(offer.sync_id,)).start()
    with pytest.raises(TransferError, match="aborted"):
        sender.send(offer)
    transport.close()


def test_nothing_listens_beyond_loopback():
    transport = BroadcastTransport(CONFIG)
    port = int(transport.open("s", [])["port"])
    tables = [Path(f"/proc/net/{table}").read_text() for table in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table.splitlines() if f":{port:04X} " in line]
    listening = [line[1] for line in lines if line[3] == "0A"]
    assert listening == [f"0100007F:{port:04X}"]
    transport.close()


def test_a_source_that_is_not_there_is_said_so():
    transport = BroadcastTransport(CONFIG)
    sender = Sender(DictSource(awkward_weights(1)), SyncConfig(begin_timeout_s=0.5), transport=transport)
    offer = sender.offer(1, ["a"])
    offer.endpoint["port"] = 1
    with pytest.raises(TransferError, match=r"no store answers at 127\.0\.0\.1:1 within 0\.5 s"):
        BroadcastTransport(CONFIG).receiver(offer, A)
    transport.close()


def test_who_is_lost_while_the_group_forms_is_missed_at_the_deadline_of_the_rendezvous():
    transport = BroadcastTransport(CONFIG)
    config = SyncConfig(begin_timeout_s=1)
    offer = Sender(DictSource(awkward_weights(1)), config, transport=transport).offer(1, ["a"])
    say_here(offer, A)  # and was not seen again
    with pytest.raises(TransferError, match=r"the group of 2 \(source, rank 0 of a\) did not form"):
        transport.sender(offer, ["a"])
    transport.close()


LEAVERS = """
import threading, torch
from offbeat_ckptsync.toolkit.store import Store
from offbeat_ckptsync.transports.broadcast import Group
store, rank_ids = Store.serve("127.0.0.1"), [["m", 0]]
ends = [Group("g", rank_ids), Group("g", rank_ids)]
stores = [store, Store.join("127.0.0.1", store.port, 300.0)]
def run(rank):
    ends[rank].build(stores[rank], rank, "127.0.0.1", "cpu", 300.0)
    ends[rank].broadcast(torch.zeros(1 << 20, dtype=torch.uint8), 300.0)
threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for end in ends:
    end.leave()
"""


def test_a_process_that_ends_right_after_it_left_is_not_aborted():
    done = subprocess.run(
        [sys.executable, "-c", LEAVERS], capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
