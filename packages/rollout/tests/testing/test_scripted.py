from __future__ import annotations

import asyncio

import pytest

from offbeat_rollout import Finish, GenerateRequest, PauseMode, RolloutConfig, SamplingParams, UpdateRefused
from offbeat_rollout.testing import ScriptedRollout, wait_for_tokens


def request(name, prompt, **sampling):
    return GenerateRequest(
        request_id=name, prompt_ids=prompt, sampling=SamplingParams(max_tokens=50, **sampling)
    )


async def test_it_says_its_script_and_stamps_the_version_of_the_moment():
    lines = {(1,): [10, 11, 12], (2,): list(range(40))}
    engine = ScriptedRollout(
        RolloutConfig(model_path=""),
        lambda asked: lines[asked.prompt_ids],
        token_s=0.005,
        specs=[("w", (2,), "float32")],
    )
    await engine.start()
    short = await engine.generate(request("a", (1,), stop_token_ids=(11,)))
    assert (short.token_ids.tolist(), short.finish) == ([10, 11], Finish.STOP)
    whole = await engine.generate(request("b", (1,)))
    assert (whole.token_ids.tolist(), whole.finish) == ([10, 11, 12], Finish.LENGTH)
    running = asyncio.create_task(engine.generate(request("c", (2,))))
    await asyncio.sleep(0.05)
    with pytest.raises(UpdateRefused, match="unknown or missing: v, w"):
        await engine.load([("v", None)], 1)
    await engine.load([("w", None)], 1)
    done = await running
    assert set(done.policy_versions) == {0, 1}
    assert list(done.policy_versions) == sorted(done.policy_versions)
    await engine.stop()


async def test_a_wait_whose_caller_has_gone_keeps_nobody_waiting():
    engine = ScriptedRollout(RolloutConfig(model_path=""), lambda asked: range(50))
    await engine.start()
    long = asyncio.create_task(engine.generate(request("long", (1,))))
    await wait_for_tokens(engine)
    pause = asyncio.create_task(engine.pause(PauseMode.WAIT))
    await asyncio.sleep(0)
    pause.cancel()
    await asyncio.gather(pause, return_exceptions=True)
    async with asyncio.timeout(20):
        assert (await engine.generate(request("next", (2,)))).num_tokens == 50
    assert (await long).num_tokens == 50
    await engine.stop()
