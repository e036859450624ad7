"""A reward model as a scorer: the scores are those of its engine, and a wait ends."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification

from offbeat_engine.testing import make_tiny_model
from offbeat_recipes.library.reward_model import ModelScorer
from offbeat_rollout import Completion, Finish
from offbeat_trainer import Group, Prompt, RewardConfig, RewardFailed, TrainerError, Trajectory, Turn
from offbeat_trainer.config import OnFailure

if TYPE_CHECKING:
    from pathlib import Path


def completion(*ids: int) -> Completion:
    return Completion.of(
        request_id="r", token_ids=list(ids), logprobs=[-1.0] * len(ids), policy_versions=[1] * len(ids),
        finish=Finish.STOP,
    )  # fmt: skip


EDITED = Trajectory(
    finish=Finish.STOP,
    turns=(
        Turn(completion=completion(7)),
        Turn(completion=completion(8, 4), context=np.array([1, 9], np.int32)),
    ),
)
GROUP = Group(
    prompt=Prompt(uid="p", text="", token_ids=(1, 2, 3)),
    trajectories=(Trajectory.of(completion(5, 6, 4)), Trajectory.of(completion(9)), EDITED),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reward") / "model"
    make_tiny_model(path, family="llama", head="value")
    return path


async def test_a_score_is_that_of_the_head_at_the_last_token(folder: Path):
    scorer = ModelScorer(RewardConfig(model=str(folder)))
    found = await scorer.score(GROUP)
    again = await scorer.score(GROUP)
    await scorer.close()
    await scorer.close()
    plain = AutoModelForTokenClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = [
            float(plain(torch.tensor([ids])).logits[0, -1, 0])
            for ids in ([1, 2, 3, 5, 6, 4], [1, 2, 3, 9], [1, 9, 8, 4])
        ]
    assert [score.reward for score in found.scores] == pytest.approx(wanted, abs=1e-5)
    assert again.scores == found.scores
    assert len(set(wanted)) == 3
    assert {score.correct for score in found.scores} == {None}


@pytest.mark.parametrize(("on_failure", "error"), [("drop", RewardFailed), ("stop", TrainerError)])
async def test_a_model_that_takes_too_long_fails_its_group(
    folder: Path, on_failure: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
):
    scorer = ModelScorer(RewardConfig(model=str(folder), timeout_s=0.01, on_failure=OnFailure(on_failure)))
    monkeypatch.setattr(scorer, "_rewards", lambda group: time.sleep(0.5))
    with pytest.raises(error, match=r"took longer than 0.01 s for p"):
        await scorer.score(replace(GROUP))
    await scorer.close()
