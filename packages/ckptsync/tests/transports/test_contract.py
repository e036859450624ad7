from __future__ import annotations

import asyncio

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat_ckptsync.ends.sinks import DictSink
from offbeat_ckptsync.errors import SyncError
from offbeat_ckptsync.seams import BucketSender
from offbeat_ckptsync.testing import DictSource, LocalSync, assert_same, check_case, transport_contract
from offbeat_ckptsync.testing.contract import CASES
from offbeat_ckptsync.toolkit.config import SyncConfig, make_transport, transport_names
from ranks_apart import contract_apart

test_loopback = transport_contract("loopback")
test_shm = transport_contract("shm")
test_broadcast_over_gloo = transport_contract("broadcast")
test_disk = transport_contract("disk")
test_auto = transport_contract("auto", num_receivers=(2,))
test_shm_between_processes = pytest.mark.spawns(contract_apart("shm", num_receivers=(2,)))
test_broadcast_between_processes = pytest.mark.spawns(contract_apart("broadcast", num_receivers=(2,)))
test_cuda_ipc = pytest.mark.gpu(1)(
    contract_apart("cuda_ipc", num_receivers=(1, 3), device="cuda", gpus=("cuda:0",))
)
test_broadcast_over_nccl = pytest.mark.gpu(2)(
    contract_apart("broadcast", num_receivers=(1,), device="cuda", gpus=("cuda:1",))
)

DTYPES = st.sampled_from(["float32", "bfloat16", "uint8", "int64", "bool"])
SHAPES = st.lists(st.integers(0, 30), max_size=3).map(tuple)
ROWS = st.lists(st.tuples(SHAPES, DTYPES), max_size=12)


def weights_of(rows, seed):
    rng = torch.Generator().manual_seed(seed)
    return {
        f"t{i}": torch.randint(0, 2, shape, generator=rng).to(getattr(torch, dtype))
        for i, (shape, dtype) in enumerate(rows)
    }


@pytest.mark.parametrize("name", ["loopback", "shm", "broadcast", "disk"])
def test_any_manifest_crosses_in_buckets_of_any_size(name, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("disk"))

    @settings(max_examples=settings().max_examples // 6, database=None)
    @given(ROWS, st.integers(256, 5000), st.integers(1, 2))
    def check(rows, bucket_bytes, num_receivers):
        config = SyncConfig(transport=name, bucket_mib=bucket_bytes / (1 << 20), disk_path=folder)
        sinks = {f"r{i}": DictSink() for i in range(num_receivers)}
        local = LocalSync(DictSource({}), dict(sinks), config, lambda: make_transport(name, config))

        async def sync_all():
            for version in (1, 2):
                local.source.weights = weights_of(rows, version)
                await local.manager.sync(version)
                for sink in sinks.values():
                    assert_same(sink.weights, local.source.weights)

        try:
            asyncio.run(sync_all())
        finally:
            local.close()

    check()


def test_an_unknown_transport_is_refused_with_the_names_there_are():
    with pytest.raises(SyncError, match="auto, broadcast, cuda_ipc, disk, loopback, relay, shm"):
        make_transport("pigeon", SyncConfig())
    with pytest.raises(ValueError, match=r"no transport is called 'pigeon'; there are .*shm"):
        SyncConfig(transport="pigeon")


def test_a_transport_of_another_package_is_known_by_its_entry_point(tmp_path, monkeypatch):
    about = tmp_path / "pigeon_post-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: pigeon-post\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[offbeat.transports]\npigeon = pigeon_post:make\n")
    (tmp_path / "pigeon_post.py").write_text(
        "from offbeat_ckptsync.transports.loopback import LoopbackTransport\n"
        "class Pigeon(LoopbackTransport):\n    pass\n"
        "def make(config):\n    assert config.transport == 'pigeon'\n    return Pigeon()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "pigeon" in transport_names()
    config = SyncConfig(transport="pigeon", bucket_mib=4096 / (1 << 20))
    assert type(make_transport("pigeon", config)).__name__ == "Pigeon"
    asyncio.run(check_case(CASES[0], lambda: make_transport("pigeon", config), config, num_receivers=2))


class Forgetful:
    """A transport that delivers the bytes of the first sync for ever."""

    def __init__(self, inner):
        self.inner = inner
        self.kept = {}

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def sender(self, offer, members):
        inner, kept = self.inner.sender(offer, members), self.kept

        class Sender(BucketSender):
            def send(self, bucket, payload):
                inner.send(bucket, kept.setdefault(bucket.index, payload.clone()))

            def close(self):
                inner.close()

        return Sender()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_contract_finds_a_transport_that_delivers_old_bytes(case):
    config = SyncConfig(transport="loopback", bucket_mib=4096 / (1 << 20))
    make = lambda: Forgetful(make_transport("loopback", config))  # noqa: E731
    with pytest.raises(SyncError, match="arrived with digest"):
        asyncio.run(check_case(case, make, config, num_receivers=1))
