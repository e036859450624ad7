"""Whoever fails, wherever, however: the new version is served, or the old one bit for bit, and the next sync is good."""

from __future__ import annotations

import itertools
import os
import re
import signal
from dataclasses import dataclass, replace

import pytest

from offbeat_ckptsync.toolkit.config import SyncConfig
from sync_faults.hurt import content_of, weights_of
from sync_faults.processes import FaultProcesses

pytestmark = pytest.mark.spawns

PHASES = ("begin", "transfer", "verify", "flip", "commit")
KINDS = ("killed", "hung", "slow", "corrupting")
ROLES = ("sender", "receiver", "manager")
SHORT_S = 2.0  # the deadline of a phase in which somebody hangs, a hundred times what the others need for it
LOST_S = (
    5.0  # where nothing but the deadline says that somebody is lost: in a broadcast, and after the transfer
)
BOUND_S = 600.0  # far beyond the sum of all deadlines in play: only what is stuck for good reaches it

CONFIG = {
    transport: SyncConfig(
        transport=transport,
        bucket_mib=64 / 1024,
        begin_timeout_s=120.0,
        transfer_timeout_s=LOST_S if transport == "broadcast" else 120.0,
        verify_timeout_s=120.0,
        flip_timeout_s=120.0,
        commit_timeout_s=120.0,
    )
    for transport in ("shm", "broadcast")
}
# By one receiver, as two GPUs have room for, and by two. Forming a group of NCCL's takes seconds, the first time.
CONFIG["broadcast to one"] = CONFIG["broadcast"]
CONFIG["nccl"] = CONFIG["nccl to one"] = replace(CONFIG["broadcast"], device="cuda", transfer_timeout_s=30.0)
CONFIG["cuda_ipc"] = replace(CONFIG["shm"], transport="cuda_ipc", device="cuda")
GPUS = {"cuda_ipc": 1, "nccl to one": 2, "nccl": 3}


def receivers_of(transport):
    return ("r1",) if transport.endswith(" to one") else ("r0", "r1")


@dataclass(frozen=True)
class Outcome:
    """What is to come of a fault: who serves the new version, and what the error, or the reason of a fence, says."""

    new: tuple[str, ...] = ("r0", "r1")
    says: str = ""


WHOLE = Outcome()
ALONE = Outcome(new=("r0",))


def old(says):
    return Outcome(new=(), says=says)


def alone(says):
    return Outcome(new=("r0",), says=says)


# Before the flip everybody keeps the old version; who is dead, or alone is silent, does not fail the others.
EXPECTED = {
    ("sender", "begin", "killed"): old("begin: source: .*hung up or died"),
    ("sender", "begin", "hung"): old("begin: source took longer"),
    ("sender", "begin", "corrupting"): old("begin: r[01]: .*manifest says digest"),
    ("sender", "transfer", "killed"): old("transfer: .*(source: .*hung up or died|no word from source)"),
    ("sender", "transfer", "hung"): old("transfer: source.* took longer"),
    ("sender", "transfer", "corrupting"): old("verify: rank 0 of r[01]: bucket 2 of .* holds layer"),
    ("sender", "verify", "corrupting"): old("verify: rank 0 of r[01]: bucket 1 of .* holds layer"),
    ("receiver", "begin", "killed"): alone("begin: r1: .*hung up or died"),
    ("receiver", "begin", "hung"): alone("begin: (r1 )?took longer"),
    ("receiver", "begin", "corrupting"): old("begin: r1: .*manifest says digest"),
    ("receiver", "transfer", "killed"): alone("transfer: .*(r1: .*hung up or died|no word from .*r1)"),
    ("receiver", "transfer", "hung"): alone("transfer: .*(took longer|gave no word)"),
    ("receiver", "transfer", "corrupting"): old("verify: rank 0 of r1: bucket 2 of .* holds layer"),
    ("receiver", "verify", "killed"): alone("verify: r1: .*hung up or died"),
    ("receiver", "verify", "hung"): alone("verify: (r1 )?took longer"),
    ("receiver", "verify", "corrupting"): old("verify: r1: .*rank 0 of r1: bucket 1 of"),
    ("receiver", "flip", "killed"): alone("flip: .*hung up or died"),
    ("receiver", "flip", "hung"): alone("flip: took longer"),
    ("receiver", "flip", "corrupting"): alone("commit: canary: answers 1 away"),
    ("receiver", "commit", "killed"): alone("commit: .*hung up or died"),
    ("receiver", "commit", "hung"): alone("commit: took longer"),
    ("receiver", "commit", "corrupting"): alone("commit: r1 committed version .* instead of"),
    ("manager", "begin", "corrupting"): old("begin: r1: .*manifest says digest"),
    ("manager", "transfer", "corrupting"): old("transfer: r1: .*no open sync"),
    ("manager", "verify", "corrupting"): old("verify: r1: .*no open sync"),
    ("manager", "flip", "corrupting"): alone("flip: .*no open sync"),
    ("manager", "commit", "corrupting"): alone("commit: .*was asked to commit"),
}


@pytest.fixture(scope="module")
def clusters():
    made = {}

    def get(transport):
        if transport not in made:
            made[transport] = FaultProcesses(CONFIG[transport], receivers=receivers_of(transport))
        made[transport].heal()  # after a case that failed
        return made[transport]

    yield get
    for cluster in made.values():
        cluster.close()


def good_sync(cluster):
    """Sync the next version; all receivers serve it bit for bit, and committed."""
    cluster.version += 1
    cluster.sender.ask("weights", cluster.version)
    result = cluster.manager.ask("sync", cluster.version, {})
    assert tuple(sorted(result.get("members", []))) == cluster.receivers, result
    assert result["fenced"] == result["left"] == {}, result
    good = [cluster.version, content_of(weights_of(cluster.version)), True, "idle"]
    assert cluster.serving() == dict.fromkeys(cluster.receivers, good)
    return result


def plant(cluster, role, phase, kind):
    """Plant a fault; return what the manager is to be asked."""
    idle_sender = role == "sender" and phase in ("verify", "flip", "commit") and kind != "corrupting"
    if idle_sender:  # it has nothing to do there, so it is struck from outside
        cluster.manager.ask("strike", phase, kind, cluster.sender.pid)
    else:
        cluster.actors["r1" if role == "receiver" else role].ask("arm", phase, kind)
    if kind != "hung" or role == "manager":
        return {}
    # A sender that hangs after the transfer is waited for once: by the canary.
    return {f"{'commit' if idle_sender else phase}_timeout_s": LOST_S if idle_sender else SHORT_S}


def run_faulty_sync(cluster, role, phase, kind):
    """Return what the manager said, or None where it cannot say anything any more."""
    deadlines = plant(cluster, role, phase, kind)
    cluster.version += 1
    cluster.sender.ask("weights", cluster.version)
    cluster.manager.tell("sync", cluster.version, deadlines)
    if role == "manager" and kind in ("killed", "hung"):
        if kind == "hung":
            cluster.manager.wait_stopped(BOUND_S)
        else:
            with pytest.raises(EOFError):
                cluster.manager.answer(BOUND_S)
        served = cluster.serving()
        cluster.kill("manager")  # it is as good as dead
        return None, served
    result = cluster.manager.answer(BOUND_S)
    if kind == "killed":
        cluster.actors["r1" if role == "receiver" else role].process.join(60)
    return result, cluster.serving()


def usual(transport, role, phase, kind):
    """Say whether the usual tier has this case: every role in every phase, and with every kind, but not all three."""
    place = ROLES.index(role) + KINDS.index(kind) + PHASES.index(phase)
    return place % (2 if transport == "shm" else 3) == 0


CASES = [("shm", *case) for case in itertools.product(ROLES, PHASES, KINDS)]
CASES += [
    (transport, role, "transfer", kind)
    for transport, role, kind in itertools.product(("broadcast", "broadcast to one", *GPUS), ROLES, KINDS)
]
USUAL = {case for case in CASES if usual(*case)}


def test_the_usual_cases_have_every_role_in_every_phase_and_with_every_kind():
    of_shm = {case for case in USUAL if case[0] == "shm"}
    assert {(role, phase) for _, role, phase, _ in of_shm} == {*itertools.product(ROLES, PHASES)}
    assert {(role, kind) for _, role, _, kind in of_shm} == {*itertools.product(ROLES, KINDS)}
    of_broadcast = {case for case in USUAL if case[0] == "broadcast"}
    assert {role for _, role, *_ in of_broadcast} == {*ROLES}
    assert {kind for *_, kind in of_broadcast} == {*KINDS}


def marks(case):
    """Leave to the deep tier what is not usual; what needs GPUs is skipped where they are not."""
    transport = case[0]
    if transport in GPUS:
        return [pytest.mark.gpu(GPUS[transport])]
    return [] if case in USUAL and transport != "broadcast to one" else [pytest.mark.deep]


CASES = [pytest.param(*case, marks=marks(case)) for case in CASES]


@pytest.mark.parametrize(("transport", "role", "phase", "kind"), CASES)
def test_new_everywhere_or_old_bit_for_bit(clusters, transport, role, phase, kind):
    cluster = clusters(transport)
    before, new = cluster.version, cluster.version + 1
    if before == 0:
        good_sync(cluster)
        before, new = 1, 2
    result, served = run_faulty_sync(cluster, role, phase, kind)
    contents = {version: content_of(weights_of(version)) for version in (before, new)}
    if result is None:
        assert served.keys() == {*cluster.receivers}
        check_without_manager(phase, served, contents, new)
    else:
        outcome = EXPECTED.get((role, phase, kind), WHOLE)
        there = tuple(name for name in outcome.new if name in cluster.receivers)
        check(result, served, contents, new, replace(outcome, new=there))
    cluster.heal()
    good_sync(cluster)


@pytest.mark.parametrize("phase", ["begin", "transfer", "verify"])
def test_where_the_settings_say_so_one_that_is_stopped_fails_the_sync_for_all(clusters, phase):
    cluster = clusters("shm")
    good_sync(cluster)
    cluster.actors["r1"].ask("arm", phase, "hung")
    cluster.version += 1
    cluster.sender.ask("weights", cluster.version)
    result = cluster.manager.ask(
        "sync", cluster.version, {f"{phase}_timeout_s": SHORT_S, "silent": "fail"}, timeout_s=BOUND_S
    )
    assert f"{phase}: r1 took longer" in result["error"]
    cluster.actors["r1"].wait_stopped(BOUND_S)
    old_one = [cluster.version - 1, content_of(weights_of(cluster.version - 1)), True]
    assert {name: held[:3] for name, held in cluster.serving().items()} == dict.fromkeys(
        ("r0", "r1"), old_one
    )
    good_sync(cluster)


@pytest.mark.parametrize("transport", ["shm", "broadcast"])
def test_one_that_is_stopped_is_fenced_off_and_catches_up_when_it_goes_on(clusters, transport):
    """SIGSTOP, before anything has begun; the others have two versions without it, the second at once."""
    cluster = clusters(transport)
    good_sync(cluster)
    os.kill(cluster.actors["r1"].pid, signal.SIGSTOP)
    cluster.actors["r1"].wait_stopped(BOUND_S)
    for deadlines, fenced in (({"begin_timeout_s": SHORT_S}, ["r1"]), ({}, [])):
        cluster.version += 1
        cluster.sender.ask("weights", cluster.version)
        result = cluster.manager.ask("sync", cluster.version, deadlines, timeout_s=BOUND_S)
        assert (result["members"], [*result["fenced"]]) == (["r0"], fenced), result
    good = [cluster.version, content_of(weights_of(cluster.version)), True, "idle"]
    assert cluster.actors["r0"].ask("serving") == good
    assert cluster.heal() == [], "it is the process that was stopped, not another one in its place"
    assert cluster.serving() == {"r0": good, "r1": good}
    good_sync(cluster)


def check(result, served, contents, new, outcome):
    assert tuple(sorted(result.get("members", ()))) == outcome.new, result
    told = result.get("error", "") or next(iter({**result["fenced"], **result["left"]}.values()), "")
    assert re.search(outcome.says, told), told
    for name, (version, content, committed, _) in served.items():
        if name in outcome.new:
            assert (version, content, committed) == (new, contents[new], True), (name, result)
        elif not outcome.new:
            assert (version, content, committed) == (new - 1, contents[new - 1], True), (name, result)
        else:  # fenced off: it may hold anything, and no label stands for it, or it has caught up by now
            assert not committed or content == contents[version], (name, result)


def check_without_manager(phase, served, contents, new):
    for name, (version, content, _, state) in served.items():
        if state == "flipping":  # the manager is gone and this one is still at it: it serves nobody
            continue
        assert content == contents[version], f"{name} serves what is not version {version}"
        allowed = (new - 1, new) if phase == "flip" else (new,) if phase == "commit" else (new - 1,)
        assert version in allowed, name
