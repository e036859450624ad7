from __future__ import annotations

import json
import subprocess
import sys

import pytest
import safetensors.torch

from offbeat_ckptsync.ends.manifest import manifest_of
from offbeat_ckptsync.ends.sinks import DictSink
from offbeat_ckptsync.errors import SyncError, SyncFailed, TransferError
from offbeat_ckptsync.testing import (
    DictSource,
    Fault,
    FaultyTransport,
    LocalSync,
    assert_same,
    awkward_weights,
)
from offbeat_ckptsync.toolkit.config import SyncConfig
from offbeat_ckptsync.transports.disk import DiskTransport, folder_specs
from offbeat_ckptsync.values import RankId


def local_in(folder, fault=None):
    config = SyncConfig(transport="disk", disk_path=str(folder), bucket_mib=4096 / (1 << 20))
    make = lambda: FaultyTransport(DiskTransport(SyncConfig(disk_path=str(folder))), on_send=fault)  # noqa: E731
    return LocalSync(DictSource(awkward_weights(1)), {"a": DictSink()}, config, make)


async def test_any_tool_can_read_the_file_and_only_the_last_version_stays(tmp_path):
    local = local_in(tmp_path)
    for version in (1, 2):
        local.source.weights = awkward_weights(version)
        await local.manager.sync(version)
    (folder,) = tmp_path.glob("*/*")
    assert_same(safetensors.torch.load_file(folder / "model.safetensors"), awkward_weights(2))
    about = json.loads((folder / "sync.json").read_text())
    manifest = manifest_of(awkward_weights(2).items())
    assert about == {"version": 2, "manifest_digest": manifest.digest, "bucket_bytes": 4096}
    assert set(folder_specs(folder)) == set(manifest.specs)


async def test_what_was_not_completed_leaves_nothing_behind(tmp_path):
    local = local_in(tmp_path, Fault("die", 2))
    with pytest.raises(SyncFailed, match="bucket 2"):
        await local.manager.sync(1)
    assert list(tmp_path.glob("*/*")) == []
    await local.manager.sync(1)


async def test_two_sources_of_one_folder_leave_each_other_s_syncs_alone(tmp_path):
    one, other = local_in(tmp_path), local_in(tmp_path)
    await one.manager.sync(1)
    for version in (1, 2):
        await other.manager.sync(version)
    kept = [json.loads((folder / "sync.json").read_text())["version"] for folder in tmp_path.glob("*/*")]
    assert sorted(kept) == [1, 2]
    await one.manager.sync(2)


def test_a_receiver_that_gives_up_takes_nothing_from_the_source(tmp_path):
    local = local_in(tmp_path)
    offer = local.sender.offer(1, ["a"])
    sender = local.sender._transport.sender(offer, ["a"])
    DiskTransport(SyncConfig(disk_path=str(tmp_path))).abort(offer.sync_id)
    sender.close()
    assert [path.name for path in tmp_path.glob("*/*")] == [offer.sync_id]


def test_a_folder_must_be_named():
    with pytest.raises(SyncError, match="disk_path"):
        DiskTransport(SyncConfig())


CUT = """
import sys
from pathlib import Path
import torch
from offbeat_ckptsync.toolkit.config import SyncConfig
from offbeat_ckptsync.errors import TransferError
from offbeat_ckptsync.ends.buckets import buckets_of
from offbeat_ckptsync.testing import DictSource
from offbeat_ckptsync.ends.sender import Sender
from offbeat_ckptsync.values import RankId
config = SyncConfig(transport="disk", disk_path=sys.argv[1], bucket_mib=1 / 16)
sender = Sender(DictSource({"w": torch.ones(1 << 18)}), config)
offer = sender.offer(1, ["a"])
sender.send(offer)
end = sender._transport.receiver(offer, RankId(member="a"))
(file,) = Path(sys.argv[1]).glob("*/*/model.safetensors")
with file.open("r+b") as opened:
    opened.truncate(1 << 17)
first, *_, last = buckets_of(offer)
into = torch.empty(first.num_bytes, dtype=torch.uint8)
end.receive(first, into)
try:
    end.receive(last, into)
except TransferError as error:
    print(error)
"""


@pytest.mark.spawns
def test_a_file_that_is_cut_short_under_a_reader_ends_the_sync_and_not_the_reader(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", CUT, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "is cut short in bucket 15" in done.stdout


def test_a_wait_that_is_given_up_says_so(tmp_path):
    local = local_in(tmp_path)
    offer = local.sender.offer(1, ["a"])
    rank_id = DiskTransport(SyncConfig(disk_path=str(tmp_path)))
    rank_id.abort(offer.sync_id)
    with pytest.raises(TransferError, match="was aborted"):
        rank_id.receiver(offer, RankId(member="a"))
