import pytest

from offbeat_recipes.tasks.chars import make_whole


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_folder_appears_only_when_it_is_full(tmp_path):
    folder = tmp_path / "deep" / "made"

    def fill(beside):
        (beside / "a").write_text("1")
        assert not folder.exists()
        assert beside.parent == folder.parent, "a rename is atomic only within one file system"
        (beside / "b").write_text("2")

    make_whole(folder, fill)
    assert names(folder) == ["a", "b"]
    assert names(folder.parent) == ["made"]


def test_the_first_one_wins_and_the_others_work_is_dropped(tmp_path):
    folder = tmp_path / "made"

    def overtaken(beside):
        folder.mkdir()  # another process is done first
        (folder / "theirs").write_text("")
        (beside / "ours").write_text("")

    make_whole(folder, overtaken)
    assert names(folder) == ["theirs"]
    assert names(tmp_path) == ["made"]


def test_a_failed_fill_leaves_nothing_that_a_second_try_would_publish(tmp_path):
    folder = tmp_path / "made"

    def fails(beside):
        (beside / "half").write_text("")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        make_whole(folder, fails)
    assert names(tmp_path) == []
    make_whole(folder, lambda beside: (beside / "whole").touch())
    assert names(folder) == ["whole"]


def test_leftovers_of_a_killed_process_with_the_same_id_are_not_published(tmp_path):
    seen = []
    with pytest.raises(KeyError):
        make_whole(tmp_path / "made", lambda beside: (seen.append(beside), {}["stop here"]))
    seen[0].mkdir()
    (seen[0] / "stale").write_text("")
    make_whole(tmp_path / "made", lambda beside: (beside / "whole").touch())
    assert names(tmp_path / "made") == ["whole"]


def test_a_file_in_the_way_is_an_error_and_stays(tmp_path):
    (tmp_path / "made").write_text("a file")
    with pytest.raises(NotADirectoryError):
        make_whole(tmp_path / "made", lambda beside: (beside / "x").touch())
    assert (tmp_path / "made").read_text() == "a file"
    assert names(tmp_path) == ["made"]
