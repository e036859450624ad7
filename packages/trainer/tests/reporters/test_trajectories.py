"""Trajectories of each step in files: whole, within a budget, taken back where a run repeats steps."""

import gzip
import json
import random

import numpy as np
import pytest
import torch

from offbeat_rollout import Completion, Finish
from offbeat_trainer.data.types import Group, Prompt, Score, Trajectory, Turn
from offbeat_trainer.watch import jsonl
from offbeat_trainer.watch.fanout import FanOut
from offbeat_trainer.watch.jsonl import Silent, TrajectoryReporter, pieces_of

SCORED = (Score(reward=1.0, correct=True, parts={"form": 0.5}),)


def decode(token_ids):
    return " ".join(map(str, token_ids))


def completion(tokens, versions):
    return Completion.of(
        request_id="r",
        token_ids=tokens,
        logprobs=[-0.5] * len(tokens),
        policy_versions=versions,
        finish=Finish.STOP,
    )


def a_group(uid="u", tokens=(1, 2), scores=SCORED):
    made = Trajectory.of(completion(tokens, [3] * len(tokens)))
    return Group(prompt=Prompt(uid=uid, text="1+1=", token_ids=(1,)), trajectories=(made,), scores=scores)


def read(folder):
    files = (folder / "trajectories").glob("step_*.jsonl.gz")
    return {
        path.name.split(".")[0]: [
            json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()
        ]
        for path in files
    }


@pytest.fixture
def reporter(tmp_path):
    made = TrajectoryReporter(tmp_path, groups_per_step=None, max_bytes=1 << 20)
    yield made
    made.close()


def test_a_line_holds_a_trajectory_whole(reporter, tmp_path):
    turns = (
        Turn(completion=completion((1, 2, 3), (3, 3, 4)), reward=0.25),
        Turn(observed=np.array([7, 8], np.int32), completion=completion((9,), (4,)), reward=0.75),
    )
    group = Group(
        prompt=Prompt(uid="u", text="1+1=", token_ids=(1,)),
        trajectories=(Trajectory(turns=turns, finish=Finish.LENGTH),),
        scores=(Score(reward=1.0),),
    )
    advantages = [torch.tensor([0.5, 0.5, 1.0, 0.0, 0.0, -0.25]), torch.tensor([2.0, -2.0])]
    reporter.trajectories(5, [group, a_group("v")], decode, advantages)
    reporter.close()
    [first, second] = read(tmp_path)["step_5"]
    assert first["turns"] == [
        {
            "role": "policy",
            "text": "1 2 3",
            "token_ids": [1, 2, 3],
            "logprobs": [-0.5] * 3,
            "versions": [[3, 2], [4, 1]],
            "advantages": [0.5, 0.5, 1.0],
            "reward": 0.25,
            "pieces": ["1", " 2", " 3"],
        },
        {"role": "environment", "text": "7 8", "token_ids": [7, 8]},
        {
            "role": "policy",
            "text": "9",
            "token_ids": [9],
            "logprobs": [-0.5],
            "versions": [[4, 1]],
            "advantages": [-0.25],
            "reward": 0.75,
            "pieces": ["9"],
        },
    ]
    assert (first["completion"], first["num_tokens"], first["finish"]) == ("1 2 3 7 8 9", 6, "length")
    assert (first["reward"], first["correct"], first["parts"]) == (1.0, None, {})
    assert second["turns"][0]["advantages"] == [2.0, -2.0]
    assert (second["uid"], second["correct"], second["parts"]) == ("v", True, {"form": 0.5})


def bytes_decoded(token_ids):
    """As a tokenizer of bytes does: one that is no character yet is shown as such."""
    return bytes(token_ids).decode("utf-8", "replace")


def test_a_token_that_ends_within_a_character_leaves_it_to_the_one_that_completes_it():
    text = "aé€𝄞b"
    pieces = pieces_of(list(text.encode()), bytes_decoded)
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "𝄞", "b"]
    broken = [0x9D, *b"ab", 0xE2, 0x82]
    assert "".join(pieces_of(broken, bytes_decoded)) == bytes_decoded(broken)
    assert pieces_of([], bytes_decoded) == []


def test_of_bytes_that_are_no_character_only_a_few_are_decoded_together():
    asked = []
    pieces = pieces_of([0x9D] * 300, lambda ids: asked.append(len(ids)) or bytes_decoded(ids))
    assert len(pieces) == 300
    assert max(asked) <= 8


def test_a_space_that_a_tokenizer_drops_at_the_front_is_in_the_piece():
    pieces = pieces_of([0, 1, 2], lambda ids: "".join([" one", " two", "!"][one] for one in ids).lstrip())
    assert pieces == ["one", " two", "!"]


def test_where_parts_decode_to_another_text_than_the_whole_no_pieces_are_kept(reporter, tmp_path):
    reporter.trajectories(
        1, [a_group(tokens=(1, 2, 3))], lambda ids: "".join(sorted(map(str, ids), reverse=True))
    )
    reporter.close()
    [[turn]] = [row["turns"] for row in read(tmp_path)["step_1"]]
    assert turn["text"] == "321"
    assert "pieces" not in turn
    assert "advantages" not in turn, "nobody said any"


def test_pieces_are_kept_of_so_many_tokens_a_step(reporter, tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "MAX_PIECES", 5)
    for step in (1, 2):
        reporter.trajectories(step, [a_group(str(at)) for at in range(4)], decode)
    reporter.close()
    for rows in read(tmp_path).values():
        assert ["pieces" in row["turns"][0] for row in rows] == [True, True, False, False]


def test_so_many_groups_a_step(tmp_path):
    reporter = TrajectoryReporter(tmp_path, groups_per_step=2, max_bytes=1 << 20)
    reporter.trajectories(1, [a_group(str(at), scores=()) for at in range(5)], decode)
    reporter.close()
    assert [row["uid"] for row in read(tmp_path)["step_1"]] == ["0", "1"]


def test_beyond_the_budget_the_oldest_steps_go(tmp_path):
    reporter = TrajectoryReporter(tmp_path, groups_per_step=None, max_bytes=8000)
    draw = random.Random(0)
    for step in range(1, 12):  # so many digits that "step_10" sorts before "step_2" as text
        reporter.trajectories(step, [a_group(tokens=[draw.randrange(10**6) for _ in range(200)])], decode)
    reporter.close()
    kept = sorted(int(name.removeprefix("step_")) for name in read(tmp_path))
    assert 1 < len(kept) < 11
    assert kept == list(range(12 - len(kept), 12))
    assert sum(path.stat().st_size for path in (tmp_path / "trajectories").iterdir()) <= 8000


def test_steps_that_are_repeated_are_taken_back(reporter, tmp_path):
    for step in (1, 2, 3):
        reporter.trajectories(step, [a_group()], decode)
    reporter.close()
    again = TrajectoryReporter(tmp_path, groups_per_step=None, max_bytes=1 << 20)
    FanOut([again]).truncate_after(1)
    again.close()
    assert read(tmp_path).keys() == {"step_1"}


def test_a_failure_is_told_once_and_those_that_come_later_are_kept(tmp_path, capsys):
    reporter = TrajectoryReporter(tmp_path, groups_per_step=None, max_bytes=1 << 20)
    (tmp_path / "trajectories" / "step_1.jsonl.gz.writing").mkdir()
    several = FanOut([Silent(), reporter])
    for step in (1, 2, 3):
        several.trajectories(step, [a_group()], decode)
    several.close()
    assert several.lost == {"TrajectoryReporter": 1}
    assert "could not write and tries again" in capsys.readouterr().err
    assert read(tmp_path).keys() == {"step_3"}, "what was to be told with the failure is lost with it"
