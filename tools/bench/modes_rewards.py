"""What rewards cost a step: 256 completions, each worth 100 ms of sleep, of CPU, or of waiting in a coroutine."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from offbeat_rollout import Completion, Finish
from offbeat_trainer import Group, Prompt, RewardConfig, Trajectory
from offbeat_trainer.rollouts.scorer import FunctionScorer, find_reward

if TYPE_CHECKING:
    from pathlib import Path

GROUPS, GROUP_SIZE = 16, 16
REWARD_S = 0.1
FUNCTIONS = """
import asyncio, time

def sleep(completion):
    time.sleep(REWARD_S)
    return 1.0

def cpu(completion):
    end = time.thread_time() + REWARD_S
    while time.thread_time() < end: pass
    return 1.0

async def coroutine(completion):
    await asyncio.sleep(REWARD_S)
    return 1.0
"""


async def measure(folder: Path, *, smallest: bool = False) -> dict[str, object]:
    """Return the seconds of a step's rewards by kind, with the default settings; the first step apart.

    Processes are there by then, as in a run, where they start while engines load.
    """
    file = folder / "bench_rewards.py"
    file.write_text(FUNCTIONS + f"\nREWARD_S = {0.001 if smallest else REWARD_S}\n")
    answer: dict[str, object] = {}
    for name, key in (("sleep", "sleep"), ("cpu", "cpu"), ("coroutine", "async")):
        reward = find_reward(f"{file}:{name}", 1.0, {})
        scorer = FunctionScorer([reward], RewardConfig(), decode=str, correct_at=1.0)
        try:
            assert not (await scorer.start()).failure
            answer[f"{key}_first_s"] = round(await _step(scorer), 3)
            answer[f"{key}_s"] = round(await _step(scorer), 3)
        finally:
            await scorer.close()
    return answer


async def _step(scorer: FunctionScorer) -> float:
    started = time.perf_counter()
    scored = await asyncio.gather(*(scorer.score(_group(index)) for index in range(GROUPS)))
    assert all(score.reward == 1.0 for group in scored for score in group.scores)
    return time.perf_counter() - started


def _group(index: int) -> Group:
    made = [
        Completion.of(
            request_id=f"{index}/{place}",
            token_ids=[1, 2, 3],
            logprobs=[-1.0] * 3,
            policy_versions=[1] * 3,
            finish=Finish.STOP,
        )
        for place in range(GROUP_SIZE)
    ]
    return Group(
        prompt=Prompt(uid=str(index), text="", token_ids=(1,)), trajectories=tuple(map(Trajectory.of, made))
    )
