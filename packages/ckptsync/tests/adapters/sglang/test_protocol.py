"""`SglangMember` against a real HTTP server that speaks SGLang's documented update protocol and loads real files.

A protocol test, for what SGLang itself does not do when it is told to; `offbeat_trainer`'s tests have the member over SGLang.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from offbeat_ckptsync.adapters.sglang import (
    Loading,
    PauseMode,
    ServerSink,
    SglangMember,
    SglangServer,
    Way,
    member,
)
from offbeat_ckptsync.adapters.sglang import group as group_module
from offbeat_ckptsync.adapters.sglang.group import Ends, met
from offbeat_ckptsync.adapters.sglang.member import model_settings, require_way
from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.control.members import LocalMember
from offbeat_ckptsync.ends.manifest import manifest_of
from offbeat_ckptsync.ends.receiver import Receiver
from offbeat_ckptsync.ends.sender import LocalSource, Sender
from offbeat_ckptsync.ends.sinks import DictSink, ModuleSource
from offbeat_ckptsync.errors import SyncError, SyncFailed, TransferError
from offbeat_ckptsync.seams import NO_TRAFFIC
from offbeat_ckptsync.testing import Fault, FaultyTransport
from offbeat_ckptsync.toolkit.config import SyncConfig, make_transport
from offbeat_ckptsync.values import RankId

pytestmark = pytest.mark.spawns

CONFIG = SyncConfig(transport="loopback", bucket_mib=0.001)
IDS = [1, 2, 3]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)
        self.head = torch.nn.Linear(8, 16, bias=False)

    def answer(self):
        with torch.no_grad():
            return (self.head.weight @ self.embed.weight[IDS].mean(0)).log_softmax(-1).tolist()


def make_net():
    torch.manual_seed(0)
    return Net()


class Server:
    """The server, in a process of its own."""

    def __init__(self, base):
        self.base = base
        base.mkdir()
        weights = {name: tensor.clone() for name, tensor in make_net().state_dict().items()}
        save_file(weights, base / "model.safetensors")
        self.start()

    def start(self):
        script = Path(__file__).parent / "protocol_server.py"
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(self.base)], stdout=subprocess.PIPE, text=True
        )
        self.url = f"http://127.0.0.1:{self.process.stdout.readline().strip()}"

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


class LocalSync:
    """A source, a server, and the member between them."""

    def __init__(self, server, folder, pause_mode=PauseMode.RETRACT):
        self.net, self.server, self.base = make_net(), server, server.base
        self.folder = folder / "weights"
        self.fault = Fault("corrupt", 0, times=0)
        transport = FaultyTransport(make_transport("loopback", CONFIG), on_send=self.fault)
        self.source = ModuleSource(self.net)
        self.manager = CheckpointEngineManager(
            LocalSource(Sender(self.source, CONFIG, transport=transport)), CONFIG
        )
        self.member = self.make_member(pause_mode=pause_mode)
        self.manager.add(self.member)

    def make_member(self, **loading):
        transport = make_transport("loopback", CONFIG)
        loading = Loading(folder=self.folder, **loading)
        return SglangMember("sglang-0", SglangServer(self.server.url), transport, CONFIG, loading)

    def ask(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(
            urllib.request.Request(self.server.url + path, data), timeout=120
        ) as answer:
            return json.loads(answer.read())

    def answer(self):
        return self.ask("/generate", {"input_ids": IDS})

    def asked(self):
        return [path for path, _ in self.ask("/record")["record"]]

    def train(self):
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.add_(torch.randn_like(parameter))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One for all tests, which must leave it running."""
    server = Server(tmp_path_factory.mktemp("server") / "base")
    yield server
    server.end()


@pytest.fixture
def local(server, tmp_path, request):
    local = LocalSync(server, tmp_path, getattr(request, "param", PauseMode.RETRACT))
    local.ask("/reset", {})
    return local


UPDATE = ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]


@pytest.mark.parametrize("local", [*PauseMode], indirect=True)
async def test_versions_are_loaded_said_back_and_answered_with(local, request):
    for version in (1, 2, 3):
        local.train()
        report = await local.manager.sync(version)
        assert local.answer() == {
            "logprobs": pytest.approx(local.net.answer(), abs=1e-6),
            "weight_version": str(version),
        }
        status = await local.member.status()
        assert (status.version, status.committed) == (version, True)
        assert status.label.content_digest == report.content_digest
        flip = report.members["sglang-0"]
        assert 0 < flip.load_s <= flip.pause_s
    assert local.asked() == UPDATE * 3
    pause, load, _ = (body for _, body in local.ask("/record")["record"][-3:])
    mode = request.node.callspec.params["local"]
    assert pause == {"mode": str(mode)}
    assert load["flush_cache"] is (mode is not PauseMode.IN_PLACE)
    assert [path.name for path in local.folder.iterdir()] == ["version-3"], "the folder before is removed"


async def refused(local, named):
    """Sync; it must fail so that the server was asked for nothing, and answers as before; then the next one works."""
    before, asked = local.answer(), local.asked()
    with pytest.raises(SyncFailed, match=named):
        await local.manager.sync(9)
    assert local.answer() == before
    assert local.asked() == asked


async def test_a_flipped_byte_on_the_way_is_refused_before_the_server_is_asked(local):
    local.train()
    local.fault.left = 1
    await refused(local, "arrived with digest")
    await local.manager.sync(10)
    assert local.answer()["weight_version"] == "10"


async def test_a_flipped_byte_in_the_folder_is_refused_before_the_server_is_asked(local, monkeypatch):
    local.train()
    write = member._write

    def damaged(path, whole):
        write(path, whole)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    with monkeypatch.context() as patch:
        patch.setattr(member, "_write", damaged)
        await refused(local, "is not what was written")
    assert list(local.folder.iterdir()) == []
    await local.manager.sync(10)
    assert local.answer()["weight_version"] == "10"


async def test_other_shapes_than_those_of_its_model_folder_are_refused_by_name(local):
    local.net.head = torch.nn.Linear(9, 16, bias=False)
    await refused(local, r"'head\.weight' has shape \(16, 9\), expected \(16, 8\)")


def add_plain_member(local):
    sink = DictSink()
    local.manager.add(
        LocalMember(
            Receiver(RankId(member="plain"), sink), make_transport("loopback", CONFIG), gate=NO_TRAFFIC
        )
    )
    return sink


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("torn", "planted half-way"),
        ("silent", "took longer than 2 s"),
        ("liar", "was given weight version '1' and says 'default'"),
        ("stranger", r"does not hold what it was given: 1 parameters, among them \['(embed|head).weight'\]"),
    ],
)
async def test_what_fails_after_the_server_was_asked_fences_it_off_paused_and_others_go_on(local, how, named):
    sink = add_plain_member(local)
    local.train()
    local.ask("/misbehave", {"how": how})
    if how == "silent":
        local.manager._config = dataclasses.replace(CONFIG, flip_timeout_s=2)
    report = await local.manager.sync(1)
    assert list(report.members) == ["plain"]
    assert re.search(named, report.fenced["sglang-0"])
    assert local.manager.members == ["plain"]
    assert torch.equal(sink.weights["head.weight"], local.net.head.weight)
    assert local.ask("/record")["paused"], "a server whose weights may be torn answers nobody"
    with pytest.raises(urllib.error.HTTPError, match="503"):
        local.answer()


async def test_a_server_started_anew_is_found_out_at_begin_and_comes_back_as_a_new_member(local):
    sink = add_plain_member(local)
    local.train()
    await local.manager.sync(1)
    local.server.end()
    local.server.start()
    local.member._server.url = local.server.url  # a port would be the same; here the system chooses one
    status = await local.member.status()
    assert (status.label, status.committed) == (None, False)
    with pytest.raises(SyncFailed, match="serves weight version 'default', and '1' was put there"):
        await local.manager.sync(2)
    local.manager.remove("sglang-0")
    fresh = SglangMember(
        "sglang-0",
        SglangServer(local.server.url),
        make_transport("loopback", CONFIG),
        CONFIG,
        Loading(folder=local.folder),
    )
    await local.manager.catch_up(fresh)
    assert local.answer() == {"logprobs": pytest.approx(local.net.answer(), abs=1e-6), "weight_version": "1"}
    assert torch.equal(sink.weights["head.weight"], local.net.head.weight)


async def test_a_server_that_is_gone_is_named(local):
    local.server.end()
    with pytest.raises(SyncFailed, match=rf"sglang-0: {local.server.url}/model_info gave no answer"):
        await local.manager.sync(1)
    local.server.start()


async def test_fencing_stops_it_until_the_next_flip(local):
    local.train()
    await local.manager.sync(1)
    await local.member.fence("a test says so")
    assert local.ask("/record")["paused"]
    assert (await local.member.status()).label is None
    local.train()
    await local.manager.sync(2)
    assert local.answer()["weight_version"] == "2"


async def test_what_cannot_be_proven_is_refused_before_the_server_is_asked_or_goes_unproven_when_told_to(
    local,
):
    """It says that two ranks share its model, and what one of them holds."""
    local.train()
    local.ask("/misbehave", {"how": "", "num_ranks": 2})
    await refused(local, r"cannot be proven; `Loading\(prove=False\)` .* no checksums of 2 rank\(s\)")
    local.manager.remove("sglang-0")
    local.manager.add(local.make_member(prove=False))
    await local.manager.sync(10)
    assert local.answer()["weight_version"] == "10"


@pytest.mark.parametrize("prove", [True, False])
async def test_a_server_of_which_nothing_says_what_it_takes_is_sent_nothing(local, prove):
    local.train()
    local.manager.remove("sglang-0")
    local.manager.add(local.make_member(prove=prove))
    (local.base / "model.safetensors").rename(local.base / "away")
    try:
        await refused(local, "what tensors it takes cannot be told: its model folder .* would end it")
    finally:
        (local.base / "away").rename(local.base / "model.safetensors")
    await local.manager.sync(10)
    assert local.answer()["weight_version"] == "10"


async def test_a_server_on_a_gpu_is_held_to_the_hashes_of_one(local):
    for how in ("", "stranger"):
        local.ask("/misbehave", {"how": how, "device": "cuda"})
        local.train()
        if not how:
            await local.manager.sync(1)
            assert local.answer()["weight_version"] == "1"
            continue
        with pytest.raises(SyncFailed, match="does not hold what it was given: 1 parameters"):
            await local.manager.sync(2)


GPUS = ("GPU-a", "GPU-b")


@pytest.mark.parametrize(
    ("loading", "kind", "named"),
    [
        ({"by": Way.GROUP}, "cuda", "the server computes on 'cuda', and `device` is 'cpu'"),
        ({"by": Way.TENSORS, "device": "cuda:1"}, "cpu", "both must be CPUs or GPUs"),
        ({"by": Way.GROUP, "device": "cuda:2"}, "cuda", r"must name the server's 2 GPU\(s\), got 0"),
        (
            {"by": Way.GROUP, "device": "cuda:1", "gpus": GPUS},
            "cuda",
            "cuda:1 is the server's, too, which NCCL",
        ),
        ({"by": Way.TENSORS, "device": "cuda:2", "gpus": GPUS}, "cuda", "cuda:2 is none of the server's"),
        ({"by": Way.GROUP, "device": "cuda:2", "gpus": GPUS}, "cuda", ""),
        ({"by": Way.TENSORS, "device": "cuda", "gpus": GPUS}, "cuda", ""),
        ({"by": Way.FILES}, "cuda", ""),
        ({"by": Way.TENSORS}, "cpu", ""),
        ({"by": Way.GROUP}, "cpu", ""),
    ],
)
def test_a_way_that_would_end_the_server_or_this_process_is_refused(loading, kind, named):
    """This process has three GPUs, of which the server has two."""
    asked = Loading(folder=Path("nowhere"), **loading)

    def gpu(index):
        return (*GPUS, "GPU-c")[index]

    if not named:
        require_way(asked, kind, 2, gpu)
        return
    with pytest.raises(TransferError, match=named):
        require_way(asked, kind, 2, gpu)


def test_settings_are_those_of_the_language_model(tmp_path):
    assert model_settings(tmp_path) == {}
    text = {"num_key_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": True, "text_config": text}))
    assert model_settings(tmp_path) == {"tie_word_embeddings": True, "text_config": text, **text}


def sink_of(local, rest=None, **loading):
    expected = manifest_of(local.net.state_dict().items())
    loading = Loading(folder=local.folder, expected=expected, **loading)
    return ServerSink(SglangServer(local.server.url), CONFIG, loading, rest)


def weights(local):
    return {name: tensor.clone() for name, tensor in local.net.state_dict().items()}


def test_what_grows_with_the_model_is_done_before_the_flip_and_once(local, monkeypatch):
    sink, hashed = sink_of(local), []
    sink.expected()
    expected = sink._proof.expected
    monkeypatch.setattr(sink._proof, "expected", lambda tensor: hashed.append(1) or expected(tensor))
    local.train()
    whole = weights(local)
    sink.prepare(whole.items(), 1)
    assert (local.folder / "version-1" / "model.safetensors").is_file()
    assert (len(hashed), local.asked()) == (1, [])
    sink.load(whole.items(), 1)
    assert (len(hashed), local.asked()) == (1, UPDATE)
    assert list(local.folder.iterdir()) == [], "nothing is asked of the folder any more"
    other = {name: tensor + 1 for name, tensor in whole.items()}
    sink.prepare(whole.items(), 2)
    sink.load(other.items(), 2)
    assert len(hashed) == 3, "other tensors than were prepared"
    local.net.load_state_dict(other)
    assert local.answer() == {"logprobs": pytest.approx(local.net.answer(), abs=1e-6), "weight_version": "2"}


def test_who_has_the_server_rest_may_be_somebody_else(local):
    calls = []

    def rest(version, load):
        calls.append(version)
        if version == 2:
            raise TransferError("it does not come to rest")
        load()

    sink = sink_of(local, rest)
    sink.load(weights(local).items(), 1)
    with pytest.raises(TransferError, match="does not come to rest"):
        sink.load(weights(local).items(), 2)
    local.ask("/misbehave", {"how": "torn"})
    with pytest.raises(RuntimeError, match=r"after the server was asked to load: .*planted half-way"):
        sink.load(weights(local).items(), 3)
    assert calls == [1, 2, 3]
    assert set(local.asked()) == {"/update_weights_from_disk"}, "it is paused by nobody else"


def test_a_server_is_held_against_the_folder_that_it_was_started_with(local):
    sink_of(local).prove_start(60)
    path, aside = local.base / "model.safetensors", local.base / "aside"
    whole = load_file(path)
    whole["embed.weight"][0, 0] += 1
    path.rename(aside)  # the server has mapped it
    save_file(whole, path)
    try:
        with pytest.raises(TransferError, match=r"does not hold what it was given: 1 parameters"):
            sink_of(local).prove_start(60)
    finally:
        aside.rename(path)


def test_the_url_must_be_one_of_http():
    with pytest.raises(ValueError, match="must begin with http"):
        SglangServer("file:///etc/passwd")


def test_a_folder_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SyncError, match="could not be written"):
        member.write_verified(tmp_path / "file" / "v1", [("a", torch.ones(2))])


def test_of_a_folder_in_which_models_lie_only_other_versions_are_removed(tmp_path):
    for name in ("version-1", "version-2", "my-model"):
        member.write_verified(tmp_path / name, {"w": torch.ones(2)}.items())
    member.keep_only(tmp_path / "version-2", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my-model", "version-2"]


def test_a_written_folder_is_read_by_any_tool(tmp_path):
    tensors = {
        "odd": torch.arange(7, dtype=torch.int8),
        "none": torch.zeros(0, 3),
        "half": torch.randn(3, 5).to(torch.bfloat16).t(),
        "one": torch.tensor(2.0, dtype=torch.float64),
    }
    member.write_verified(tmp_path / "v1", tensors.items())
    found = load_file(tmp_path / "v1" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert found.keys() == tensors.keys()


def test_a_group_with_a_server_that_is_gone_is_given_up_for_what_it_said():
    """Not for the deadline of gloo, which waits for the other rank."""
    with (
        pytest.raises(TransferError, match="init_weights_update_group gave no answer"),
        met(SglangServer("http://127.0.0.1:1"), Ends(), "nobody", 100.0),
    ):
        raise AssertionError("there is no group")


def test_over_nccl_the_server_s_ranks_are_asked_to_meet_where_this_process_waits_for_them(local, monkeypatch):
    """The group itself takes GPUs; what is around it does not."""
    seen, listening = [], []

    def made(store, rank, world, device, timeout_s):
        store.set("0", b"the id of the communicator")
        seen.append((rank, world, device, timeout_s))
        deadline = time.monotonic() + 300
        while not local.ask("/record")["record"]:  # it is asked at the same time
            assert time.monotonic() < deadline
        for table in ("tcp", "tcp6"):
            rows = Path(f"/proc/net/{table}").read_text().splitlines()
            listening.extend(row.split()[1:4:2] for row in rows)
        raise RuntimeError("there is no GPU here")

    monkeypatch.setattr(group_module, "nccl_group", made)
    with (
        pytest.raises(TransferError, match="the group of 3 did not form: there is no GPU here"),
        met(SglangServer(local.server.url), Ends(device="cuda:1", num_ranks=2), "version 7", 60.0),
    ):
        raise AssertionError("there is no group")
    assert seen == [(0, 3, "cuda:1", 60.0)]
    ((path, asked),) = local.ask("/record")["record"]
    assert path == "/init_weights_update_group"
    port = asked.pop("master_port")
    assert asked == {
        "master_address": "127.0.0.1",
        "rank_offset": 1,
        "world_size": 3,
        "group_name": "version 7",
        "backend": "nccl",
    }
    own = [address for address, state in listening if state == "0A" and address.endswith(f":{port:04X}")]
    assert own == [f"0100007F:{port:04X}"], "the store asks nobody: it is for this machine alone"
