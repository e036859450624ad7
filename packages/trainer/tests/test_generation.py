"""Groups from a real (scripted) engine: order, one seed per completion, ids that never meet."""

import asyncio

import pytest

from offbeat_rollout import RolloutConfig, SamplingParams
from offbeat_rollout.testing import ScriptedRollout
from offbeat_trainer.generation import GroupGenerator
from offbeat_trainer.seeds import derive_seed
from offbeat_trainer.types import Prompt

SAMPLING = SamplingParams(max_tokens=6, seed=11)


def prompts(*uids):
    return [Prompt(uid=uid, text=uid, token_ids=(1, 2, 3)) for uid in uids]


def tokens(groups):
    return {group.prompt.uid: [one.token_ids for one in group.completions] for group in groups}


@pytest.fixture
async def engine():
    engine = ScriptedRollout(RolloutConfig(model_path="", max_model_len=32), token_s=0.0001)
    await engine.start()
    yield engine
    await engine.stop()


async def test_groups_come_in_the_order_of_the_prompts_and_know_them(engine):
    asked = prompts("b", "a", "c")
    groups = await GroupGenerator(engine.generate_many).collect(asked, SAMPLING, 4)
    assert [group.prompt for group in groups] == asked
    assert [len(group.completions) for group in groups] == [4, 4, 4]
    assert all(not group.scores and not group.advantages for group in groups)
    for group in groups:
        assert [one.request_id.partition("/")[2] for one in group.completions] == [
            f"{index}/{group.prompt.uid}" for index in range(4)
        ]


async def test_a_completion_depends_on_its_seed_uid_and_place_and_not_on_the_batch(engine):
    generator = GroupGenerator(engine.generate_many)
    whole = tokens(await generator.collect(prompts("a", "b", "c"), SAMPLING, 3))
    assert len({one for some in whole.values() for one in some}) == 9
    alone = tokens(await generator.collect(prompts("b"), SAMPLING, 3))
    other_way = tokens(await GroupGenerator(engine.generate_many).collect(prompts("c", "b"), SAMPLING, 2))
    assert alone["b"] == whole["b"]
    assert other_way["b"] == whole["b"][:2]
    assert other_way["c"] == whole["c"][:2]
    again = tokens(await generator.collect(prompts("b"), SamplingParams(max_tokens=6, seed=12), 3))
    assert not set(again["b"]) & set(whole["b"])


async def test_what_the_engine_is_asked(engine):
    seen = []

    async def listening(requests):
        seen.extend(requests)
        return await engine.generate_many(requests)

    await GroupGenerator(listening).collect(prompts("a", "b"), SAMPLING, 2)
    assert [request.sampling.seed for request in seen] == [
        derive_seed(11, uid, index) for uid in "ab" for index in range(2)
    ]
    seen.clear()
    await GroupGenerator(listening).collect(prompts("a"), SamplingParams(max_tokens=2), 2)
    assert [request.sampling.seed for request in seen] == [None, None]


async def test_two_calls_at_once_for_the_same_prompt_do_not_meet(engine):
    generator = GroupGenerator(engine.generate_many)
    both = await asyncio.gather(*(generator.collect(prompts("a"), SAMPLING, 2) for _ in range(2)))
    assert tokens(both[0]) == tokens(both[1])
