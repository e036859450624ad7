"""Tasks that read files: rows, templates, overlong prompts, rewards."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from offbeat_recipes.cli._hydra import compose_run
from offbeat_recipes.errors import DataError, TaskError
from offbeat_recipes.planning.lengths import _tokens_of, stop_refusals
from offbeat_recipes.run.context import drive
from offbeat_recipes.tasks.base import make_scorer, make_task
from offbeat_recipes.tasks.config import FileConfig, Gsm8kConfig
from offbeat_recipes.tasks.file import FileTask
from offbeat_recipes.tasks.gsm8k import INSTRUCTION, Gsm8kTask
from offbeat_recipes.tasks.rows import read_rows
from offbeat_recipes.tasks.text import PromptMaker
from offbeat_rollout import Completion, ConfigError, Finish
from offbeat_rollout.toolkit.stop_strings import load_tokenizer
from offbeat_trainer import Group, RewardConfig, Trajectory

if TYPE_CHECKING:
    from pathlib import Path

REWARD = "def count(prompt, completion, row):\n    return float(completion.count(row['answer']))\n"


def _jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def _trajectory(task: Any, text: str) -> Trajectory:
    ids = (*task.tokenizer(text, add_special_tokens=False)["input_ids"], *task.stop_token_ids()[:1])
    zeros = (0,) * len(ids)
    made = Completion.of(
        request_id="0", token_ids=ids, logprobs=zeros, policy_versions=zeros, finish=Finish.STOP
    )
    return Trajectory.of(made)


@pytest.fixture
def reward(tmp_path: Path) -> str:
    path = tmp_path / "rewards.py"
    path.write_text(REWARD)
    return f"{path}:count"


def _file_task(
    tmp_path: Path, rows: list[dict[str, Any]], model: str, reward: str | tuple[str, ...], **more: Any
) -> FileTask:
    path = _jsonl(tmp_path / "rows.jsonl", rows)
    config = FileConfig(train_path=path, validation_path=path, reward=reward, **more)
    return FileTask(config, model, seed=0)


@pytest.mark.parametrize("write", [_jsonl, _parquet])
def test_rows_of_both_formats(tmp_path: Path, write: Any):
    name = "rows.jsonl" if write is _jsonl else "rows.parquet"
    rows = read_rows(write(tmp_path / name, [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]))
    assert [(row.number, dict(row.values)) for row in rows] == [
        (1, {"prompt": "a", "n": 1}),
        (2, {"prompt": "b", "n": 2}),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", b'{"a": 1}\n\n{"a": \n', "rows.jsonl, row 3: not JSON"),
        ("rows.jsonl", b"[1]\n", "row 1: expected a JSON object, got list"),
        ("rows.jsonl", b"\n", "no rows"),
        ("rows.jsonl", b'{"a": 1}\n{"a": "\xe4"}\n', "rows.jsonl, row 2: not UTF-8"),
        ("rows.tsv", b"a\n", "ends in .jsonl, .parquet or .csv, got .tsv"),
        ("rows.csv", b"a\n", "rows.csv: no rows"),
        ("rows.csv", b"a,b\n1,2\n3\n", "not a csv file that can be read"),
        ("rows.parquet", b"nothing", "not a parquet file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_rows(str(tmp_path / name))
    assert message in str(caught.value)


def test_rows_of_csv_have_the_types_that_they_look_like(tmp_path: Path):
    (tmp_path / "rows.csv").write_text('prompt,answer,n\n"one, two",yes,1\nthree,,2\n')
    found = [(row.number, dict(row.values)) for row in read_rows(str(tmp_path / "rows.csv"))]
    assert found == [
        (1, {"prompt": "one, two", "answer": "yes", "n": 1}),
        (2, {"prompt": "three", "answer": "", "n": 2}),
    ]


def test_a_pattern_names_files_in_the_order_of_their_names(tmp_path: Path):
    for number in (10, 2, 1):
        _jsonl(tmp_path / f"train-{number:05}.jsonl", [{"prompt": str(number)}])
    _jsonl(tmp_path / "odd[1].jsonl", [{"prompt": "a name is no pattern where it is a file's"}])
    rows = read_rows(str(tmp_path / "train-*.jsonl"))
    assert [row.values["prompt"] for row in rows] == ["1", "2", "10"]
    assert rows[0].place == f"{tmp_path}/train-00001.jsonl, row 1"
    assert len(read_rows(str(tmp_path / "odd[1].jsonl"))) == 1
    with pytest.raises(DataError, match=r"no file .*other-"):
        read_rows(str(tmp_path / "other-*.jsonl"))


def test_missing_file(tmp_path: Path):
    with pytest.raises(DataError, match="no file"):
        read_rows(str(tmp_path / "nowhere.jsonl"))


def test_without_validation_no_file_is_needed(tmp_path: Path, plain_model: str, reward: str):
    path = _jsonl(tmp_path / "rows.jsonl", [{"prompt": "say yes"}])
    task = FileTask(FileConfig(train_path=path, reward=reward), plain_model, seed=0)
    assert task.validation_prompts(0) == []
    with pytest.raises(TaskError, match=r"task\.validation_path: needed.*trainer\.validation_prompts=0"):
        task.validation_prompts(1)
    holed = _jsonl(tmp_path / "holed.jsonl", [{"prompt": None}])
    with pytest.raises(DataError, match="row 1: 'prompt' is null"):
        FileTask(FileConfig(train_path=holed, reward=reward), plain_model, seed=0)


def test_several_files_are_one_training_set_and_several_validation_sets(
    tmp_path: Path, plain_model: str, reward: str
):
    one, two = (
        _jsonl(tmp_path / name, [{"prompt": f"{name} {number}"} for number in range(3)])
        for name in ("easy-1.jsonl", "hard.jsonl")
    )
    task = FileTask(
        FileConfig(train_path=(one, two), validation_path=(two, one), reward=reward), plain_model, 0
    )
    assert task.num_train_prompts == len({prompt.uid for prompt in task.prompts(0, 6)}) == 6
    assert {prompt.held_out for prompt in task.prompts(0, 6)} == {""}
    held_out = [(prompt.held_out, prompt.uid) for prompt in task.validation_prompts(2)]
    assert held_out == [
        ("hard", "hard.jsonl:1"),
        ("hard", "hard.jsonl:2"),
        ("easy_1", "easy-1.jsonl:1"),
        ("easy_1", "easy-1.jsonl:2"),
    ]
    (tmp_path / "other").mkdir()
    same = _jsonl(tmp_path / "other" / "hard.jsonl", [{"prompt": "a"}])
    with pytest.raises(
        TaskError,
        match="validation_path: sets go by the names of their files, and these are hard, hard; rename",
    ):
        FileTask(FileConfig(train_path=one, validation_path=(two, same), reward=reward), plain_model, 0)


def test_file_task_end_to_end(tmp_path: Path, plain_model: str, reward: str):
    rows = [{"prompt": f"say {word}", "answer": word} for word in ("yes", "no", "maybe", "never")]
    task = _file_task(tmp_path, rows, plain_model, reward)
    prompts = task.prompts(0, 2) + task.prompts(1, 2)
    assert sorted(prompt.text for prompt in prompts) == sorted(str(row["prompt"]) for row in rows)
    assert task.prompts(1, 2) == prompts[2:]
    assert [prompt.uid for prompt in task.validation_prompts(2)] == ["rows.jsonl:1", "rows.jsonl:2"]
    assert task.decode(prompts[0].token_ids) == prompts[0].text
    example = task.examples(0, 1)[0]
    assert task.decode(example.completion_ids) in {row["answer"] for row in rows}
    assert example.completion_ids[-1] == task.stop_token_ids()[0]


def test_messages_go_through_the_template(tmp_path: Path, chat_model: str, reward: str):
    rows = [
        {"prompt": [{"role": "user", "content": "hi"}], "answer": "x"},
        {"prompt": "plain", "answer": "x"},
    ]
    task = _file_task(tmp_path, rows, chat_model, reward)
    assert [prompt.text for prompt in task.validation_prompts(2)] == [
        "[user]hi[assistant]",
        "[user]plain[assistant]",
    ]
    assert task.stop_token_ids() == (1, 0)  # the tokenizer's, then the generation config's


@pytest.mark.parametrize(
    ("template", "texts", "note"),
    [
        (
            "auto",
            ["[user]one[assistant]", "<eos>two"],
            "1 of 2 prompts of plain text go through the chat template",
        ),
        (
            "always",
            ["[user]one[assistant]", "[user]<eos>two[assistant]"],
            "2 of 2 prompts of plain text go through",
        ),
        (
            "never",
            ["one", "<eos>two"],
            "2 prompts of plain text are taken as they are, and the tokenizer has a chat template",
        ),
    ],
)
def test_plain_text_is_a_message_of_the_user_where_there_is_a_template_and_the_run_says_so(
    tmp_path: Path, chat_model: str, plain_model: str, reward: str, template: str, texts: list[str], note: str
):
    rows = [{"prompt": "one"}, {"prompt": "<eos>two"}]
    task = _file_task(tmp_path, rows, chat_model, reward, chat_template=template)
    assert [prompt.text for prompt in task.validation_prompts(2)] == texts
    assert len(task.notes) == 1
    assert note in task.notes[0]
    if template != "always":
        plain = _file_task(tmp_path, rows, plain_model, reward, chat_template=template)
        assert ([prompt.text for prompt in plain.validation_prompts(2)], plain.notes) == (
            ["one", "<eos>two"],
            (),
        )


@pytest.mark.parametrize(
    ("row", "more", "message"),
    [
        ({"question": "a"}, {}, "rows.jsonl, row 2: no 'prompt'; it has question"),
        ({"prompt": 5}, {}, "row 2: 'prompt' must be text or a list of"),
        ({"prompt": " "}, {}, "row 2: 'prompt' must be text"),
        ({"prompt": [{"role": "user"}]}, {}, "row 2: 'prompt' must be text or a list of"),
        ({"prompt": "half \ud83d"}, {}, r"row 2: 'prompt' must be text, got 'half \ud83d'"),
        (
            {"prompt": [{"role": "user", "content": "\ud83d"}]},
            {},
            "row 2: 'prompt' must be text or a list of",
        ),
        ({"prompt": [{"role": "user", "content": "x"}]}, {}, "the model's tokenizer has none"),
        ({"prompt": [{"role": "user", "content": "x"}]}, {"chat_template": "never"}, "is never"),
    ],
)
def test_bad_rows_are_named(
    tmp_path: Path, plain_model: str, reward: str, row: dict[str, Any], more: Any, message: str
):
    with pytest.raises(DataError) as caught:
        _file_task(tmp_path, [{"prompt": "fine"}, row], plain_model, reward, **more)
    assert message in str(caught.value)


def test_what_a_chat_template_does_not_take_is_named(tmp_path: Path, plain_model: str, reward: str):
    tokenizer = AutoTokenizer.from_pretrained(plain_model)
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"
    )
    tokenizer.save_pretrained(tmp_path)
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}]
    with pytest.raises(DataError, match=r"row 2: the model's chat template does not take it: no system role"):
        _file_task(tmp_path, [{"prompt": "fine"}, {"prompt": talk}], str(tmp_path), reward)


def test_overlong_prompts_are_refused_or_left_out(tmp_path: Path, plain_model: str, reward: str):
    rows = [{"prompt": "x" * length, "answer": "x"} for length in (3, 9, 4, 9, 9, 9)]
    with pytest.raises(DataError, match=r"4 of 6 prompts have more than 4 tokens \(rows 2, 4, 5, \.\.\.\)"):
        _file_task(tmp_path, rows, plain_model, reward, max_prompt_tokens=4)
    task = _file_task(tmp_path, rows, plain_model, reward, max_prompt_tokens=4, overlong="filter")
    assert {len(prompt.token_ids) for prompt in task.prompts(0, 2)} == {3, 4}
    assert all("4 of 6 prompts" in note and "left out" in note for note in task.notes)
    assert len(task.notes) == 2  # one per file
    with pytest.raises(DataError, match="every prompt is longer"):
        _file_task(tmp_path, rows, plain_model, reward, max_prompt_tokens=2, overlong="filter")


def test_rows_are_tokenized_in_batches_each_text_once_and_kept_in_four_bytes_a_token(
    tmp_path: Path, plain_model: str, reward: str, monkeypatch: pytest.MonkeyPatch
):
    calls: list[int] = []
    make = type(AutoTokenizer.from_pretrained(plain_model)).__call__

    def counted(self: Any, texts: list[str], **more: Any) -> Any:
        calls.append(len(texts))
        return make(self, texts, **more)

    monkeypatch.setattr(type(AutoTokenizer.from_pretrained(plain_model)), "__call__", counted)
    rows = [{"prompt": f"say {index}", "answer": f"{index}!" * 5} for index in range(1500)]
    task = _file_task(tmp_path, rows, plain_model, reward)
    assert calls == [1000, 500] * 2, "of each file"
    assert task.longest_row("examples", 0) == (len("say 1499") + 5 * len("1499!") + 1, "rows.jsonl:1500")
    assert sum(calls[4:]) == 1500
    assert task.examples(0, 3)[0].completion_ids[-1] == task.stop_token_ids()[0]
    assert sum(calls[4:]) == 1500, "answers are known"
    kept = [row.token_ids for row in task._train]
    assert {ids.itemsize for ids in kept} == {4}
    assert [tuple(ids) for ids in kept] == [prompt.token_ids for prompt in task.validation_prompts(1500)]


def test_more_prompts_than_rows(tmp_path: Path, plain_model: str, reward: str):
    task = _file_task(tmp_path, [{"prompt": "a"}], plain_model, reward)
    with pytest.raises(TaskError, match="takes 2 different prompts"):
        task.prompts(0, 2)
    with pytest.raises(DataError, match=r"rows\.jsonl:1: supervised training needs text under 'answer'"):
        task.examples(0, 1)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("math", "expected package.module:name or file.py:name"),
        ("nowhere.at_all:f", "cannot import 'nowhere.at_all'"),
        ("nowhere/file.py:f", "cannot import 'nowhere/file.py'"),
        ("math:nothing", "math has no 'nothing'"),
        ("math:pi", "math:pi is no function"),
    ],
)
def test_reward_functions_that_are_not(tmp_path: Path, plain_model: str, reward: str, message: str):
    with pytest.raises(TaskError) as caught:
        _file_task(tmp_path, [{"prompt": "a"}], plain_model, reward)
    assert message in str(caught.value)


def test_a_task_without_a_reward_can_be_supervised_alone(tmp_path: Path, plain_model: str):
    rows = [{"prompt": "say yes", "answer": "yes"}, {"prompt": "say no", "answer": "no"}]
    task = _file_task(tmp_path, rows, plain_model, "")
    held_out = task.validation_examples(2)
    assert [task.decode(example.completion_ids) for example in held_out] == ["yes", "no"]
    assert [task.decode(example.prompt_ids) for example in held_out] == ["say yes", "say no"]
    with pytest.raises(TaskError, match=r"task\.reward: needed"):
        make_scorer(task, RewardConfig(), tmp_path / "rewards.log")


@pytest.mark.spawns
async def test_several_rewards_score_what_completions_read(tmp_path: Path, plain_model: str, reward: str):
    brief = tmp_path / "brief.py"
    brief.write_text("def brief(completions, answer, **rest): return [-len(one) for one in completions]\n")
    both = (reward, f"{brief}:brief")
    task = _file_task(
        tmp_path,
        [{"prompt": "say yes", "answer": "yes"}],
        plain_model,
        both,
        reward_weights=(1.0, 0.1),
        correct_at=1.0,
    )
    scorer = make_scorer(task, RewardConfig(concurrency=1), tmp_path / "rewards.log")
    asked = Group(
        prompt=task.validation_prompts(1)[0],
        trajectories=tuple(_trajectory(task, text) for text in ("yes yes", "yes", "no")),
    )
    try:
        scores = (await scorer.score(asked)).scores
    finally:
        await scorer.close()
    assert [score.reward for score in scores] == pytest.approx([2 - 0.7, 1 - 0.3, -0.2])
    assert [score.correct for score in scores] == [True, False, False]
    assert scores[0].parts == {"count": 2.0, "brief": -7.0}


@pytest.mark.parametrize(
    ("rewards", "weights", "message"),
    [
        (("{0}", "{0}"), (), "names a function twice"),
        (("{0}",), (1.0, 2.0), "task.reward_weights: 2 numbers for 1 functions"),
        (("{0}", "math:pi"), (), "math:pi is no function"),
    ],
)
def test_several_rewards_that_do_not_fit(
    tmp_path: Path, plain_model: str, reward: str, rewards: Any, weights: Any, message: str
):
    named = tuple(one.format(reward) for one in rewards)
    with pytest.raises(TaskError) as caught:
        _file_task(tmp_path, [{"prompt": "a"}], plain_model, named, reward_weights=weights)
    assert message in str(caught.value)


def test_rewards_are_settings_of_a_run():
    one = compose_run(["task=file", "task.reward=r.py:score"])
    assert isinstance(one.task, FileConfig)
    assert one.task.reward == "r.py:score"
    more = compose_run(["task=file", "task.reward=[r.py:score,b.py:brief]", "task.reward_weights=[1,0.5]"])
    assert isinstance(more.task, FileConfig)
    assert (more.task.reward, more.task.reward_weights) == (("r.py:score", "b.py:brief"), (1.0, 0.5))


def test_no_tokenizer(tmp_path: Path, reward: str):
    with pytest.raises(TaskError, match=r"model\.path: this task needs a local"):
        _file_task(tmp_path, [{"prompt": "a"}], "", reward)
    with pytest.raises(TaskError, match="no tokenizer in"):
        _file_task(tmp_path, [{"prompt": "a"}], str(tmp_path), reward)


@pytest.mark.parametrize("write", [_jsonl, _parquet])
def test_gsm8k(tmp_path: Path, plain_model: str, chat_model: str, write: Any):
    name = "rows.jsonl" if write is _jsonl else "rows.parquet"
    answer = "Three boxes of 14 are 3*14=<<3*14=42>>42 eggs.\n#### 42"
    path = write(tmp_path / name, [{"question": "Three boxes of 14 eggs: how many eggs?", "answer": answer}])
    config = Gsm8kConfig(train_path=path, validation_path=path, max_prompt_tokens=400)
    task = make_task(config, plain_model, 0)
    assert isinstance(task, Gsm8kTask)
    prompt = task.prompts(0, 1)[0]
    assert prompt.text == f"Three boxes of 14 eggs: how many eggs?\n{INSTRUCTION}\n"
    assert (
        task.decode(task.examples(0, 1)[0].completion_ids) == "Three boxes of 14 are 3*14=42 eggs.\n#### 42"
    )
    assert task.score(prompt, _trajectory(task, "So it is\n#### 42.0 eggs")).reward == 1.0
    assert task.score(prompt, _trajectory(task, "So it is 42")).reward == 0.0
    chat = Gsm8kTask(config, chat_model, 0)
    assert chat.prompts(0, 1)[0].text.startswith("[user]Three boxes")


def test_gsm8k_rows_without_a_number(tmp_path: Path, plain_model: str):
    path = _jsonl(tmp_path / "rows.jsonl", [{"question": "How many?", "answer": "some"}])
    with pytest.raises(DataError, match="row 1: 'answer' must end in '#### '"):
        Gsm8kTask(Gsm8kConfig(train_path=path, validation_path=path), plain_model, 0)
    with pytest.raises(TaskError, match=r"task\.train_path: needed"):
        Gsm8kTask(Gsm8kConfig(), plain_model, 0)


def test_a_step_that_takes_more_than_there_is_leaves_an_earlier_run_where_it_is(
    tmp_path: Path, plain_model: str, reward: str
):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("seed: 0\n")
    config = compose_run(
        [
            "task=file", f"task.train_path={tmp_path}/rows.jsonl", f"task.validation_path={tmp_path}/rows.jsonl",
            f"task.reward={reward}", f"model.path={plain_model}", f"run_dir={run}", "trainer.prompts_per_step=3",
        ]
    )  # fmt: skip

    async def never(_session: object) -> None:
        raise AssertionError("nothing is to start")

    with pytest.raises(TaskError, match=r"trainer\.prompts_per_step: a step takes 3 .* the task has 2"):
        drive(config, never, 0.0)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("run")] == ["run"]


def test_code_in_a_models_folder_runs_only_where_the_setting_says_so(
    plain_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Left out of a call, transformers asks at the terminal, and a "y" there runs it: also in `offbeat-plan`, which starts nothing."""
    folder, ran = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(plain_model, folder)
    (folder / "theirs.py").write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "class Theirs(PreTrainedTokenizerFast): pass\n"
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {
        "tokenizer_class": "Theirs",
        "auto_map": {"AutoTokenizer": ["theirs.Theirs", "theirs.Theirs"]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(TaskError, match="trust_remote_code"):
        _ = PromptMaker(str(folder), "never").tokenizer
    with pytest.raises(ConfigError, match="trust_remote_code"):
        load_tokenizer(str(folder))
    config = compose_run([f"model.path={folder}"])
    with pytest.raises(ValueError, match="trust_remote_code"):
        _tokens_of(str(folder), config)
    assert not ran.exists()
    assert PromptMaker(str(folder), "never", trust_remote_code=True).tokenizer.get_vocab()
    assert ran.exists()
    assert load_tokenizer(str(folder), trust_remote_code=True).get_vocab()
    trusted = compose_run([f"model.path={folder}", "model.trust_remote_code=true"])
    assert (config.rollout_config("m").trust_remote_code, trusted.rollout_config("m").trust_remote_code) == (
        False,
        True,
    )
    (folder / "config.json").write_text("{}")
    words = [
        f"model.path={folder}",
        "task=file",
        "task.train_path=rows.jsonl",
        "model.trust_remote_code=true",
    ]
    assert [*stop_refusals(compose_run(words), vocab_size=10**6)] == []


def test_labels_are_read_beside_answers_and_must_be_true_or_false(tmp_path: Path, plain_model: str):
    rows = [{"prompt": "a", "answer": "b", "label": True}, {"prompt": "c", "answer": "d", "label": False}]
    task = _file_task(tmp_path, rows, plain_model, "")
    found = [(task.decode(one.completion_ids), one.desirable) for one in task.validation_labelled(2)]
    assert found == [("b", True), ("d", False)]
    assert sorted(one.desirable for one in task.labelled(0, 2)) == [False, True]
    for bad in ({"label": 1}, {}):
        task = _file_task(tmp_path, [{"prompt": "a", "answer": "b", **bad}], plain_model, "")
        with pytest.raises(DataError, match=r"row rows.jsonl:1: 'label' must be true or false, got"):
            task.labelled(0, 1)
