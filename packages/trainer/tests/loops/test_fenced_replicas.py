"""A weight sync that went on without a silent replica: the console says which, the metrics how many."""

from dataclasses import replace

import pytest

from offbeat_trainer.config import AsyncConfig, LoopConfig
from scripted import ScriptedRun

LOOP = LoopConfig(
    steps=3, prompts_per_step=2, group_size=2, validate_every=0, validation_prompts=1, save_every=0, sample_every=0
)  # fmt: skip


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
def test_who_was_fenced_off_is_said_once_and_counted(tmp_path, mode):
    run = ScriptedRun(folder=tmp_path, mode=mode, loop=LOOP, asynchrony=AsyncConfig(max_staleness=1))
    publish = run.publisher.publish

    async def without_one(version, *more):
        report = await publish(version, *more)
        fenced = {"replica 1": "begin: took longer than 3 s"} if version == 3 else {}
        return replace(report, fenced=fenced)

    run.publisher.publish = without_one
    run.go()
    told = [detail for name, detail in run.reporter.phases if name == "fenced"]
    assert told == ["replica 1: begin: took longer than 3 s; version 3 goes on without it"]
    # In asynchronous modes a sync is counted with the step in which it ended.
    counted = [values.get("sync/fenced_members", 0) for _, values in sorted(run.reporter.steps.items())]
    assert sorted(counted) == [0, 0, 1]
