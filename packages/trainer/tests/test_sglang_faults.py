"""Whoever fails in a sync with real SGLang servers, wherever, however: the new version is served, or the old one, or nothing."""

from __future__ import annotations

import itertools

import pytest

from offbeat_ckptsync import SyncConfig
from offbeat_ckptsync.toolkit.store import Store
from offbeat_rollout.testing import make_tiny_model
from sync_faults.hurt import content_of
from sync_faults.over_sglang import START_S, weights_of
from sync_faults.processes import FaultProcesses

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.deep,
    pytest.mark.sglang,
    pytest.mark.timeout(2 * START_S),
]

PHASES = ("begin", "transfer", "verify", "flip", "commit")
KINDS = ("killed", "hung", "slow", "corrupting")
ROLES = ("sender", "receiver", "server", "manager")
HUNG_S = 20.0  # the deadline of the phase in which somebody hangs, and of those after it: far beyond what a server takes
CONFIG = SyncConfig(transport="shm", bucket_mib=0.01, **{f"{phase}_timeout_s": 300.0 for phase in PHASES})


class Servers(FaultProcesses):
    """Two replicas with a server each."""

    def __init__(self, folder):
        self.model = make_tiny_model(folder / "model", tie_word_embeddings=False)
        store = Store.serve("127.0.0.1")
        store.set("model", self.model)
        own = "sync_faults.over_sglang"
        super().__init__(CONFIG, store=store, sender=f"{own}:sender", receiver=f"{own}:replica")

    def content(self, version):
        return content_of(weights_of(self.model, version))

    def good_sync(self):
        self.version += 1
        self.sender.ask("weights", self.version)
        result = self.manager.ask("sync", self.version, {})
        assert sorted(result.get("members", [])) == ["r0", "r1"], result
        good = [self.version, self.content(self.version), True]
        assert self.serving() == {"r0": good, "r1": good}


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    made = Servers(tmp_path_factory.mktemp("sglang"))
    made.good_sync()
    yield made
    for name in made.receivers:
        if made.actors[name].is_alive():
            made.actors[name].go_on()
            made.actors[name].ask("stop")
    made.close()


def is_case(role, phase, kind):
    """Every role in every phase, and with every kind, but not all three; what a server spoils is spoilt in its member's place."""
    place = ROLES.index(role) + PHASES.index(phase) + KINDS.index(kind)
    return place % 3 == 0 and (role, kind) != ("server", "corrupting")


CASES = [case for case in itertools.product(ROLES, PHASES, KINDS) if is_case(*case)]


def plant(servers, role, phase, kind):
    """Plant a fault; return the deadlines that the manager is to keep."""
    idle_sender = role == "sender" and phase in ("verify", "flip", "commit") and kind != "corrupting"
    if idle_sender:  # it has nothing to do there, so it is struck from outside
        servers.manager.ask("strike", phase, kind, servers.sender.pid)
    elif role in ("receiver", "server"):
        servers.actors["r1"].ask("arm", role, phase, kind)
    else:
        servers.actors[role].ask("arm", phase, kind)
    later = PHASES[PHASES.index(phase) :]
    return {f"{name}_timeout_s": HUNG_S for name in later} if kind == "hung" and role != "manager" else {}


def run(servers, role, phase, kind):
    """Return what the manager said, None where it cannot say anything any more."""
    deadlines = plant(servers, role, phase, kind)
    servers.version += 1
    servers.sender.ask("weights", servers.version)
    servers.manager.tell("sync", servers.version, deadlines)
    if role != "manager" or kind not in ("killed", "hung"):
        return servers.manager.answer(START_S)
    if kind == "hung":
        servers.manager.wait_stopped(START_S)
        servers.kill("manager")
    else:
        with pytest.raises(EOFError):
            servers.manager.answer(START_S)
    return None


@pytest.mark.parametrize(("role", "phase", "kind"), CASES)
def test_new_or_old_or_fenced(servers, role, phase, kind):
    before = servers.version
    result = run(servers, role, phase, kind)
    served = servers.serving()
    contents = {version: servers.content(version) for version in (before, servers.version)}
    said = {} if result is None else result
    new = said.get("members", [])
    out = {*said.get("fenced", {}), *said.get("left", {})}
    for name, (version, content, committed) in served.items():
        if committed:
            assert content == contents[version], (name, said)
        if content == "gone":  # killed in the commit, after it had said what it serves, or out
            assert name in out or (role, phase, kind) == ("server", "commit", "killed"), said
        elif name in new:
            assert (version, committed) == (servers.version, True), (name, said)
        elif name not in out and result is not None:
            assert (version, committed) == (before, True), (name, said)
    struck = servers.actors["r1" if role in ("receiver", "server") else role]
    if struck.is_alive():
        struck.go_on()
        assert not struck.ask("armed")
    spoilt = kind == "corrupting" and (role == "receiver" or (role == "sender" and phase in PHASES[:3]))
    killed = kind == "killed" and (role == "receiver" or (role == "server" and phase != "commit"))
    if kind == "slow":
        assert sorted(new) == ["r0", "r1"], said
    if spoilt or killed:
        assert "r1" not in new, said
    heal(servers, out, served)
    servers.good_sync()


def heal(servers, out, served):
    """Start anew who was left behind, with a server of its own, and whoever is dead."""
    for name in servers.receivers:
        if name in out or served.get(name, ("",) * 3)[1] == "gone":
            servers.kill(name)
    servers.heal()
