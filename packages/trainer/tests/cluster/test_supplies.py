from __future__ import annotations

import pytest

from offbeat_trainer.cluster import replicas
from offbeat_trainer.errors import PlanRefused


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "here"
    (folder / "more").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "empty").touch()
    (folder / "more" / "weights").write_bytes(bytes(range(256)) * 5)
    return folder


def brought(model, there):
    for name, piece in replicas._pieces(model):
        assert len(piece) <= replicas.PIECE_BYTES
        replicas.take_piece(there, name, piece)
        assert not there.exists()
    replicas.take_piece(there, "", None)


def test_a_folder_appears_whole_when_its_last_piece_has_come(tmp_path, model, monkeypatch):
    monkeypatch.setattr(replicas, "PIECE_BYTES", 100)
    there = tmp_path / "of another machine" / "base"
    brought(model, there)
    assert contents(there) == contents(model)
    assert len(contents(there)) == 3
    assert [path.name for path in there.parent.iterdir()] == ["base"]


def test_what_a_killed_process_of_the_same_id_left_is_not_added_to(tmp_path, model):
    there = tmp_path / "there"
    replicas.take_piece(there, "config.json", b"{}")
    replicas.take_piece(there, "more/old", b"x")
    brought(model, there)
    assert contents(there) == contents(model)


def test_a_folder_that_somebody_else_has_put_there_stays(tmp_path, model):
    there = tmp_path / "there"
    replicas.take_piece(there, "config.json", b"[]")
    there.mkdir()
    replicas.take_piece(there, "", None)
    assert contents(there) == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "there"]


def test_a_place_that_cannot_be_written_is_named_with_the_remedy(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        PlanRefused, match=r"is not on this machine and could not be brought here .*put it there"
    ):
        replicas.take_piece(tmp_path / "file" / "base", "config.json", b"{}")
