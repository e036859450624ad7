"""Replicas that make a token a second, for longer than any deadline: the run says that it is slow, and goes on."""

import asyncio

import pytest

from offbeat_rollout import Health, ReplicaPool
from offbeat_trainer.config import AsyncConfig, LoopConfig
from offbeat_trainer.errors import DeadlineExceeded
from offbeat_trainer.watch.watchdog import GENERATION, Watchdog
from scripted import ScriptedPool, ScriptedRun

TIMEOUT_S = 5.0
LOOP = LoopConfig(
    steps=2, prompts_per_step=3, group_size=2, validate_every=0, validation_prompts=1, save_every=0, sample_every=0
)  # fmt: skip


class Replica:
    """One of a scripted pool; `moves` says whether its health tells of a token a second."""

    def __init__(self, name, pool, moves):
        self.name, self._pool, self._moves = name, pool, moves

    async def generate_many(self, requests, ended):
        for one in await ScriptedPool.generate_many(self._pool, requests):
            ended(one)

    async def abort(self, request_ids):
        await ScriptedPool.abort(self._pool, request_ids)

    async def health(self):
        made = int(asyncio.get_running_loop().time()) if self._moves else 1
        return Health(ok=True, version=self._pool.version, num_running=1, tokens_made=made)


class Slow(ScriptedPool):
    """Three replicas of a token a second behind a real pool, whose tokens are progress to a watchdog, as in a cluster."""

    def __init__(self, watchdog, *, moves=True):
        super().__init__(pace=lambda request: 1.0)
        self.replicas = ReplicaPool(
            [Replica(name, self, moves) for name in "abc"],
            stall_timeout_s=TIMEOUT_S,
            on_progress=lambda name: watchdog.progress(GENERATION, f"{name} made tokens"),
        )
        for name in "abc":
            self.replicas.admit(name, 1)

    async def generate_many(self, requests):
        return await self.replicas.generate_many(requests)


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
def test_who_makes_a_token_a_second_is_slow_and_no_more(tmp_path, mode):
    watchdog = Watchdog(timeout_s=TIMEOUT_S)
    pool = Slow(watchdog)
    run = ScriptedRun(
        folder=tmp_path, mode=mode, loop=LOOP, asynchrony=AsyncConfig(max_staleness=1), max_tokens=60, pool=pool,
        watchdog=watchdog,
    ).go()  # fmt: skip
    assert run.outcome.steps == LOOP.steps
    assert run.outcome.dropped_groups == {}
    assert {*pool.replicas.versions} == {*"abc"}
    said = [detail for name, detail in run.reporter.phases if name == "generate" and detail]
    assert said
    assert all(
        detail.startswith("slow: the loop waits for generation to give a step's groups, for ")
        for detail in said
    )
    assert "made tokens, " in said[0]


def test_who_makes_none_is_no_progress(tmp_path):
    watchdog = Watchdog(timeout_s=TIMEOUT_S, tell=lambda text: None)
    run = ScriptedRun(
        folder=tmp_path, loop=LOOP, max_tokens=60, pool=Slow(watchdog, moves=False), watchdog=watchdog
    )
    with pytest.raises(DeadlineExceeded, match="nothing has moved for 5 s: the trainer waits for generation"):
        run.go()
