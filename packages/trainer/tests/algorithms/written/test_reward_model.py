"""The loss of a reward model beside its formula, and a saved one that scores as the one that was trained."""

import math
from dataclasses import replace

import pytest
import torch

from offbeat_engine import Fsdp2Config, ModelConfig, World, engine_class
from offbeat_engine.testing import make_tiny_model
from offbeat_trainer import PlanRefused, RewardModel, assemble_examples
from offbeat_trainer.algorithms.roles import role_engines
from offbeat_trainer.algorithms.written.config import RewardModelConfig
from offbeat_trainer.algorithms.written.reward_model import RewardModelLoss, RewardModelTraining
from offbeat_trainer.data.types import Example
from rows import call, counts, learned, pairs

CONFIG = RewardModelConfig(margin=0.4, centre_coef=0.1)
TRAINING = RewardModelTraining(config=CONFIG)
LOSS = RewardModelLoss(config=CONFIG)


def case(seed=0):
    batch = TRAINING.batch(pairs(5, seed))
    draw = torch.Generator().manual_seed(seed)
    values_BT = torch.randn(batch["loss_mask"].shape, generator=draw, dtype=torch.float64)
    return batch, values_BT * batch["loss_mask"]


def reference(batch, values_BT):
    scores = [
        row[length - 1] for row, length in zip(values_BT.tolist(), batch["lengths"].tolist(), strict=True)
    ]
    both = list(zip(scores[::2], scores[1::2], strict=True))
    return sum(math.log1p(math.exp(-(c - r - 0.4))) + 0.1 * (c + r) ** 2 for c, r in both) / len(both)


def test_a_score_is_asked_for_after_the_last_token_of_each_completion():
    batch = TRAINING.batch(pairs(5))
    for index, pair in enumerate(pairs(5)):
        for row, ids in ((2 * index, pair.chosen_ids), (2 * index + 1, pair.rejected_ids)):
            length = len(pair.prompt_ids) + len(ids)
            assert batch["input_ids"][row, :length].tolist() == [*pair.prompt_ids, *ids]
            assert batch["loss_mask"][row].nonzero()[:, 0].tolist() == [length]
            assert (int(batch["unit"][row]), bool(batch["dpo/chosen"][row])) == (index, row % 2 == 0)


@pytest.mark.parametrize("seed", range(3))
def test_the_loss_and_its_gradient_are_those_of_the_formula_however_pairs_are_cut(seed):
    batch, values_BT = case(seed)
    scale, wanted = counts(batch), reference(batch, values_BT)
    parts = [torch.tensor([9, 0, 8, 1]), torch.arange(2, 8)]
    leaf_BT = values_BT.clone().requires_grad_()
    for cut in (parts, [torch.arange(10)]):
        losses = [call(LOSS, leaf_BT[part], batch[part], scale, key="values").loss for part in cut]
        assert float(sum(losses).detach()) == pytest.approx(wanted, abs=1e-9)
    sum(losses).backward()
    for row, length in enumerate(batch["lengths"].tolist()):
        step = torch.zeros_like(values_BT)
        step[row, length - 1] = 1e-6
        slope = (reference(batch, values_BT + step) - reference(batch, values_BT - step)) / 2e-6
        assert float(leaf_BT.grad[row, length - 1]) == pytest.approx(slope, abs=1e-7)


def test_a_wrong_sign_margin_or_count_is_seen():
    batch, values_BT = case()
    right, swapped = reference(batch, values_BT), batch.clone()
    swapped["dpo/chosen"] = ~batch["dpo/chosen"]
    without = RewardModelLoss(config=RewardModelConfig(centre_coef=0.1))
    for output in (
        call(LOSS, values_BT, swapped, key="values"),
        call(without, values_BT, batch, key="values"),
        call(LOSS, values_BT, batch, replace(counts(batch), num_units=10), key="values"),
    ):
        assert abs(float(output.loss) - right) > 1e-3


def test_only_a_run_that_generates_nothing_may_train_a_value_head_alone(tmp_path):
    told = Fsdp2Config(model=ModelConfig(path=str(tmp_path)))
    made = role_engines(TRAINING.roles(), told, infers_alone=True, generates=False)
    assert made["policy"].model.head == "value"
    with pytest.raises(PlanRefused, match="has the head 'lm'"):
        role_engines(TRAINING.roles(), told, infers_alone=True)


def test_it_learns_the_pairs_and_what_it_saves_scores_the_same(tmp_path):
    algorithm = RewardModelTraining(config=RewardModelConfig(centre_coef=0.01))
    path = make_tiny_model(tmp_path / "tiny")
    batch = algorithm.batch(pairs(8))
    (before, *_, after), roles = learned(algorithm, path, batch, steps=20)
    assert after["accuracy/validation"] == 1
    assert after["validation/loss"] < 0.3 < before["validation/loss"]
    roles["policy"].engine.export_huggingface(str(tmp_path / "saved"))
    engine = engine_class("fsdp2")(
        Fsdp2Config(model=ModelConfig(path=str(tmp_path / "saved"), head="value"), inference_only=True),
        World(),
    )
    engine.init_model()
    rows = [
        Example(prompt_ids=one.prompt_ids, completion_ids=ids)
        for one in pairs(8)
        for ids in (one.chosen_ids, one.rejected_ids)
    ]
    scores_B = RewardModel(engine).scores(assemble_examples(rows))
    assert (scores_B[::2] > scores_B[1::2]).all()
    margin = float((scores_B[::2] - scores_B[1::2]).mean())
    assert margin == pytest.approx(after["validation/reward_margin"], abs=1e-4)
