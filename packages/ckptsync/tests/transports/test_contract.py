from __future__ import annotations

import pytest

from offbeat_ckptsync.config import SyncConfig
from offbeat_ckptsync.errors import SyncError
from offbeat_ckptsync.testing import check_transport
from offbeat_ckptsync.transports import make_transport, transport_names

BUCKET_MIB = 4096 / (1 << 20)


@pytest.mark.parametrize("num_receivers", [1, 3])
@pytest.mark.parametrize("name", ["loopback", "shm", "broadcast", "disk"])
async def test_the_contract(name, num_receivers, tmp_path):
    config = SyncConfig(
        transport=name,
        bucket_mib=BUCKET_MIB,
        disk_path=str(tmp_path),
        begin_timeout_s=20,
        transfer_timeout_s=30,
    )
    await check_transport(lambda: make_transport(name, config), config, num_receivers=num_receivers)


def test_an_unknown_transport_is_refused_with_the_names_there_are():
    with pytest.raises(SyncError, match="broadcast, disk, loopback, shm"):
        make_transport("pigeon", SyncConfig())
    assert transport_names() == ["broadcast", "disk", "loopback", "shm"]
