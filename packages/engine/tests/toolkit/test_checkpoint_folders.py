import pytest

from offbeat_engine import CheckpointError, newest_checkpoint
from offbeat_engine.toolkit import checkpoint_folders


def make(root, step, text="x"):
    final = checkpoint_folders.step_path(root, step)
    partial = checkpoint_folders.start_folder(final)
    (partial / checkpoint_folders.META).write_text(text)
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
    assert newest_checkpoint(tmp_path) == tmp_path / "step_10"


def test_a_crashed_start_is_begun_anew_and_a_finished_folder_replaced(tmp_path):
    final = make(tmp_path, 1, "old")
    (checkpoint_folders.start_folder(final) / "rubbish").write_text("from a crash")
    make(tmp_path, 1, "new")
    assert sorted(path.name for path in final.iterdir()) == ["deep", checkpoint_folders.META]
    assert (final / checkpoint_folders.META).read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [3, 5]), (9, [1, 3, 5])])
def test_pruning_keeps_the_newest(tmp_path, keep, left):
    for step in (3, 1, 5):
        make(tmp_path / "local", step)
        checkpoint_folders.upload(tmp_path / "local" / f"step_{step}", f"file://{tmp_path}/remote")
    checkpoint_folders.prune(tmp_path / "local", keep)
    checkpoint_folders.prune_remote(f"file://{tmp_path}/remote", keep)
    assert checkpoint_folders.whole_steps(tmp_path / "local") == left
    assert checkpoint_folders.remote_steps(f"file://{tmp_path}/remote") == left


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_remote_copy_comes_back_equal_and_counts_only_with_its_marker(tmp_path, scheme):
    remote = f"{scheme}://{tmp_path}/remote"
    final = make(tmp_path / "local", 4, "hello")
    checkpoint_folders.upload(final, remote)
    checkpoint_folders.upload(final, remote)  # overwriting is ordinary
    assert checkpoint_folders.remote_steps(remote) == [4]
    back = checkpoint_folders.download(remote, 4, tmp_path / "elsewhere")
    assert (back / checkpoint_folders.META).read_text() == "hello"
    assert (back / "deep" / "data.bin").read_bytes() == b"12345"

    file_system, root = checkpoint_folders._open(remote)
    file_system.pipe_file(f"{root}/step_4/deep/data.bin", b"123")
    with pytest.raises(CheckpointError, match="should have 5 bytes, got 3"):
        checkpoint_folders.download(remote, 4, tmp_path / "third")
    assert checkpoint_folders.whole_steps(tmp_path / "third") == []
    file_system.rm_file(f"{root}/step_4/{checkpoint_folders.MARKER}")
    assert checkpoint_folders.remote_steps(remote) == []
