import json

import pytest

from offbeat_engine import CheckpointError, ConfigError
from offbeat_engine.toolkit.state import checkpoint_folders


def make(root, step, said=None):
    final = checkpoint_folders.step_path(root, step)
    partial = checkpoint_folders.start_folder(final)
    said = {"order": checkpoint_folders.next_order(root), **(said or {})}
    (partial / checkpoint_folders.META).write_text(json.dumps(said))
    (partial / "deep").mkdir()
    (partial / "deep" / "data.bin").write_bytes(b"12345")
    checkpoint_folders.finish_folder(final)
    return final


def test_only_finished_folders_are_checkpoints(tmp_path):
    make(tmp_path, 2)
    make(tmp_path, 10)
    started = checkpoint_folders.start_folder(checkpoint_folders.step_path(tmp_path, 11))
    (started / checkpoint_folders.META).write_text("{}")  # killed just before the rename
    (tmp_path / "step_12").mkdir()  # somebody's empty folder
    (tmp_path / "step_x").mkdir()
    assert checkpoint_folders.whole_steps(tmp_path) == [2, 10]


def test_a_crashed_start_is_begun_anew_and_a_finished_folder_replaced(tmp_path):
    final = make(tmp_path, 1, {"said": "old"})
    (checkpoint_folders.start_folder(final) / "rubbish").write_text("from a crash")
    make(tmp_path, 1, {"said": "new"})
    assert sorted(path.name for path in final.iterdir()) == ["deep", checkpoint_folders.META]
    assert checkpoint_folders.read_meta(final)["said"] == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


@pytest.mark.parametrize(("keep", "left"), [(1, [4]), (2, [4, 50]), (3, [1, 4, 50]), (9, [1, 3, 4, 50])])
def test_pruning_keeps_what_was_written_last_whatever_its_step(tmp_path, keep, left):
    for step in (3, 1, 50, 4):
        make(tmp_path, step)
    checkpoint_folders.prune(tmp_path, keep)
    assert checkpoint_folders.whole_steps(tmp_path) == left


def test_what_does_not_say_when_it_was_written_goes_first_and_by_step(tmp_path):
    for step in (100, 200):
        (make(tmp_path, step) / checkpoint_folders.META).write_text('{"format": 1}')
    make(tmp_path, 10)
    checkpoint_folders.prune(tmp_path, 2)
    assert checkpoint_folders.whole_steps(tmp_path) == [10, 200]


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none_is_refused(tmp_path, keep):
    make(tmp_path, 1)
    with pytest.raises(ConfigError, match=f"must be at least 1, got {keep}; use None to keep all"):
        checkpoint_folders.prune(tmp_path, keep)
    assert checkpoint_folders.whole_steps(tmp_path) == [1]


@pytest.mark.parametrize("text", ["half of {", "[1]"])
def test_a_folder_that_says_nonsense_of_itself_is_named(tmp_path, text):
    (make(tmp_path, 1) / checkpoint_folders.META).write_text(text)
    with pytest.raises(
        CheckpointError, match=r"step_1/engine\.json (cannot be read|should hold a JSON object)"
    ):
        checkpoint_folders.read_meta(tmp_path / "step_1")
