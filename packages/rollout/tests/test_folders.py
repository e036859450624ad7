"""Folders go with who made them, however that goes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from offbeat_rollout.toolkit.folders import HeldFolder

HOLDER = """
import sys
from pathlib import Path
from offbeat_rollout.toolkit.folders import HeldFolder
held = HeldFolder(Path(sys.argv[1]))
(held.path / "model.safetensors").write_text("new weights")
print(held.path, flush=True)
sys.stdin.read()
"""


@pytest.mark.spawns
def test_what_a_killed_process_left_goes_with_the_next_and_what_is_held_stays(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        theirs = tmp_path / holder.stdout.readline().strip()
        mine = HeldFolder(tmp_path)
        assert [*theirs.iterdir()], "its process is there"
        holder.kill()
        holder.wait()
        assert theirs.exists(), "nobody has looked yet"
    another = HeldFolder(tmp_path)
    assert {*tmp_path.iterdir()} == {mine.path, another.path}
    mine.close()
    another.close()
    assert not [*tmp_path.iterdir()]


def test_where_there_is_no_such_place_it_lies_among_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    held = HeldFolder(tmp_path / "none")
    assert held.path.parent == tmp_path
    held.close()


def test_what_others_have_named_alike_stays(tmp_path):
    theirs = [
        tmp_path / name
        for name in ("offbeat-sglang-models", "offbeat-vllm-abcdefgh", "offbeat-sglang-held-models-of-mine")
    ]
    for folder in theirs:
        folder.mkdir()
    held = HeldFolder(tmp_path)
    held.close()
    assert {*tmp_path.iterdir()} == {*theirs}
