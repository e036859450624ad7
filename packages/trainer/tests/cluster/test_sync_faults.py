"""The faults of ckptsync's matrix over the carrier that a run uses: Ray's processes, calls and replacements, as they are.

Whoever fails, wherever, however: a replica has traffic only under a version whose weights it holds bit for bit, committed; and
the next version reaches everybody.
"""

import asyncio
import itertools
import json
import os
import signal

import pytest

from offbeat_ckptsync import SyncConfig
from sync_faults.actors import bent
from sync_faults.hurt import SLOW_S, content_of, weights_of

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TIMEOUT_S = 600.0
DEADLINE_S = 20.0  # of a phase: what one that hangs costs
PHASES = ("begin", "transfer", "verify", "flip", "commit")
KINDS = ("killed", "hung", "slow", "corrupting")
CASES = [*itertools.product(("sender", "receiver"), PHASES, KINDS)]
CASES += [("manager", phase, "corrupting") for phase in PHASES]
USUAL = {
    ("receiver", "transfer", "killed"),
    ("receiver", "flip", "corrupting"),
    ("sender", "transfer", "killed"),
    ("manager", "verify", "corrupting"),
}


class Struck:
    """A run of such processes, and the one of them that is hurt."""

    def __init__(self, site):
        self.site = site
        self.cluster = site.cluster
        self.pid = 0  # of the process that is hung

    async def plant(self, role, phase, kind, pid_of):
        replica = self.cluster.rollout.handles["replica 1"]
        if role == "receiver":
            await replica.arm.remote(phase, kind)
            self.pid = await pid_of(replica)
        elif role == "sender" and (kind == "corrupting" or phase in ("begin", "transfer")):
            await self.site.rank.arm.remote(phase, kind)
            self.pid = await pid_of(self.site.rank)
        else:  # when the second replica is asked to do its part: the first was asked already
            self._strike_when_asked(phase, kind, await pid_of(self.site.rank))

    def _strike_when_asked(self, phase, kind, pid):
        member = self.site.publisher._manager._members["replica 1"]
        call, self.pid = member.call, pid

        async def struck(op, request):
            if op != phase:
                return await call(op, request)
            member.call = call
            if kind == "corrupting":
                return await call(op, json.loads(bent(json.dumps(request))))
            os.kill(pid, signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
            if kind == "slow":
                asyncio.get_running_loop().call_later(SLOW_S, os.kill, pid, signal.SIGCONT)
            return await call(op, request)

        member.call = struck

    async def heal(self, role, kind):
        """Let a sender that was hung go on, and start one anew that is dead; replicas are replaced by the run itself."""
        if role == "sender" and kind == "hung":
            os.kill(self.pid, signal.SIGCONT)
        if role == "sender" and kind == "killed":
            await self.site.new_rank()

    async def check(self, told):
        """Whoever has traffic holds what its version is, committed; and those who are `told` hold the last version."""
        serving = self.cluster.rollout.serving
        for name, held in (await asyncio.wait_for(self.site.held(), TIMEOUT_S)).items():
            if name in serving:
                assert held == (serving[name], content_of(weights_of(serving[name])), True), name
        here = [name for name in told if name in serving]
        assert {name: serving[name] for name in here} == dict.fromkeys(here, self.site.version)


@pytest.fixture(scope="module")
async def struck(tmp_path_factory, ray_environment):
    from sync_faults.over_ray import Site

    sync = SyncConfig(
        bucket_mib=1 / 16, canary=True, **{f"{phase}_timeout_s": DEADLINE_S for phase in PHASES}
    )
    folder = tmp_path_factory.mktemp("faults")
    async with Site.opened(folder, sync, health_period_s=1.0, health_timeout_s=10.0) as site:
        yield Struck(site)


@pytest.mark.parametrize(
    ("role", "phase", "kind"),
    [pytest.param(*case, marks=() if case in USUAL else pytest.mark.deep) for case in CASES],
)
async def test_traffic_goes_to_whole_and_committed_versions_alone(struck, until, pid_of, role, phase, kind):
    site = struck.site
    if site.version == 0:
        assert sorted(await site.publish()) == ["replica 0", "replica 1"]
    before = site.version
    await struck.plant(role, phase, kind, pid_of)
    told = await asyncio.wait_for(site.publish(), TIMEOUT_S)
    assert site.version == (before + 1 if told else before)
    if kind == "slow":
        assert sorted(told) == ["replica 0", "replica 1"]
    await struck.check(told)
    await struck.heal(role, kind)
    while site.version < before + 2:
        assert await asyncio.wait_for(site.publish(), TIMEOUT_S), "the sync after a fault failed"
    both = {"replica 0": site.version, "replica 1": site.version}
    await until(
        lambda: site.cluster.rollout.serving == both, "both replicas to serve the version after the fault"
    )
    await struck.check([*both])
