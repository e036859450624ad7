"""`offbeat show`: which completions it prints, and how; text of completions is never markup."""

import gzip
import json

import pytest

from offbeat_recipes.cli.main import main


def row(step, reward, uid="p", prompt="1+1=", completion="2", **more):
    line = {
        "step": step, "title": "sampled", "uid": uid, "prompt": prompt, "completion": completion,
        "num_tokens": len(completion), "finish": "stop", "reward": reward, "correct": reward == 1,
    }  # fmt: skip
    return line | more


@pytest.fixture
def run(tmp_path):
    rows = [
        row(1, 0.0, completion="3"),
        row(1, 1.0, uid="q", prompt="2+2=", completion="4"),
        row(9, 0.25, completion="[bold]2[/bold] \x1b[31m", parts={"short": 0.25}),
    ]
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return tmp_path


def shown(capsys, run, *words):
    assert main(["show", str(run), *words]) == 0
    return capsys.readouterr().out


def test_the_newest_step_by_default(run, capsys):
    text = shown(capsys, run)
    assert text.startswith("step 9 (sampled), p: reward 0.25, wrong, short 0.25, ")
    assert "[bold]2[/bold]" in text, "as it is, not as markup"
    assert "\x1b" not in text
    assert "step 1" not in text


@pytest.mark.parametrize(
    ("words", "heads"),
    [
        (["--step", "1"], ["p: reward 0, wrong", "q: reward 1, right"]),
        (["--worst", "2"], ["p: reward 0, wrong", "p: reward 0.25"]),
        (["--best", "1"], ["q: reward 1, right"]),
        (["--prompt", "2+2"], ["q: reward 1, right"]),
        (["--prompt", "p"], ["p: reward 0, wrong", "p: reward 0.25"]),
        (["--count", "2"], ["p: reward 0.25", "q: reward 1, right"]),
    ],
)
def test_those_that_were_asked_for(run, capsys, words, heads):
    lines = [line for line in shown(capsys, run, *words).splitlines() if line.startswith("step ")]
    assert len(lines) == len(heads)
    assert all(head in line for line, head in zip(lines, heads, strict=True))


def test_turns_with_their_roles(run, capsys):
    turns = [
        {"role": "policy", "text": "call 1", "reward": 0.0},
        {"role": "environment", "text": "<b>7</b>"},
        {"role": "policy", "text": "7", "reward": 1.0},
    ]
    (run / "trajectories").mkdir()
    with gzip.open(run / "trajectories" / "step_00000012.jsonl.gz", "wt") as file:
        file.write(json.dumps(row(12, 1.0, turns=turns)) + "\n")
    lines = shown(capsys, run).splitlines()
    assert lines[1:5] == ["1+1=", "[policy] call 1", "[environment] <b>7</b>", "[policy] 7"]


def test_where_there_is_nothing_to_show(run, tmp_path, capsys):
    assert main(["show", str(run), "--step", "5"]) == 2
    assert "has no such completions; trainer.sample_every" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["show", str(tmp_path / "empty")]) == 2
    assert "is no run folder" in capsys.readouterr().err
