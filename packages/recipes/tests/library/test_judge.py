"""A judge over HTTP: what it says, what it is asked once, and how long it is waited for."""

import asyncio

import pytest
from aiohttp import web

from offbeat_recipes.library import judge as judging
from offbeat_recipes.library.judge import BudgetSpentError, Judge
from offbeat_trainer.rollouts.scorer import find_reward


class Model:
    """Answers what it is told to, one after the other; a number is a status."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    async def answer(self, request):
        self.asked.append((await request.json(), request.headers.get("Authorization")))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, int):
            return web.Response(status=answer, headers={"Retry-After": "0.01"} if answer == 429 else {})
        return web.json_response({"choices": [{"message": {"content": answer}}]})


@pytest.fixture
async def serve(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    runners, judges = [], []

    async def start(model, **settings):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", model.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        judges.append(
            Judge(url=url, model="m", ask="{prompt} {completion} {topic}: from 0 to 10?", **settings)
        )
        return judges[-1]

    yield start
    for judge in judges:
        await judge.close()
    for runner in runners:
        await runner.cleanup()


async def test_the_last_number_counts_and_the_same_question_is_asked_once(serve):
    model = Model("Between 2 and 9 I say 7.5", "11", "-3")
    judge = await serve(model)
    both = await asyncio.gather(*(judge("p", "c", {"topic": "sums"}) for _ in range(2)))
    assert both == [0.75, 0.75]
    assert [await judge("p", other, {"topic": "sums"}) for other in ("d", "e")] == [1.0, 0.0]
    assert len(model.asked) == judge.num_answers == 3
    body, key = model.asked[0]
    assert (body["messages"][0]["content"], body["temperature"], key) == (
        "p c sums: from 0 to 10?",
        0,
        "Bearer secret",
    )


async def test_one_that_is_busy_is_asked_again_and_one_that_is_away_is_given_up(serve, monkeypatch):
    model = Model(503, 429, "10")
    judge = await serve(model)
    waited = []

    async def sleep(seconds):
        waited.append(seconds)

    monkeypatch.setattr(judging.asyncio, "sleep", sleep)
    assert await judge("p", "c", {"topic": ""}) == 1
    assert waited == [1.0, 0.01]
    away = Judge(url="http://127.0.0.1:1/v1", model="m", ask="{prompt}", patience_s=2.5)
    with pytest.raises(RuntimeError, match=r"was away for 2.5 s \(ConnectError"):
        await away("p", "c", {})
    await away.close()


async def test_what_it_cannot_say_is_a_failure_that_is_asked_anew(serve):
    model = Model("I cannot tell", "4")
    judge = await serve(model)
    with pytest.raises(RuntimeError, match="said no number: 'I cannot tell'"):
        await judge("p", "c", {"topic": ""})
    assert await judge("p", "c", {"topic": ""}) == 0.4
    refused = await serve(Model(400))
    with pytest.raises(RuntimeError, match="refused: status 400"):
        await refused("p", "c", {"topic": ""})


async def test_a_budget_ends(serve):
    judge = await serve(Model("1"), budget=2)
    for text in ("a", "b"):
        assert await judge("p", text, {"topic": ""}) == 0.1
    with pytest.raises(BudgetSpentError, match="budget of 2 answers is spent"):
        await judge("p", "c", {"topic": ""})
    assert await judge("p", "a", {"topic": ""}) == 0.1, "what is known costs nothing"


def test_it_is_a_reward_of_a_run(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from offbeat_recipes.library.judge import Judge\ngood = Judge(url='http://x', model='m', ask='{prompt}')\n"
    )
    assert find_reward(f"{file}:good", 1.0, {"prompt": ""}).wants == {"prompt", "completion", "row"}
