"""Which model `offbeat-eval` takes for the newest of a run."""

import itertools
from contextlib import closing
from types import SimpleNamespace

import pytest

from offbeat_recipes.run.evaluate import _exported_since, majority, pass_at_k
from offbeat_recipes.run.folder import open_run_folder
from offbeat_recipes.settings.reading import parse, to_dict


@pytest.mark.parametrize(
    ("saved", "summary", "step"),
    [
        ([], None, 100),
        ([10], {"steps": 100, "interrupted": False}, 100),  # stopped once, gone on with, and saved no more
        ([80, 100], {"steps": 100, "interrupted": False}, None),
        ([150], {"steps": 150, "interrupted": True}, None),  # exported at 100, given more steps, stopped
        ([90], {"steps": 95, "interrupted": False, "error": "a rank died"}, None),
        ([10], None, None),
    ],
)
def test_the_newest_model_is_the_exported_one_where_no_checkpoint_is_as_new(tmp_path, saved, summary, step):
    config = parse({"trainer": {"steps": 100, "save_every": 0}})
    with closing(open_run_folder(tmp_path, to_dict(config), resume=False)) as folder:
        context = SimpleNamespace(config=config, folder=folder)
        for one in saved:
            (folder.checkpoints / "policy" / f"step_{one:08d}").mkdir(parents=True)
        if summary is not None:
            folder.write_summary(summary)
        assert _exported_since(context) is None, "nothing was exported"
        folder.final.mkdir()
        assert _exported_since(context) == step


def test_pass_at_k_is_what_drawing_k_of_the_samples_gives():
    verdicts = [[True, False, False, False, True, False], [False] * 6, [True] * 6]
    found = pass_at_k(verdicts)
    assert list(found) == ["pass_at_1", "pass_at_2", "pass_at_4", "pass_at_6"]
    for name, value in found.items():
        k = int(name.removeprefix("pass_at_"))
        drawn = [[any(chosen) for chosen in itertools.combinations(one, k)] for one in verdicts]
        assert value == pytest.approx(sum(sum(one) / len(one) for one in drawn) / len(drawn))
    assert pass_at_k([[True], [False]]) == {"pass_at_1": 0.5}
    assert list(pass_at_k([[True, True], [False] * 3])) == ["pass_at_1", "pass_at_2"]


def test_the_answer_of_the_majority_counts_and_of_a_tie_the_first():
    verdicts = [[True, False, False], [False, True, True], [True, False, False], [False] * 3]
    votes = [[1, 2, 2], [None, 3, 3], [4, 5, 6], [None] * 3]
    assert majority(votes, verdicts) == 2 / 4
