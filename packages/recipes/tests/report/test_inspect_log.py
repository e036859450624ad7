"""Logs of inspect-ai: what its own reader finds in them is what the run kept."""

import pytest

from offbeat_recipes.cli.main import main


@pytest.mark.spawns
def test_inspects_own_reader_finds_messages_and_scores(make_run, sample, read_inspect, capsys):
    turns = [
        {"role": "policy", "text": "12*3?", "versions": [[4, 5]], "reward": 0.0},
        {"role": "environment", "text": "36"},
        {"role": "policy", "text": "36 \u2028 <script>", "versions": [[4, 2], [5, 3]], "reward": 1.0},
    ]
    samples = [
        sample(4, "12*3?3636", reward=1.0, turns=turns, parts={"format": 0.5}),
        sample(4, "no", uid="b", reward=0.0, finish="length"),
        {**sample(4, "other"), "reward": None, "correct": None},
        sample(2, "earlier", title="evaluated", reward=0.25),
    ]
    run = make_run(samples=samples)
    assert main(["report", "--inspect", str(run)]) == 0
    files = capsys.readouterr().out.split()
    assert files == [f"{run}/inspect/step_2_evaluated.json", f"{run}/inspect/step_4_sampled.json"]
    earlier, last = read_inspect(files)
    assert (earlier["status"], earlier["mean"], earlier["metadata"]["step"]) == ("success", 0.25, 2)
    by_id = {(one["id"], one["epoch"]): one for one in last["samples"]}
    assert by_id.keys() == {("a", 1), ("b", 1), ("a", 2)}
    several = by_id["a", 1]
    assert several["messages"] == [
        ["user", "prompt a"], ["assistant", "12*3?"], ["user", "36"], ["assistant", "36 \u2028 <script>"],
    ]  # fmt: skip
    assert several["output"] == "36 \u2028 <script>"
    assert several["scores"] == {"reward": 1.0, "format": 0.5, "correct": "C"}
    assert several["versions"] == [[[4, 5]], [[4, 2], [5, 3]]]
    assert (by_id["b", 1]["stop"], by_id["b", 1]["scores"]) == ("max_tokens", {"reward": 0.0, "correct": "I"})
    assert (by_id["a", 2]["messages"][-1], by_id["a", 2]["scores"]) == (["assistant", "other"], {})
    assert last["mean"] == 0.5


def test_a_run_without_completions_has_no_logs(make_run, capsys):
    run = make_run(samples=[])
    assert main(["report", "--inspect", str(run)]) == 2
    assert "has no completions; trainer.sample_every" in capsys.readouterr().err
    assert not (run / "inspect").exists()
