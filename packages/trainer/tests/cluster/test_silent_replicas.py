"""A replica that is stopped in a run: the others take the new weights, it comes back or is replaced."""

import asyncio
import os
import signal

import pytest

from offbeat_ckptsync import SyncConfig
from sync_faults.hurt import content_of, weights_of

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TIMEOUT_S = 600.0
PHASES = ("begin", "transfer", "verify", "flip", "commit")


async def test_a_replica_that_is_stopped_holds_up_nobody_and_comes_back_or_is_replaced(
    tmp_path, ray_environment, until, pid_of
):
    """SIGSTOP: not dead, but silent; the others get the new version after the deadline of the phase."""
    from sync_faults.over_ray import Site

    sync = SyncConfig(
        bucket_mib=1 / 16, **{f"{phase}_timeout_s": 3.0 if phase == "begin" else 60.0 for phase in PHASES}
    )
    async with Site.opened(tmp_path, sync, health_period_s=60.0, health_timeout_s=60.0) as site:
        rollout = site.cluster.rollout
        assert sorted(await site.publish()) == ["replica 0", "replica 1"]
        handle = rollout.handles["replica 1"]
        pid = await pid_of(handle)
        os.kill(pid, signal.SIGSTOP)
        for counted in (1, 0):  # the second without any wait: it is no member any more
            assert await asyncio.wait_for(site.publish(), TIMEOUT_S) == ["replica 0"]
            assert (len(site.report.failures), len(site.report.fenced)) == (counted, counted)
        assert rollout.serving == {"replica 0": site.version}
        assert rollout.lost["replica 1"].startswith("begin: took longer than 3 s")
        os.kill(pid, signal.SIGCONT)
        both = {"replica 0": site.version, "replica 1": site.version}
        await until(lambda: rollout.serving == both, "the stopped replica to catch up")
        assert rollout.handles["replica 1"] is handle, "it is the process that was stopped"
        good = (site.version, content_of(weights_of(site.version)), True)
        assert await site.held() == {"replica 0": good, "replica 1": good}

        os.kill(pid, signal.SIGSTOP)
        copied = []  # training may have gone on by then: it is the run that tries again
        assert await asyncio.wait_for(site.publish(lambda: copied.append(1)), TIMEOUT_S) == ["replica 0"]
        assert ["begin: replica 1 took longer than 3 s" in why for why in site.report.failures] == [True]
        assert site.report.fenced.keys() == {"replica 1"}
        os.kill(pid, signal.SIGKILL)
        both = {"replica 0": site.version, "replica 1": site.version}
        await until(lambda: rollout.serving == both, "a new process to be started in its place")
        assert rollout.handles["replica 1"] is not handle
        assert sorted(await site.publish()) == ["replica 0", "replica 1"]

        for handle in list(rollout.handles.values()):
            os.kill(await pid_of(handle), signal.SIGKILL)
        assert await asyncio.wait_for(site.publish(), TIMEOUT_S), "one that was started in their place"
        assert site.report.failures, "the try that met nobody alive"
        names = [why.split(": ")[0] for why in site.cluster.timeline.lost]
        assert sorted(names) == ["replica 0", "replica 1", "replica 1", "replica 1"]
