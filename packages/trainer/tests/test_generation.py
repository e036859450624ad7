"""Groups from a real (scripted) engine: order, one seed per completion, ids that never meet."""

import asyncio

import pytest

from offbeat_rollout import Completion, Finish, RolloutConfig, SamplingParams
from offbeat_rollout.testing import ScriptedRollout
from offbeat_trainer.data.types import UNSCORED, Group, Prompt, Score, Trajectory
from offbeat_trainer.errors import GroupFailed, PlanRefused, RewardFailed
from offbeat_trainer.rollouts.single import GroupGenerator, derive_seed, run_all

SAMPLING = SamplingParams(max_tokens=6, seed=11)


def prompts(*uids):
    return [Prompt(uid=uid, text=uid, token_ids=(1, 2, 3)) for uid in uids]


def tokens(groups):
    return {
        group.prompt.uid: [tuple(one.token_ids.tolist()) for one in group.trajectories] for group in groups
    }


async def collect(generator, asked, sampling, n):
    return await asyncio.gather(*(generator.complete(prompt, sampling, n) for prompt in asked))


@pytest.fixture
async def engine():
    engine = ScriptedRollout(RolloutConfig(model_path="", max_model_len=32), token_s=0.0001)
    await engine.start()
    yield engine
    await engine.stop()


async def test_groups_come_in_the_order_of_the_prompts_and_know_them(engine):
    asked = prompts("b", "a", "c")
    groups = await collect(GroupGenerator(engine.generate_many), asked, SAMPLING, 4)
    assert [group.prompt for group in groups] == asked
    assert [len(group.trajectories) for group in groups] == [4, 4, 4]
    assert all(not group.scores for group in groups)
    for group in groups:
        assert [one.completion.request_id.partition("/")[2] for one in group.trajectories] == [
            f"{index}/{group.prompt.uid}" for index in range(4)
        ]


async def test_a_completion_depends_on_its_seed_uid_and_place_and_not_on_the_batch(engine):
    generator = GroupGenerator(engine.generate_many)
    whole = tokens(await collect(generator, prompts("a", "b", "c"), SAMPLING, 3))
    assert len({one for some in whole.values() for one in some}) == 9
    alone = tokens(await collect(generator, prompts("b"), SAMPLING, 3))
    other_way = tokens(await collect(GroupGenerator(engine.generate_many), prompts("c", "b"), SAMPLING, 2))
    assert alone["b"] == whole["b"]
    assert other_way["b"] == whole["b"][:2]
    assert other_way["c"] == whole["c"][:2]
    again = tokens(await collect(generator, prompts("b"), SamplingParams(max_tokens=6, seed=12), 3))
    assert not set(again["b"]) & set(whole["b"])


async def test_what_the_engine_is_asked(engine):
    seen = []

    async def listening(requests):
        seen.extend(requests)
        return await engine.generate_many(requests)

    await collect(GroupGenerator(listening), prompts("a", "b"), SAMPLING, 2)
    assert [request.sampling.seed for request in seen] == [
        derive_seed(11, uid, index) for uid in "ab" for index in range(2)
    ]
    seen.clear()
    await collect(GroupGenerator(listening), prompts("a"), SamplingParams(max_tokens=2), 2)
    assert [request.sampling.seed for request in seen] == [None, None]


async def test_two_calls_at_once_for_the_same_prompt_do_not_meet(engine):
    generator = GroupGenerator(engine.generate_many)
    both = await asyncio.gather(*(collect(generator, prompts("a"), SAMPLING, 2) for _ in range(2)))
    assert tokens(both[0]) == tokens(both[1])


async def scripted_engine():
    engine = ScriptedRollout(RolloutConfig(model_path="none", max_model_len=64), token_s=0.001)
    await engine.start()
    return engine


async def test_an_interrupted_group_is_continued_from_its_tokens():
    engine = await scripted_engine()
    generator = GroupGenerator(engine.generate_many, engine.abort)
    sampling = SamplingParams(max_tokens=40, seed=3)
    prompt = Prompt(uid="p", text="", token_ids=(1, 2))
    kept = []
    making = asyncio.create_task(generator.complete(prompt, sampling, 2, keep=kept.append))
    while engine._running == {} or min(len(r.versions) for r in engine._running.values()) < 3:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await generator.interrupt()
    while not kept:  # noqa: ASYNC110 - the engine tells nobody
        await asyncio.sleep(0.001)
    assert all(3 <= one.num_tokens < 40 and one.finish is Finish.ABORT for one in kept[0])
    await asyncio.sleep(0.05)
    assert engine._running == {}, "it waits for `go_on`"
    await engine.load([], 5)
    generator.go_on()
    group = await making
    for before, whole in zip(kept[0], group.trajectories, strict=True):
        done = before.num_tokens
        assert whole.finish is Finish.LENGTH
        assert (whole.token_ids[:done].tolist(), whole.logprobs[:done].tolist()) == (
            before.token_ids.tolist(),
            before.logprobs.tolist(),
        )
        assert whole.policy_versions.tolist() == [0] * done + [5] * (40 - done)
    begun = await generator.complete(prompt, sampling, 2, begun=kept[0])
    assert [one.token_ids.tolist() for one in begun.trajectories] == [
        one.token_ids.tolist() for one in group.trajectories
    ]
    fresh = await generator.complete(prompt, sampling, 2)
    assert fresh.trajectories[0].token_ids.tolist() != group.trajectories[0].token_ids.tolist(), (
        "no random number is used twice"
    )
    await engine.stop()


async def test_whole_completions_of_a_half_finished_group_are_left_alone():
    asked = []

    async def generate_many(requests):
        asked.extend(requests)
        return [
            Completion.of(
                request_id=r.request_id, token_ids=(9,), logprobs=(-1.0,), policy_versions=(2,), finish=Finish.STOP
            )
            for r in requests
        ]  # fmt: skip

    def begun(finish, *tokens):
        return Trajectory.of(Completion.of(
            request_id="old", token_ids=tokens, logprobs=(-0.5,) * len(tokens), policy_versions=(1,) * len(tokens),
            finish=finish,
        ))  # fmt: skip

    have = (begun(Finish.STOP, 5), begun(Finish.ABORT, 6, 7), begun(Finish.ABORT))
    sampling = SamplingParams(max_tokens=10, seed=1)
    prompt = Prompt(uid="p", text="", token_ids=(1, 2))
    group = await GroupGenerator(generate_many).complete(prompt, sampling, 3, begun=have)
    assert [one.token_ids.tolist() for one in group.trajectories] == [[5], [6, 7, 9], [9]]
    assert [one.policy_versions.tolist() for one in group.trajectories] == [[1], [1, 1, 2], [2]]
    assert [(r.prompt_ids, r.sampling.max_tokens) for r in asked] == [((1, 2, 6, 7), 8), ((1, 2), 10)]
    assert {r.session for r in asked} == {"p"}, "a continuation belongs where its prompt has been computed"


@pytest.mark.parametrize(
    ("tokens", "finish"), [((4, 0), Finish.STOP), ((4, 5, 6), Finish.LENGTH)], ids=["stop token", "limit"]
)
async def test_an_abort_that_came_after_the_last_token_changes_nothing(tokens, finish):
    async def generate_many(requests):
        return [
            Completion.of(
                request_id=r.request_id, token_ids=tokens, logprobs=(-1.0,) * len(tokens),
                policy_versions=(1,) * len(tokens), finish=Finish.ABORT,
            )
            for r in requests
        ]  # fmt: skip

    sampling = SamplingParams(max_tokens=3, seed=1, stop_token_ids=(0,))
    prompt = Prompt(uid="p", text="", token_ids=(1, 2))
    group = await GroupGenerator(generate_many).complete(prompt, sampling, 1)
    assert group.trajectories[0].finish is finish


async def test_without_a_way_to_abort_an_interruption_is_refused():
    with pytest.raises(PlanRefused, match="partial: keep"):
        await GroupGenerator(None).interrupt()


async def test_what_no_group_got_a_score_for_is_counted_by_reason(caplog):
    half = Group(
        prompt=Prompt(uid="half", text="", token_ids=(1,)),
        trajectories=("left", "out"),
        scores=(Score(reward=1.0), UNSCORED),
    )
    good = half.scored
    assert (good.trajectories, good.scored) == (("left",), good)

    class Scored:
        async def run(self, prompt, sampling, n):
            assert (sampling, n) == (SAMPLING, 2)
            if prompt.uid == "half":
                return half
            if prompt.uid == "good":
                return good
            if prompt.uid == "another":
                raise OSError("another")
            raise RewardFailed("timed out" if prompt.uid == "c" else "raised", f"no reward for {prompt.uid}")

    told = []

    async def groups_of(*uids):
        return await run_all(Scored(), prompts(*uids), SAMPLING, 2, lambda *counts: told.append(counts))

    said = r"\(reward raised: 2, reward timed out: 1\); the first: no reward for a"
    with pytest.raises(GroupFailed, match=rf"3 of 3 groups have no score {said}"):
        await groups_of("a", "b", "c")
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert await groups_of("good", "a", "b", "c", "half") == [good, good]
    assert "3 of 5 groups have no score (reward raised: 2, reward timed out: 1)" in caplog.text
    with pytest.raises(OSError, match="another"):
        await groups_of("good", "a", "another")
