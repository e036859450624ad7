"""Copies at an fsspec URL: whole by their marker, compared with its digests, and never outside their folder."""

import json

import pytest

from offbeat_engine import CheckpointError, ConfigError
from offbeat_engine.toolkit.state import checkpoint_folders
from offbeat_engine.toolkit.state.checkpoint_folders import entry_of


def make(root, step, data=b"12345"):
    """Return a checkpoint folder that lists its data file, as an engine writes it."""
    final = checkpoint_folders.step_path(root, step)
    partial = checkpoint_folders.start_folder(final)
    (partial / "deep").mkdir()
    (partial / "deep" / "data.bin").write_bytes(data)
    said = {
        "order": checkpoint_folders.next_order(root),
        "files": {"deep/data.bin": entry_of(partial / "deep" / "data.bin")},
    }
    (partial / checkpoint_folders.META).write_text(json.dumps(said))
    checkpoint_folders.finish_folder(final)
    return final


@pytest.fixture(params=["file", "memory"])
def remote(request, tmp_path):
    return f"{request.param}://{tmp_path}/remote"


def write(remote, name, data):
    file_system, root = checkpoint_folders._open(remote)
    file_system.pipe_file(f"{root}/{name}", data)


def read_marker(remote, step):
    file_system, root = checkpoint_folders._open(remote)
    return json.loads(file_system.cat_file(f"{root}/step_{step}/{checkpoint_folders.MARKER}"))


def test_a_copy_comes_back_equal_and_counts_only_with_its_marker(tmp_path, remote):
    final = make(tmp_path / "local", 4)
    checkpoint_folders.upload(final, remote)
    checkpoint_folders.upload(final, remote)  # overwriting is ordinary
    assert checkpoint_folders.remote_steps(remote) == [4]
    back = checkpoint_folders.download(remote, 4, tmp_path / "elsewhere")
    assert checkpoint_folders.read_meta(back) == checkpoint_folders.read_meta(final)
    assert (back / "deep" / "data.bin").read_bytes() == b"12345"
    file_system, root = checkpoint_folders._open(remote)
    file_system.rm_file(f"{root}/step_4/{checkpoint_folders.MARKER}")
    assert checkpoint_folders.remote_steps(remote) == []


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("deep/data.bin", b"123", "should have 5 bytes, got 3"),
        ("deep/data.bin", b"12354", "has the right size, but other bytes than were written"),
        (checkpoint_folders.META, b"{}", r"engine\.json should have \d+ bytes, got 2"),
    ],
)
def test_a_copy_that_is_not_what_was_written_never_becomes_a_checkpoint(tmp_path, remote, name, data, said):
    checkpoint_folders.upload(make(tmp_path / "local", 4), remote)
    write(remote, f"step_4/{name}", data)
    with pytest.raises(CheckpointError, match=f"{name}.*{said}|{said}"):
        checkpoint_folders.download(remote, 4, tmp_path / "back")
    assert checkpoint_folders.whole_steps(tmp_path / "back") == []


def test_what_rots_on_the_local_disk_before_the_upload_is_noticed(tmp_path, remote):
    final = make(tmp_path / "local", 4)
    (final / "deep" / "data.bin").write_bytes(b"54321")
    checkpoint_folders.upload(final, remote)
    with pytest.raises(CheckpointError, match="other bytes than were written"):
        checkpoint_folders.download(remote, 4, tmp_path / "back")


@pytest.mark.parametrize(
    "name", ["../outside", "/outside", "deep/../../outside", "..", "deep//x", "..\\outside"]
)
def test_a_marker_cannot_write_outside_of_the_checkpoint(tmp_path, remote, name):
    checkpoint_folders.upload(make(tmp_path / "local", 4), remote)
    marker = read_marker(remote, 4)
    marker["files"][name] = [4, "0" * 32]
    write(remote, f"step_4/{checkpoint_folders.MARKER}", json.dumps(marker).encode())
    with pytest.raises(CheckpointError, match="which is not inside the checkpoint; do not trust it"):
        checkpoint_folders.download(remote, 4, tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("marker", "said"),
    [
        (b"half of {", "is not JSON"),
        (b"[1]", "should hold a JSON object"),
        (b'{"files": {"engine.json": "x"}}', r"should say \[size, digest\] of engine.json, got 'x'"),
        (b'{"files": {}}', r"does not name engine\.json"),
    ],
)
def test_a_marker_that_makes_no_sense_is_named(tmp_path, remote, marker, said):
    checkpoint_folders.upload(make(tmp_path / "local", 4), remote)
    write(remote, f"step_4/{checkpoint_folders.MARKER}", marker)
    with pytest.raises(CheckpointError, match=f"step_4/COMPLETE.*{said}"):
        checkpoint_folders.download(remote, 4, tmp_path / "back")


def test_a_copy_from_before_there_were_digests_comes_back(tmp_path, remote):
    checkpoint_folders.upload(make(tmp_path / "local", 4), remote)
    sizes = {name: entry[0] for name, entry in read_marker(remote, 4)["files"].items()}
    write(remote, f"step_4/{checkpoint_folders.MARKER}", json.dumps(sizes).encode())
    back = checkpoint_folders.download(remote, 4, tmp_path / "back")
    assert (back / "deep" / "data.bin").read_bytes() == b"12345"
    write(remote, "step_4/deep/data.bin", b"123")
    with pytest.raises(CheckpointError, match="should have 5 bytes, got 3"):
        checkpoint_folders.download(remote, 4, tmp_path / "again")


def test_pruning_keeps_what_was_copied_last(tmp_path, remote):
    for step in (100, 3, 10):
        checkpoint_folders.upload(make(tmp_path / "local", step), remote)
    # Another machine with an empty folder of its own: the order there begins anew, the order here does not.
    checkpoint_folders.upload(make(tmp_path / "fresh", 11), remote)
    checkpoint_folders.prune_remote(remote, 2)
    assert checkpoint_folders.remote_steps(remote) == [10, 11]
    with pytest.raises(ConfigError, match="must be at least 1, got 0"):
        checkpoint_folders.prune_remote(remote, 0)
