from __future__ import annotations

import json

import pytest
import safetensors.torch

from offbeat_ckptsync.config import SyncConfig
from offbeat_ckptsync.errors import SyncError, SyncFailed
from offbeat_ckptsync.member.sinks import DictSink
from offbeat_ckptsync.plan.manifest import manifest_of
from offbeat_ckptsync.testing import DictSource, Fault, FaultyTransport, House, assert_same, awkward_weights
from offbeat_ckptsync.transports.disk import DiskTransport
from offbeat_ckptsync.transports.weight_files import folder_specs


def house_in(folder, fault=None):
    config = SyncConfig(transport="disk", disk_path=str(folder), bucket_mib=4096 / (1 << 20))
    make = lambda: FaultyTransport(DiskTransport(str(folder)), on_send=fault)  # noqa: E731
    return House(DictSource(awkward_weights(1)), {"a": DictSink()}, config, make)


async def test_any_tool_can_read_the_file_and_only_the_last_version_stays(tmp_path):
    house = house_in(tmp_path)
    for version in (1, 2):
        house.source.weights = awkward_weights(version)
        await house.manager.sync(version)
    (folder,) = tmp_path.iterdir()
    assert_same(safetensors.torch.load_file(folder / "model.safetensors"), awkward_weights(2))
    about = json.loads((folder / "sync.json").read_text())
    manifest = manifest_of(awkward_weights(2).items())
    assert (about["version"], about["manifest_digest"]) == (2, manifest.digest)
    assert set(folder_specs(folder)) == set(manifest.specs)


async def test_what_was_not_completed_leaves_nothing_behind(tmp_path):
    house = house_in(tmp_path, Fault("die", 2))
    with pytest.raises(SyncFailed, match="bucket 2"):
        await house.manager.sync(1)
    assert list(tmp_path.iterdir()) == []
    await house.manager.sync(1)


def test_a_folder_must_be_named():
    with pytest.raises(SyncError, match="disk_path"):
        DiskTransport("")
