from __future__ import annotations

import json

import pytest
import safetensors.torch

from offbeat_ckptsync.config import SyncConfig
from offbeat_ckptsync.errors import SyncError, SyncFailed
from offbeat_ckptsync.member.sinks import DictSink
from offbeat_ckptsync.plan.manifest import manifest_of
from offbeat_ckptsync.testing import (
    DictSource,
    Fault,
    FaultyTransport,
    LocalSync,
    assert_same,
    awkward_weights,
)
from offbeat_ckptsync.transports.disk import DiskTransport
from offbeat_ckptsync.transports.weight_files import folder_specs


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
