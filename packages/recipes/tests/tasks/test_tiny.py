# pyright: basic
"""Tasks of a tiny model: their rules, what the policy cannot do, worked examples, and runs that learn."""

import json
from itertools import groupby

import numpy as np
import pytest

from offbeat_recipes.cli._hydra import compose_run
from offbeat_recipes.errors import SettingError, TaskError
from offbeat_recipes.planning.facts import gather_facts
from offbeat_recipes.planning.plan import plan_run
from offbeat_recipes.run.modes import observation_encoder
from offbeat_recipes.tasks.base import make_task
from offbeat_recipes.tasks.config import SqlConfig, WordGameConfig
from offbeat_recipes.tasks.tiny.countdown import Countdown, value
from offbeat_recipes.tasks.tiny.sql import Database, SqlTask, query
from offbeat_recipes.tasks.tiny.word_game import WordGame, WordGameTask, marks
from offbeat_recipes.testing import Command
from offbeat_recipes.testing.tasks import check_task
from offbeat_rollout import Completion, Finish, SamplingParams
from offbeat_trainer import Action, Prompt, Trajectory
from offbeat_trainer.config import EnvironmentConfig
from offbeat_trainer.rollouts.multi import EnvironmentSetup, MultiTurn
from offbeat_trainer.rollouts.single import GroupGenerator
from offbeat_trainer.testing import check_environment

TASKS = ("calculator", "countdown", "word_game", "sql", "code")
TALKS = ("calculator", "countdown", "word_game", "sql")
ROWS = [("a", 3), ("b", 7), ("a", 9)]


def made(name, seed=0, **settings):
    return make_task(
        compose_run([f"task={name}", *(f"task.{key}={one}" for key, one in settings.items())]).task, "", seed
    )


def turns(task, example):
    """Return the turns of a worked example as text."""
    sides = groupby(zip(example.completion_ids, example.trained, strict=True), lambda one: one[1])
    return [task.decode([token for token, _ in side]) for own, side in sides if own]


def completion(task, text, request="0"):
    ids = (*task._encode(text), *task.stop_token_ids())
    zeros = (0,) * len(ids)
    return Completion.of(
        request_id=request, token_ids=ids, logprobs=zeros, policy_versions=zeros, finish=Finish.STOP
    )


@pytest.mark.parametrize("name", TASKS)
def test_it_keeps_the_contract_of_tasks_and_a_run_of_it_is_planned(name):
    check_task(made(name))
    config = compose_run([f"task={name}", "rollout=hf"])
    plan = plan_run(config, gather_facts(config))
    assert (plan.refusals, plan.warnings) == ((), ())


@pytest.mark.parametrize("name", TASKS)
def test_prompts_and_examples_follow_from_the_seed_and_never_meet_what_is_held_out(name):
    one, same, other = made(name), made(name), made(name, seed=1)
    held = one.validation_prompts(256)
    assert len({prompt.uid for prompt in held}) == 256
    assert other.validation_prompts(256) == held
    trained = {prompt.uid for step in range(20) for prompt in one.prompts(step, 32)}
    assert not {prompt.uid for prompt in held} & trained
    assert (one.prompts(3, 8), one.examples(3, 8)) == (same.prompts(3, 8), same.examples(3, 8))
    assert one.prompts(3, 8) != other.prompts(3, 8)
    assert one.examples(3, 8) != one.examples(4, 8)
    assert one.validation_examples(8) == other.validation_examples(8)


@pytest.mark.parametrize("name", TASKS)
def test_a_careful_hand_is_right_and_a_careless_one_seldom(name):
    for careless in (0, 1):
        task = made(name, careless=careless)
        prompts = task._drawn(np.random.default_rng(0), 24, held_out=False)
        examples = [task._example(prompt, np.random.default_rng(1)) for prompt in prompts]
        assert all(len(one.token_ids) <= task.max_prompt_tokens for one in prompts)
        assert careless or max(len(one.completion_ids) for one in examples) <= task.max_answer_tokens
        played = [
            Trajectory(
                turns=tuple(Trajectory.of(completion(task, text)).turns[0] for text in turns(task, example)),
                finish=Finish.STOP,
            )
            for example in examples
        ]
        right = [task.score(prompt, one).correct for prompt, one in zip(prompts, played, strict=True)]
        assert all(right) if not careless else sum(right) <= 10, (name, right)


@pytest.mark.parametrize("name", TALKS)
async def test_what_is_said_is_only_ever_added_and_lies_in_one_row(name):
    """Play worked examples through the rollout of a run: each turn is asked with all tokens before it, as they were sampled."""
    config = compose_run([f"task={name}"])
    task = made(name, careless=0)
    rng = np.random.default_rng(0)
    for prompt in task.prompts(0, 8):
        example = task._example(prompt, rng)
        said, asked = iter(turns(task, example)), []

        async def generate(requests, said=said, asked=asked):
            asked.extend(requests)
            return [completion(task, next(said), one.request_id) for one in requests]

        setup = EnvironmentSetup(
            make=task.environment, decode=task.decode, encode=observation_encoder(task.tokenizer)
        )
        limits = EnvironmentConfig(max_turns=config.turns.max_turns, max_tokens=config.turns.max_tokens)
        rollout = MultiTurn(GroupGenerator(generate), setup, limits)
        group = await rollout.run(prompt, SamplingParams(max_tokens=config.sampling.max_tokens), 1)
        [trajectory] = group.trajectories
        [row] = trajectory.rows
        assert tuple(row.token_ids.tolist()) == example.completion_ids
        whole = (*prompt.token_ids, *example.completion_ids)
        assert all(request.prompt_ids == whole[: len(request.prompt_ids)] for request in asked)
        assert group.scores[0].correct
        assert (trajectory.finish, len(asked)) == (Finish.STOP, len(turns(task, example)))


@pytest.mark.parametrize(
    ("expression", "worth"),
    [
        ("3*5+7", 22), ("7-3*5", -8), ("3", 3), ("3*5*7", 105), ("5-7-3", -5), ("3+3", None), ("35", None), ("03", None),
        ("3+", None), ("-3", None), ("3**5", None), ("(3+5)", None), ("", None), ("3 +5", None), ("9" * 5000, None), ("３", None),
        ("3-__import__('os')", None), ("7/1", None),
    ],
)  # fmt: skip
def test_what_an_expression_is_worth(expression, worth):
    assert value(expression, [3, 5, 7]) == worth


async def test_tries_are_answered_with_what_they_are_worth_until_one_is_right_or_none_is_made():
    prompt = Prompt(uid="x", text="", token_ids=(), data={"numbers": [3, 5, 7], "target": 22})
    told = await check_environment(Countdown, prompt, ["3+5", "3+3", "7-3*5", "3*5+7"])
    assert [one.observation for one in told] == ["8;", "!;", "-8;", ""]
    assert (told[-1].reward, told[-1].correct, told[-1].done) == (pytest.approx(0.85), True, True)
    [gave_up] = await check_environment(Countdown, prompt, [""])
    assert (gave_up.reward, gave_up.correct, gave_up.done) == (0.0, False, True)
    game = Countdown()
    game.reset(prompt, 0)
    cut_off = game.step(Action(turn=0, text="3*5+7", token_ids=(), finish="length"))
    assert (cut_off.reward, cut_off.correct) == (0.0, None)


@pytest.mark.parametrize(
    ("word", "guess", "shows"),
    [
        ("had", "had", "+++"),
        ("had", "daf", "?+-"),
        ("aab", "baa", "?+?"),
        ("abb", "aaa", "+--"),
        ("abc", "bbb", "-+-"),
    ],
)
def test_letters_are_marked(word, guess, shows):
    assert marks(word, guess) == shows


async def test_a_word_is_worth_less_with_each_guess_and_nonsense_costs_one():
    task = WordGameTask(WordGameConfig(guesses=3), "", 0)
    prompt = task.prompts(0, 1)[0]
    word = str(prompt.data["word"])
    for texts, reward, observed in (
        ([word], 1.0, []),
        (["", word], 0.9, ["!!!;"]),
        (["zzz", prompt.text[0] * 4, word], 0.8, ["!!!;", "!!!;"]),
        (["", "", ""], 0.0, ["!!!;", "!!!;"]),
    ):
        told = await check_environment(WordGame, prompt, texts)
        assert (told[-1].done, told[-1].correct) == (True, reward > 0)
        assert sum(one.reward for one in told) == pytest.approx(reward)
        assert [one.observation for one in told[:-1]] == observed


@pytest.mark.parametrize(
    ("sql", "shows"),
    [
        ("select max(n)from t where k='a'and n<5", "3"), ("select * from t", "a,3|b,7|a,9"), ("select max(n)from t where n<0", "null"),
        ("with r as (select n from t) select sum(n) from r", "19"), ("select n from t,t", "!ambiguous column name: n"), ("", ""),
        ("drop table t", "!not authorized"), ("delete from t", "!not authorized"), ("update t set n=1", "!not authorized"),
        ("insert into t values('a',1)", "!not authorized"), ("attach ':memory:' as x", "!not authorized"),
        ("attach '/tmp/x' as x", "!not authorized"), ("vacuum into '/tmp/x'", "!authorization denied"), ("begin", "!not authorized"),
        ("pragma journal_mode=off", "!not authorized"), ("create view v as select 1", "!not authorized"),
        ("select * from sqlite_master", "!access to sqlite_master"), ("select load_extension('x')", "!not authorized to use function"),
        ("select randomblob(1000000000)", "!not authorized to use function"), ("select printf('%999999999d',1)", "!not authorized to use"),
        ("with recursive r(x) as (select 1 union all select x+1 from r) select count(*) from r", "!not authorized"),
        ("select 1;drop table t", "!you can only execute one statement"), 
        ("select count(*)from " + ",".join(f"t t{number}" for number in range(14)), "!interrupted"),
        ("select " + "1+" * 80 + "1", "!"), ("select '" + "x" * 300 + "'", "!"), ("select \0", "!the query contains a null character"),
        ("select '\udcff'", "!"), ("select x'ff'", "b'"),
    ],
)  # fmt: skip
def test_a_query_reads_one_table_and_nothing_else_in_bounded_steps(sql, shows):
    assert query(ROWS, sql).startswith(shows)
    assert query(ROWS, "select count(*)from t") == "3"


async def test_a_database_answers_with_rows_or_the_error_and_the_answer_alone_is_worth_something():
    task = SqlTask(SqlConfig(), "", 0)
    prompt = task.prompts(0, 1)[0]
    texts = [
        "select 7",
        "drop table t",
        "select k,k,k,k,k,k,k,k,k,k,k,k from t",
        "select ';'",
        f":{prompt.data['answer']}",
    ]
    told = await check_environment(Database, prompt, texts)
    observed = [str(one.observation) for one in told[:-1]]
    assert observed[:2] == ["7;", "!not authorized;"]
    assert (len(observed[2]), observed[3]) == (21, ";"), "cut off, and the mark of the end stands there alone"
    assert (told[-1].reward, told[-1].correct, [one.reward for one in told[:-1]]) == (1.0, True, [0.0] * 4)
    for wrong in (":", f":{prompt.data['answer']};", f": {prompt.data['answer']}", ":null"):
        assert (await check_environment(Database, prompt, [wrong]))[0].correct is False


@pytest.mark.spawns
def test_code_is_worth_something_where_its_tests_pass_in_time():
    task = made("code")
    prompt = Prompt(
        uid="x", text="+3*2=", token_ids=(), data={"tests": ["assert f(-7) == -8", "assert f(1) == 8"]}
    )
    for text, reward in (
        ("return (x+3)*2", 1),
        ("return(3+x)*2", 1),
        ("return x+3*2", 0),
        ("", 0),
        ("return", 0),
    ):
        assert task.score(prompt, Trajectory.of(completion(task, text))).reward == reward, text


@pytest.mark.parametrize(
    ("name", "setting", "says"),
    [
        ("countdown", "count=7", "at most 6"), ("countdown", "used=1", "at least 2"), ("word_game", "letters=9", "at most 8"),
        ("sql", "rows=0", "at least 1"), ("code", "steps=1", "at least 2"), ("sql", "careless=1.1", "at most 1"), ("code", "guess=1", "guess"),
    ],
)  # fmt: skip
def test_settings_out_of_bounds_are_refused(name, setting, says):
    with pytest.raises(SettingError, match=says):
        compose_run([f"task={name}", f"task.{setting}"])


def test_settings_that_do_not_fit_each_other_are_refused():
    with pytest.raises(TaskError, match=r"task\.used 4 is more than task\.count 3"):
        made("countdown", used=4)
    with pytest.raises(TaskError, match=r"task\.held_out_fraction"):
        made("sql", held_out_fraction=0)
    with pytest.raises(TaskError, match="has not 256 different prompts held out"):
        made("word_game", letters=2, length=2).validation_prompts(256)


@pytest.mark.ray
@pytest.mark.deep
@pytest.mark.parametrize("name", [one for one in TASKS if one != "calculator"])
def test_a_recipe_learns_from_a_careless_start(name, tmp_path):
    folder = tmp_path / "run"
    words = [f"task={name}", "rollout=hf", f"run_dir={folder}", "trainer.validation_prompts=64"]
    Command("train", words, tmp_path / "log").succeed(1800)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.3
