"""Episodes that clients of others play: what they are answered, what is trained of it, and what becomes of bad ones."""

import asyncio
import itertools
import string
from dataclasses import replace

import anthropic
import httpx
import openai
import pytest

from offbeat_recipes.library.harness import Harness
from offbeat_recipes.tasks.chars import char_tokenizer
from offbeat_recipes.testing import ScriptedReplicas
from offbeat_rollout import SamplingParams
from offbeat_rollout.errors import ReplicaGone
from offbeat_trainer import Prompt, Score
from offbeat_trainer.data.assemble import group_metrics
from offbeat_trainer.data.metrics import reduce_metrics
from offbeat_trainer.errors import EnvironmentFailed

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}~{% else %}[{{ m.role }}]{{ m.content }}"
    "[assistant]{% endif %}{% endfor %}"
)
SAMPLING = SamplingParams(max_tokens=40, temperature=1.0, seed=3)


def replicas(*says):
    tokenizer = char_tokenizer(string.printable)
    tokenizer.chat_template = TEMPLATE
    return ScriptedReplicas(tokenizer, *says)


def prompt_of(policy, text="hello"):
    ids = policy.tokenizer(f"[user]{text}[assistant]", add_special_tokens=False)["input_ids"]
    return Prompt(uid="a", text=text, token_ids=tuple(ids), data={"text": text})


async def played(policy, play, n=1, max_seconds=600.0):
    class Mine(Harness):
        async def play(self, prompt, endpoint):
            async with openai.AsyncOpenAI(
                base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0
            ) as client:
                return await play(prompt, client)

    Mine.max_seconds = max_seconds
    harness = Mine(policy.setup())
    try:
        return await harness.run(prompt_of(policy), SAMPLING, n)
    finally:
        await harness.close()


def asked(*said):
    roles = itertools.cycle(("user", "assistant"))
    return [
        one if isinstance(one, dict) else {"role": role, "content": one}
        for role, one in zip(roles, said, strict=False)
    ]


async def test_a_talk_is_one_row_of_the_tokens_that_were_sampled():
    policy = replicas("first~", "second~")

    async def play(prompt, client):
        one = await client.chat.completions.create(model="policy", messages=asked(prompt.data["text"]))
        assert one.choices[0].message.content == "first~"
        assert one.choices[0].policy_versions == [1] * 6
        assert one.choices[0].token_logprobs == [-0.125 * place for place in range(1, 7)]
        policy.version = 2  # the weights change within the episode
        talk = asked(prompt.data["text"], one.choices[0].message.content, "go on")
        two = await client.chat.completions.create(model="policy", messages=talk)
        assert (
            two.prompt_token_ids[: len(one.prompt_token_ids) + 6]
            == one.prompt_token_ids + one.choices[0].token_ids
        )
        return 0.5

    group = await played(policy, play)
    (trajectory,) = group.trajectories
    (row,) = trajectory.rows
    assert group.scores == (Score(reward=0.5, correct=None),)
    assert policy.text(row.token_ids) == "first~[user]go on[assistant]second~"
    assert policy.text(row.token_ids[row.trained]) == "first~second~"
    assert sorted({*row.policy_versions.tolist()} - {-1}) == [1, 2]
    seeds = [request.sampling.seed for request in policy.requests]
    assert len({*seeds}) == 2
    assert len({request.session for request in policy.requests}) == 1


async def test_what_does_not_go_on_from_an_earlier_call_is_a_row_of_its_own():
    policy = replicas("one~", "two~", "three~", "four~")

    async def play(prompt, client):
        async def say(*said):
            answer = await client.chat.completions.create(model="policy", messages=asked(*said))
            return answer.choices[0].message.content

        await say("hello")
        await say("a summary")
        await say("hello", "one~", "and")
        await say("a summary", "two~", "more")
        return

    group = await played(policy, play)
    assert group.scores == (Score(reward=7.0),), "the task's rewards say"
    told = [
        (None if row.context is None else policy.text(row.context), policy.text(row.token_ids))
        for row in group.trajectories[0].rows
    ]
    assert told == [
        (None, "one~[user]and[assistant]three~"),
        ("[user]a summary[assistant]", "two~[user]more[assistant]four~"),
    ]


async def test_calls_that_extend_and_calls_that_fork_are_counted():
    policy = replicas("one~", "two~", "three~", "four~", "five~")

    async def play(prompt, client):
        async def say(*said):
            answer = await client.chat.completions.create(model="policy", messages=asked(*said))
            return answer.choices[0].message.content

        one = await say("hello")
        two = await say("hello", one, "and")  # extends the first call
        await say("hello", one, "another way")  # extends it too, but its row has gone on: a fork
        await say("a summary")  # a fork
        await say("hello", one, "and", two, "more")  # extends the second
        return 1.0

    group = await played(policy, play, n=3)
    found = reduce_metrics(group_metrics([group]))
    assert (found["trajectory/turns_extended"], found["trajectory/turns_forked"]) == (3 * 2, 3 * 2)
    assert (found["trajectory/rows_mean"], found["trajectory/turns_mean"]) == (3, 5)
    assert found["tokens/generated"] == sum(one.num_trained for one in group.trajectories)


async def test_calls_of_tools_come_apart_and_their_results_go_on_from_the_tokens():
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>~'
    policy = replicas(f"I ask {call}", "two~")

    async def play(prompt, client):
        tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
        one = await client.chat.completions.create(model="policy", messages=asked("hello"), tools=tools)
        message = one.choices[0].message
        assert one.choices[0].finish_reason == "tool_calls"
        assert (message.tool_calls[0].function.name, message.tool_calls[0].function.arguments) == (
            "add",
            '{"a": 1}',
        )
        result = {"role": "tool", "content": "2", "tool_call_id": message.tool_calls[0].id}
        back = message.model_dump(exclude_none=True)
        await client.chat.completions.create(
            model="policy", messages=[*asked("hello"), back, result], tools=tools
        )
        return 1.0

    group = await played(policy, play)
    (row,) = group.trajectories[0].rows
    assert policy.text(row.token_ids) == f"I ask {call}[tool]2[assistant]two~"


async def test_messages_in_parts_are_their_text_and_go_on_from_the_tokens():
    policy = replicas("one~", "two~")

    async def play(prompt, client):
        parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
        first = {"role": "user", "content": parts}
        one = await client.chat.completions.create(model="policy", messages=[first])
        back = {"role": "assistant", "content": [{"type": "text", "text": one.choices[0].message.content}]}
        more = {"role": "user", "content": [{"type": "text", "text": "more"}]}
        await client.chat.completions.create(model="policy", messages=[first, back, more])
        return 1.0

    (row,) = (await played(policy, play)).trajectories[0].rows
    assert (row.context, policy.text(row.token_ids)) == (None, "one~[user]more[assistant]two~")


async def test_a_template_is_given_what_a_tool_was_called_with_as_a_mapping():
    policy = replicas("x~")
    policy.tokenizer.chat_template = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    history = [*asked("a"), {"role": "assistant", "content": None, "tool_calls": [call]}]

    async def play(prompt, client):
        await client.chat.completions.create(model="policy", messages=[*history, *asked("b")])
        return 1.0

    (row,) = (await played(policy, play)).trajectories[0].rows
    assert policy.text(row.context) == '{"a": 1}'


async def test_the_endpoint_is_where_the_harness_says():
    class There(Harness):
        host = "localhost"

        async def play(self, prompt, endpoint):
            assert endpoint.base_url.startswith("http://localhost:")
            async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
                await client.chat.completions.create(model="policy", messages=asked("a"))
            return 1.0

    policy = replicas("x~")
    harness = There(policy.setup())
    assert (await harness.run(prompt_of(policy), SAMPLING, 1)).scores[0].reward == 1
    await harness.close()


async def test_a_host_of_another_machine_fails_the_episodes_and_the_harness_closes_all_the_same():
    class Elsewhere(Harness):
        host = "198.51.100.7"  # of those kept for documentation

        async def play(self, prompt, endpoint):
            raise AssertionError("no endpoint to play against")

    policy, closed = replicas("x~"), []
    harness = Elsewhere(policy.setup())
    harness.setup.scorer.close = lambda: asyncio.sleep(0, closed.append(True))
    with pytest.raises(Exception, match=r"198\.51\.100\.7"):
        await harness.run(prompt_of(policy), SAMPLING, 1)
    await harness.close()
    assert closed == [True]


async def test_plain_completions_streams_and_the_list_of_models():
    policy = replicas("x~")

    async def play(prompt, client):
        assert [one.id for one in (await client.models.list()).data] == ["policy"]
        one = await client.completions.create(model="policy", prompt=list(prompt.token_ids), max_tokens=7)
        assert (one.choices[0].text, one.usage.completion_tokens) == ("x~", 2)
        ids = [*prompt.token_ids, *one.choices[0].token_ids, 5, 6]
        pieces = [
            piece async for piece in await client.completions.create(model="policy", prompt=ids, stream=True)
        ]
        assert pieces[0].choices[0].text == "x~"
        chat = await client.chat.completions.create(model="policy", messages=asked("hi"), stream=True)
        assert "".join([piece.choices[0].delta.content or "" async for piece in chat]) == "x~"
        return 1.0

    group = await played(policy, play)
    first, second = group.trajectories[0].rows
    assert policy.requests[0].sampling.max_tokens == 7
    assert (first.context, first.num_trained, first.num_tokens) == (None, 4, 6)
    assert policy.text(second.context) == "[user]hi[assistant]"


@pytest.mark.parametrize(
    ("asking", "words"),
    [
        ({"messages": [], "model": "policy"}, "`messages` is empty"),
        ({"messages": asked("a"), "model": "policy", "temperature": 0.3}, "`temperature` is the run's"),
        ({"messages": asked("a"), "model": "policy", "n": 2}, "`n` is 1"),
        ({"messages": asked("a"), "model": "policy", "max_tokens": 0}, "at least 1, got 0"),
        ({"messages": "hello", "model": "policy"}, "cannot be read: TypeError"),
        ({"messages": [{"content": "a"}], "model": "policy"}, "cannot be read: KeyError: 'role'"),
        (
            {"messages": asked([{"type": "image_url", "image_url": {}}]), "model": "policy"},
            "the policy reads text, and no `image_url`",
        ),
    ],
)
async def test_what_the_run_decides_is_refused_with_a_sentence(asking, words):
    async def play(prompt, client):
        with pytest.raises(openai.BadRequestError, match=words):
            await client.chat.completions.create(**asking)
        await client.chat.completions.create(model="policy", messages=asked("a"), temperature=1.0)
        return 1.0

    assert (await played(replicas("x~"), play)).scores[0].reward == 1


async def test_what_of_anthropic_s_cannot_be_read_is_refused_with_a_sentence():
    class Mine(Harness):
        async def play(self, prompt, endpoint):
            async with anthropic.AsyncAnthropic(
                base_url=endpoint.root, api_key=endpoint.api_key, max_retries=0
            ) as client:
                picture = {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": ""},
                }
                for block, words in (
                    (picture, "reads text, and no `image`"),
                    ({"type": "tool_use"}, "KeyError: 'id'"),
                ):
                    with pytest.raises(anthropic.BadRequestError, match=words):
                        await client.messages.create(
                            model="policy", max_tokens=9, messages=[{"role": "user", "content": [block]}]
                        )
                await client.messages.create(model="policy", max_tokens=9, messages=asked("a"))
            return 1.0

    policy = replicas("x~")
    harness = Mine(policy.setup())
    assert (await harness.run(prompt_of(policy), SAMPLING, 1)).scores[0].reward == 1
    await harness.close()


async def test_a_client_of_anthropic_calls_tools_and_streams():
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>~'
    policy = replicas(f"I ask {call}", "two~", "three~")

    class Mine(Harness):
        async def play(self, prompt, endpoint):
            tools = [{"name": "add", "description": "", "input_schema": {"type": "object"}}]
            asking = {"model": "policy", "max_tokens": 90, "tools": tools, "system": "be brief"}
            async with anthropic.AsyncAnthropic(
                base_url=endpoint.root, api_key=endpoint.api_key, max_retries=0
            ) as client:
                said = [{"role": "user", "content": "hello"}]
                one = await client.messages.create(messages=said, **asking)
                assert [block.type for block in one.content] == ["text", "tool_use"]
                assert (one.stop_reason, one.content[1].input, len(one.policy_versions)) == (
                    "tool_use",
                    {"a": 1},
                    one.usage.output_tokens,
                )
                result = {"type": "tool_result", "tool_use_id": one.content[1].id, "content": "2"}
                said += [{"role": "assistant", "content": one.content}, {"role": "user", "content": [result]}]
                async with client.messages.stream(messages=said, **asking) as stream:
                    two = await stream.get_final_message()
                assert (two.content[0].text, two.stop_reason) == ("two~", "end_turn")
                said += [{"role": "assistant", "content": two.content}, {"role": "user", "content": "more"}]
                await client.messages.create(messages=said, **asking)
            return 1.0

    harness = Mine(policy.setup())
    group = await harness.run(prompt_of(policy), replace(SAMPLING, max_tokens=90), 1)
    await harness.close()
    (row,) = group.trajectories[0].rows
    assert policy.text(row.context) == "[system]be brief[assistant][user]hello[assistant]"
    assert policy.text(row.token_ids) == f"I ask {call}[tool]2[assistant]two~[user]more[assistant]three~"


async def test_tokens_go_in_and_out_as_with_vllm():
    policy = replicas("x~")

    class Mine(Harness):
        async def play(self, prompt, endpoint):
            headers = {"Authorization": f"Bearer {endpoint.api_key}"}
            async with httpx.AsyncClient(base_url=endpoint.root, headers=headers) as client:
                asking = {
                    "model": "policy",
                    "token_ids": list(prompt.token_ids),
                    "sampling_params": {"max_tokens": 5, "logprobs": 1},
                }
                one = (await client.post("/inference/v1/generate", json=asking)).json()
                choice = one["choices"][0]
                assert (len(choice["token_ids"]), choice["finish_reason"]) == (2, "stop")
                assert [part["logprob"] for part in choice["logprobs"]["content"]] == [-0.125, -0.25]
                bad = await client.post("/inference/v1/generate", json={"token_ids": "x"})
                assert (bad.status_code, bad.json()["error"]["message"]) == (
                    400,
                    "`token_ids` must be a list of token ids",
                )
            return 1.0

    harness = Mine(policy.setup())
    group = await harness.run(prompt_of(policy), SAMPLING, 1)
    await harness.close()
    assert policy.text(group.trajectories[0].token_ids) == "x~"
    assert policy.requests[0].sampling.max_tokens == 5


async def test_a_key_is_of_one_episode_and_ends_with_it():
    keys, all_there = [], asyncio.Barrier(3)

    async def play(prompt, client):
        keys.append((client.base_url, client.api_key))
        await client.chat.completions.create(model="policy", messages=asked("a"))
        await all_there.wait()
        for _, other in keys:
            if other != client.api_key:
                await client.with_options(api_key=other).models.list()  # theirs are open still
        await all_there.wait()
        with pytest.raises(openai.AuthenticationError, match="no episode has this key"):
            await client.with_options(api_key="else").models.list()
        return 1.0

    policy = replicas("x~")

    class Mine(Harness):
        async def play(self, prompt, endpoint):
            async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
                return await play(prompt, client)

    harness = Mine(policy.setup())
    await harness.run(prompt_of(policy), SAMPLING, 3)
    assert len({key for _, key in keys}) == 3
    async with openai.AsyncOpenAI(base_url=keys[0][0], api_key=keys[0][1]) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
    await harness.close()
    await harness.close()


async def test_what_a_client_that_is_gone_had_asked_for_is_no_longer_made():
    policy, ended = replicas("x~"), asyncio.Event()
    answer = policy.generate_many

    async def never(requests):
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def play(prompt, client):
        policy.generate_many = never
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.2).chat.completions.create(
                model="policy", messages=asked("a")
            )
        await asyncio.wait_for(ended.wait(), 60)
        policy.generate_many = answer
        await client.chat.completions.create(model="policy", messages=asked("b"))
        return 1.0

    (trajectory,) = (await played(policy, play)).trajectories
    assert [policy.text(row.context) for row in trajectory.rows] == ["[user]b[assistant]"]


@pytest.mark.parametrize("retries", [0, 2])
async def test_an_episode_whose_replicas_failed_is_no_fault_of_its_own(retries):
    policy = replicas("x~")
    answers, gone = policy.generate_many, iter([ReplicaGone("replica-0", "killed")])

    async def generate_many(requests):
        for error in gone:
            raise error
        return await answers(requests)

    policy.generate_many = generate_many

    async def play(prompt, client):
        again = client.with_options(max_retries=retries)
        await again.chat.completions.create(model="policy", messages=asked(prompt.data["text"]))
        return 1.0

    if not retries:
        with pytest.raises(ReplicaGone, match="killed"):  # so that the loop makes the group again
            await played(policy, play)
    group = await played(policy, play)
    assert [len(one.turns) for one in group.trajectories] == [1]


@pytest.mark.parametrize("how", ["raises", "hangs", "asks nothing"])
async def test_an_episode_that_fails_is_its_group_s_alone(how):
    async def play(prompt, client):
        if how == "asks nothing":
            return 1.0
        await client.chat.completions.create(model="policy", messages=asked("a"))
        if how == "raises":
            raise KeyError("nothing")
        return await asyncio.Event().wait()

    words = {
        "raises": "raised KeyError: 'nothing'",
        "hangs": "took longer than 1 s",
        "asks nothing": "asked the policy for nothing",
    }
    with pytest.raises(EnvironmentFailed, match=words[how]) as caught:
        await played(replicas("x~"), play, max_seconds=1.0 if how == "hangs" else 600.0)
    assert caught.value.counted_as == ("environment timed out" if how == "hangs" else "environment raised")
