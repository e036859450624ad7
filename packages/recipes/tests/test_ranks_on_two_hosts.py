"""Training ranks on two hosts, whose names lead nowhere, meet at an address and exchange tensors and control messages."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sync_faults.hosts import lacking, two_hosts

pytestmark = [pytest.mark.spawns, pytest.mark.slow]

WAIT_S = 600.0
RANK = """
import json, sys
import torch
import torch.distributed as dist
from offbeat_engine import World
from offbeat_engine.toolkit.collectives import gather_ints

rank = int(sys.argv[1])
world = World.join(rank=rank, size=2, store_address=sys.argv[2], timeout_s=float(sys.argv[3]))
total = torch.tensor([10.0**rank])
dist.all_reduce(total)
pair = torch.tensor([100.0**rank])
dist.all_reduce(pair, group=world.split(2, 600.0).group)
print(json.dumps([gather_ints(world, rank, 10 + rank), total.item(), pair.item()]))
world.leave()
"""


def test_ranks_on_two_hosts_reach_each_other_by_the_address_at_which_they_meet(tmp_path):
    if why := lacking(tmp_path / "trial"):
        pytest.skip(why)
    with two_hosts(tmp_path / "two") as hosts:
        words = [f"{hosts[0].address}:29500", str(WAIT_S)]
        ranks = [
            host.start(sys.executable, "-c", RANK, str(rank), *words, stdout=subprocess.PIPE)
            for rank, host in enumerate(hosts)
        ]
        told = [rank.communicate(timeout=WAIT_S)[0] for rank in ranks]
    assert [json.loads(each) for each in told] == [[[[0, 10], [1, 11]], 11.0, 101.0]] * 2
