from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from offbeat_trainer.cluster.placement import PlacementGroups, even_shares, meeting_host
from offbeat_trainer.cluster.train_group import TrainGroup, TrainWorker
from offbeat_trainer.errors import PlanRefused

HERE, FAR = "10.0.0.1", "10.0.0.2"


@pytest.mark.parametrize(
    ("setting", "others", "host"),
    [
        ("", {}, "127.0.0.1"),
        ("", {"replica 0": HERE, "replica 1": HERE}, "127.0.0.1"),
        ("", {"replica 0": HERE, "replica 1": FAR}, HERE),
        ("192.168.0.1", {"replica 0": FAR}, "192.168.0.1"),
        ("192.168.0.1", {"replica 0": HERE}, "192.168.0.1"),
        ("127.0.0.1", {"replica 0": HERE}, "127.0.0.1"),
    ],
)
def test_processes_meet_on_loopback_while_all_are_on_one_machine(setting, others, host):
    assert meeting_host(setting, HERE, others) == host


@pytest.mark.parametrize("setting", ["127.0.0.1", "localhost", "::1", "127.0.1.1", "0.0.0.0"])
def test_loopback_is_refused_with_the_remedy_where_somebody_is_elsewhere(setting):
    told = (
        f"cluster.rendezvous_host={setting} is loopback, but replica 3 is on another machine .*leave it empty"
    )
    with pytest.raises(PlanRefused, match=told):
        meeting_host(setting, HERE, {"replica 0": HERE, "replica 3": FAR})


def test_an_address_of_another_machine_is_refused(monkeypatch):
    monkeypatch.setattr("offbeat_trainer.cluster.train_group.this_node", lambda: HERE)
    worker = TrainWorker.__new__(TrainWorker)
    with pytest.raises(
        PlanRefused, match=rf"192\.0\.2\.1 is no address of training rank 0's machine, {HERE}"
    ):
        worker.address("192.0.2.1")  # of the block that is nobody's (RFC 5737)
    host, port = worker.address("127.0.0.1").split(":")
    assert (host, int(port) > 0) == ("127.0.0.1", True)


MEET = """
import socket, sys
from torch import distributed as dist
from offbeat_engine import World
from offbeat_trainer.cluster.train_group import TrainWorker

worker = TrainWorker.__new__(TrainWorker)
address = worker.address("127.0.0.1")
try:
    socket.create_server(("127.0.0.1", int(address.rpartition(":")[2])))
except OSError:
    print("held", address, flush=True)
world = World.join(rank=0, size=2, store_address=address, timeout_s=600.0)
print(world.size, flush=True)
dist.barrier()  # who leaves first breaks off what the other has not ended
world.leave()
"""
JOIN = """
import sys
from torch import distributed as dist
from offbeat_engine import World
world = World.join(rank=1, size=2, store_address=sys.argv[1], timeout_s=600.0)
dist.barrier()
world.leave()
"""


@pytest.mark.spawns
def test_rank_0_holds_its_port_until_the_ranks_have_met():
    first = subprocess.Popen([sys.executable, "-c", MEET], stdout=subprocess.PIPE, text=True)
    held, address = first.stdout.readline().split()
    assert held == "held"
    subprocess.run([sys.executable, "-c", JOIN, address], timeout=600, check=True)
    said, _ = first.communicate(timeout=600)
    assert (first.returncode, said) == (0, "2\n")


@pytest.mark.parametrize(
    ("places", "taken", "threads"),
    [
        ([HERE], 0, [4]),
        ([HERE, HERE], 0, [2, 2]),
        ([FAR, FAR, HERE], 0, [48, 48, 4]),  # each by its own machine, not the driver's
        ([FAR, HERE], 2, [94, 2]),
        ([HERE] * 9, 0, [1] * 9),
        (["10.0.0.3"], 0, [1]),  # one that Ray does not know
    ],
)
def test_processes_share_the_cores_of_the_machines_that_they_are_on(places, taken, threads):
    assert even_shares(places, {HERE: 4, FAR: 96}, taken=taken) == threads


def test_a_replica_beside_its_ranks_shares_the_cores_of_their_machine(monkeypatch):
    monkeypatch.setattr("offbeat_trainer.cluster.placement.cores_of_machines", lambda: {HERE: 4, FAR: 96})
    placement = PlacementGroups(
        SimpleNamespace(
            train=SimpleNamespace(num_ranks=4),
            rollout=SimpleNamespace(num_replicas=2, rollout=SimpleNamespace(tensor_parallel_size=2)),
        )
    )
    placement.ranks_hold(["0", "1", "0", "1"], [FAR, FAR, HERE, HERE])
    assert [placement.replica_threads(index) for index in (0, 1)] == [48, 2]


class Rank:
    """The handle of a rank that answers `sees` where it is, without Ray."""

    def __init__(self, root):
        self.sees = self
        self._worker, self._root = TrainWorker.__new__(TrainWorker), root

    def options(self, **_):
        return self

    async def remote(self, path):
        return self._worker.sees(path.replace("/own/", f"/{self._root}/"))


async def test_a_rank_that_does_not_see_the_driver_s_run_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("offbeat_trainer.cluster.train_group.this_node", lambda: HERE)
    for name in ("own", "far"):
        (tmp_path / name / "logs").mkdir(parents=True)
    group = TrainGroup.__new__(TrainGroup)
    group._spec = SimpleNamespace(
        log_dir=str(tmp_path / "own" / "logs"),
        cluster=SimpleNamespace(start_timeout_s=60.0),
        train=SimpleNamespace(num_ranks=2),
    )
    group._names, group._nodes = ["training rank 0", "training rank 1"], [HERE, FAR]
    group._workers = [Rank("own"), Rank("own")]
    await group._require_run_folder()
    group._workers = [Rank("own"), Rank("far")]
    with pytest.raises(
        PlanRefused, match=rf"training rank 1 runs on {FAR} and does not see the run folder .*{HERE}"
    ):
        await group._require_run_folder()
    assert [*(tmp_path / "own" / "logs").iterdir()] == []
