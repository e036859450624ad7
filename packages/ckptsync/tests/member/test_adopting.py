"""Weights that are served from where they lie: one copy for all replicas of a machine, and a flip that moves no bytes."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import threading

import pytest
import torch

from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.control.members import LocalMember
from offbeat_ckptsync.ends.receiver import Receiver
from offbeat_ckptsync.ends.sender import LocalSource, Sender
from offbeat_ckptsync.ends.sinks import AdoptingModuleSink, ModuleSink, ModuleSource
from offbeat_ckptsync.errors import ManifestError, TransferError
from offbeat_ckptsync.seams import NO_TRAFFIC
from offbeat_ckptsync.toolkit.config import SyncConfig, make_transport
from offbeat_ckptsync.values import RankId

SIZE = 64


class Model(torch.nn.Module):
    """Tied weights, a buffer, two dtypes, a tensor of no elements."""

    def __init__(self, seed, width=SIZE):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = torch.nn.Parameter(torch.randn(width, SIZE, generator=generator))
        self.head = self.embed
        self.scale = torch.nn.Parameter(torch.randn(SIZE, generator=generator).bfloat16())
        self.register_buffer("table", torch.randint(0, 9, (SIZE,), generator=generator))
        self.register_buffer("nothing", torch.zeros(0, 3))

    def bits(self):
        return {name: tensor.clone() for name, tensor in self.state_dict().items()}

    def places(self):
        return [tensor.data_ptr() for tensor in self.state_dict().values() if tensor.numel()]


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


class LocalSync:
    """A source, and receivers of it in this process."""

    def __init__(self, transport, sinks, folder):
        config = SyncConfig(transport=transport, bucket_mib=1 / 128, disk_path=str(folder))
        make = lambda: make_transport(transport, config)  # noqa: E731
        self.model = Model(0)
        shared = make() if transport == "loopback" else None
        self.sending = shared or make()
        self.sender = Sender(ModuleSource(self.model), config, transport=self.sending)
        self.rank_ids = {f"m{index}": shared or make() for index in range(len(sinks))}
        self.receivers = {
            name: Receiver(RankId(member=name), sink) for name, sink in zip(self.rank_ids, sinks, strict=True)
        }
        self.version = 0

    def sync(self, seed):
        flip = self.stage(seed)
        flip()

    def stage(self, seed):
        """Bring a version to every receiver; return what makes them serve it."""
        self.version += 1
        self.model.load_state_dict(Model(seed).state_dict())
        offer = self.sender.offer(self.version, [*self.receivers])
        for receiver in self.receivers.values():
            receiver.begin(offer)
        sent = []
        threads = [threading.Thread(target=lambda: sent.append(self.sender.send(offer)))]
        threads += [
            threading.Thread(target=receiver.transfer, args=(self.rank_ids[name], offer.sync_id))
            for name, receiver in self.receivers.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)

        def flip():
            for receiver in self.receivers.values():
                receiver.flip(offer.sync_id, sent[0])
                receiver.commit(receiver.status().label)

        return flip

    def segments(self):
        return [segment.memory for segment in self.sending._segments]

    def close(self):
        self.sender.close()
        for rank_id in self.rank_ids.values():
            rank_id.close()


@pytest.fixture
def open_local(tmp_path):
    locals_made = []

    def make(transport, *sinks):
        locals_made.append(LocalSync(transport, sinks, tmp_path / "disk"))
        return locals_made[-1]

    yield make
    for local in locals_made:
        local.close()


@pytest.mark.parametrize("transport", ["shm", "loopback", "broadcast", "disk"])
def test_every_version_is_served_to_the_bit_over_any_transport(open_local, transport):
    model = Model(99)
    local = open_local(transport, AdoptingModuleSink(model))
    local.sync(1)
    for seed in (2, 3, 4):
        flip = local.stage(seed)
        assert_equal(model.bits(), Model(seed - 1).bits())
        flip()
        assert_equal(model.bits(), Model(seed).bits())
        assert model.head is model.embed


@pytest.mark.parametrize("transport", ["shm", "broadcast", "disk"])
def test_nothing_is_copied_and_two_memories_take_turns(open_local, transport):
    model = Model(99)
    local = open_local(transport, AdoptingModuleSink(model))
    seen = []
    for seed in range(1, 7):
        before = model.places()
        local.sync(seed)
        assert not set(before) & set(model.places()), "a sync wrote where weights were served"
        seen.append(tuple(model.places()))
    assert len(set(seen)) == 2, "memory is kept"
    if transport == "shm":
        assert len(local.segments()) == 2


def test_what_copies_keeps_its_tensors_where_they_are(open_local):
    model = Model(99)
    local = open_local("shm", ModuleSink(model))
    before = model.places()
    local.sync(1)
    assert model.places() == before
    assert_equal(model.bits(), Model(1).bits())


@pytest.mark.parametrize("transport", ["shm", "broadcast"])
def test_weights_that_somebody_still_holds_stay_as_they_were(open_local, transport):
    model = Model(99)
    local = open_local(transport, AdoptingModuleSink(model))
    local.sync(1)
    held = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for seed in (2, 3, 4):
        local.sync(seed)
    assert_equal(held, Model(1).bits())
    if transport == "shm":
        assert len(local.segments()) == 3
    del held
    gc.collect()
    local.sync(5)
    local.sync(6)
    assert_equal(model.bits(), Model(6).bits())


@pytest.mark.parametrize("transport", ["shm", "broadcast"])
def test_a_replica_that_writes_into_its_weights_changes_nothing_for_others_or_later(open_local, transport):
    models = Model(98), Model(99)
    local = open_local(transport, *map(AdoptingModuleSink, models))
    local.sync(1)
    with torch.no_grad():
        models[0].embed.add_(1)  # torch counts this on the parameter, not on the memory below
    models[0].table.numpy()[:] = 7  # and this nowhere
    assert_equal(models[1].bits(), Model(1).bits())
    for seed in (2, 3, 4, 5):
        local.sync(seed)
        for model in models:
            assert_equal(model.bits(), Model(seed).bits())


def test_a_replica_that_wrote_and_let_go_before_the_next_sync_takes_that_one_whole(open_local):
    model = Model(99)
    local = open_local("shm", AdoptingModuleSink(model))
    local.sync(1)
    with torch.no_grad():
        model.embed.add_(1)
    for tensor in model.state_dict(keep_vars=True).values():
        tensor.data = tensor.detach().clone()
    gc.collect()
    for seed in (2, 3):
        local.sync(seed)
        assert_equal(model.bits(), Model(seed).bits())


@pytest.mark.parametrize("transport", ["shm", "broadcast"])
def test_what_is_served_from_where_it_was_staged_can_be_handed_on(open_local, transport):
    copies, adopts = Model(98), Model(99)
    local = open_local(transport, ModuleSink(copies), AdoptingModuleSink(adopts))
    for seed in (1, 2, 3):
        local.sync(seed)
        manifest, tensors = local.receivers["m1"].copy()
        assert [spec.name for spec in manifest.specs] == [name for name, _ in tensors]
        assert_equal(
            dict(tensors), {name: bits for name, bits in Model(seed).bits().items() if name != "head"}
        )
    if transport == "shm":  # the segment that the other copied from went back to the source
        with pytest.raises(TransferError, match="keeps no copy"):
            local.receivers["m0"].copy()
    else:
        assert_equal(dict(local.receivers["m0"].copy()[1]), dict(tensors))
    local.receivers["m1"].distrust()
    with pytest.raises(TransferError, match="keeps no copy"):
        local.receivers["m1"].copy()


def test_a_copy_that_is_being_read_is_not_staged_over(open_local):
    model = Model(99)
    local = open_local("broadcast", ModuleSink(model))
    local.sync(1)
    _, tensors = local.receivers["m0"].copy()
    local.sync(2)
    assert_equal(dict(tensors), {name: tensor for name, tensor in Model(1).bits().items() if name != "head"})


def test_what_does_not_fit_is_refused_before_a_pointer_changes(open_local):
    model = Model(99, width=SIZE + 1)
    before, places = model.bits(), model.places()
    local = open_local("shm", AdoptingModuleSink(model))
    with pytest.raises(ManifestError, match="embed"):
        local.sync(1)
    assert_equal(model.bits(), before)
    assert model.places() == places


def test_what_needs_another_dtype_is_copied_and_the_rest_is_not():
    model = Model(1)
    given = {name: tensor.clone() for name, tensor in Model(2).state_dict().items() if name != "head"}
    given["scale"] = given["scale"].float()
    place = model.scale.data_ptr()
    AdoptingModuleSink(model, allow_cast=True).adopt(given.items(), 1)
    assert model.scale.data_ptr() == place
    assert model.embed.data_ptr() == given["embed"].data_ptr()
    assert_equal(model.bits(), Model(2).bits())


class Adopting:
    """A manager over `shm`, and members that serve from its segments and keep no copy for joiners."""

    def __init__(self):
        self.config = SyncConfig(transport="shm", bucket_mib=1 / 128, begin_timeout_s=2)
        self.model = Model(0)
        self.sending = make_transport("shm", self.config)
        self.sender = Sender(ModuleSource(self.model), self.config, transport=self.sending)
        self.manager = CheckpointEngineManager(LocalSource(self.sender), self.config)
        self.served, self.ends = {}, [self.sender]

    def member(self, name):
        self.served[name] = Model(9)
        end = make_transport("shm", self.config)
        self.ends.append(end)
        receiver = Receiver(RankId(member=name), AdoptingModuleSink(self.served[name]))
        return LocalMember(receiver, end, gate=NO_TRAFFIC)

    async def sync(self, version):
        with torch.no_grad():
            self.model.scale.fill_(version)
        return await self.manager.sync(version)

    def scales(self):
        return {name: float(model.scale[0].detach()) for name, model in self.served.items()}

    def close(self):
        for end in self.ends:
            end.close()


async def test_members_that_caught_up_one_by_one_do_not_stop_every_later_sync():
    """Each holds the committed version in a segment of its own, of which it can let go by flipping alone."""
    site = Adopting()
    site.manager.add(site.member("m0"))
    await site.sync(1)
    for name in ("m1", "m2", "m3"):
        await site.manager.catch_up(site.member(name))
    assert len(site.sending._segments) == 4
    for version in range(2, 6):
        assert len((await site.sync(version)).members) == 4
        assert site.scales() == dict.fromkeys(site.served, float(version))
    gc.collect()
    await site.sync(6)
    assert len(site.sending._segments) <= 3, "and the memory comes back"
    site.close()


async def test_what_a_member_that_was_fenced_off_still_holds_stops_no_sync():
    site = Adopting()
    silent = site.member("silent")
    site.manager.add(site.member("m"))
    site.manager.add(silent)
    await site.sync(1)
    transfer, never = silent.transfer, asyncio.Event()

    async def stages_and_says_nothing(sync_id):
        await transfer(sync_id)
        await never.wait()

    silent.transfer = stages_and_says_nothing
    silent.fence = silent.abort = lambda *_: never.wait()
    site.manager._config = dataclasses.replace(site.config, transfer_timeout_s=2)
    report = await site.sync(2)
    assert (list(report.members), list(report.fenced)) == (["m"], ["silent"])
    for version in range(3, 8):
        await site.sync(version)
    assert site.scales() == {"m": 7.0, "silent": 1.0}
    site.close()
