import threading

import pytest
import xxhash

from offbeat_engine import CheckpointError
from offbeat_engine.toolkit.state.checkpoint_folders import check_entries, entries_of, in_threads


def test_a_digest_is_of_the_whole_file(tmp_path):
    sizes = {"empty": 0, "small": 5, "block": 1 << 20, "more": (1 << 20) + 1}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(range(256)) * (size // 256) + b"x" * (size % 256))
    entries = entries_of(tmp_path, sizes)
    for name, size in sizes.items():
        assert entries[name] == (size, xxhash.xxh3_128((tmp_path / name).read_bytes()).hexdigest())
    check_entries(tmp_path, entries, "here")


def test_the_last_byte_of_a_large_file_counts(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(b"a" * (3 << 20))
    entries = entries_of(tmp_path, ["large"])
    path.write_bytes(b"a" * ((3 << 20) - 1) + b"b")
    with pytest.raises(CheckpointError, match="here/large has the right size, but other bytes"):
        check_entries(tmp_path, entries, "here")
    path.unlink()
    with pytest.raises(
        CheckpointError, match="here/large should have 3145728 bytes, but there is no such file"
    ):
        check_entries(tmp_path, entries, "here")


def test_several_at_a_time_answer_in_order_and_the_first_error_is_raised():
    both = threading.Barrier(2, timeout=60)

    def act(name):
        if name in "ab":
            both.wait()  # ends only if two run at once
        if name == "d":
            raise KeyError(name)
        return name.upper()

    assert in_threads(act, "abc") == ["A", "B", "C"]
    assert in_threads(act, "") == []
    with pytest.raises(KeyError, match="d"):
        in_threads(act, "cd")
