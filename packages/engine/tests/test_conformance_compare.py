"""The comparisons of the suite see what they should: one wrong element, NaN, a missing name, noise that is none."""

from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from offbeat_engine.fsdp2 import Fsdp2Engine
from offbeat_engine.testing import conformance
from offbeat_engine.testing.compare import check_number, check_tensors, check_tokens
from offbeat_engine.testing.runner import BATCHES, Options, Runner
from offbeat_engine.testing.suite import reason_to_skip

BATCH = BATCHES[0]


def predictions():
    values = torch.where(BATCH["loss_mask"], -1.5, 0.0)
    return TensorDict({"logprobs": values, "entropy": values.clone()}, batch_size=[len(values)])


@pytest.mark.parametrize("wrong", [-1.5001, float("nan"), float("inf")])
def test_one_wrong_token_is_named(wrong):
    got = predictions()
    row, position = BATCH["loss_mask"].nonzero()[7].tolist()
    got["entropy"][row, position] = wrong
    says = (
        rf"here: `entropy` of sequence {row}, token {position} .*expected -1\.5, got {wrong}.*1 of \d+ tokens"
    )
    with pytest.raises(AssertionError, match=says):
        check_tokens("here", got, predictions(), BATCH, 1e-5)
    check_tokens("here", predictions(), predictions(), BATCH, 0.0)


def test_what_nobody_asked_for_must_be_zero():
    got = predictions()
    got["logprobs"][2, 0] = 1e-9
    with pytest.raises(AssertionError, match=r"sequence 2, token 0 .*outside `loss_mask` it must be zero"):
        check_tokens("here", got, predictions(), BATCH, 1e-5)


def test_missing_predictions_and_rows_are_named():
    with pytest.raises(AssertionError, match="`entropy` is not among the predictions, only logprobs"):
        check_tokens("here", predictions().exclude("entropy"), predictions(), BATCH, 1e-5)
    with pytest.raises(AssertionError, match=r"`logprobs` should be \[9, 24\], got \[8, 24\]"):
        check_tokens("here", predictions()[:-1], predictions(), BATCH, 1e-5)


def tensors():
    draw = torch.Generator().manual_seed(0)
    return {"big": torch.randn(8, 8, generator=draw), "small": 1e-2 * torch.randn(4, generator=draw)}


@pytest.mark.parametrize(("name", "place"), [("big", (3, 5)), ("small", (2,))])
@pytest.mark.parametrize("off", [1.001, float("nan")])
def test_one_wrong_element_is_named(name, place, off):
    got = tensors()
    got[name][place] *= off
    at = ", ".join(map(str, place))
    with pytest.raises(
        AssertionError, match=rf"here: `{name}` at \[{at}\]: expected .*, got .*1 of 2 tensors"
    ):
        check_tensors("here", got, tensors(), 1e-4)
    check_tensors("here", tensors(), tensors(), 0.0)


def test_the_rounding_of_large_tensors_is_not_held_against_a_tiny_one():
    expected = {**tensors(), "tiny": torch.full((4,), 1e-9)}
    check_tensors("here", {**expected, "tiny": torch.full((4,), 3e-9)}, expected, 1e-4)
    with pytest.raises(AssertionError, match="`tiny` at"):
        check_tensors("here", {**expected, "tiny": torch.full((4,), 3e-6)}, expected, 1e-4)


def test_the_scale_of_an_error_may_be_how_far_a_tensor_moved():
    expected = tensors()
    moved = {name: 1e-3 * tensor for name, tensor in expected.items()}
    got = {name: tensor * (1 + 1e-5) for name, tensor in expected.items()}
    check_tensors("here", got, expected, 1e-4)
    with pytest.raises(AssertionError, match=r"relative error of the tensor 0\.01"):
        check_tensors("here", got, expected, 1e-3, moved)


def test_names_must_be_the_same():
    got = tensors()
    got["bigger"] = got.pop("big")
    with pytest.raises(AssertionError, match="missing: big; unexpected: bigger"):
        check_tensors("here", got, tensors(), 1.0)


def test_a_number_that_is_none_is_never_close():
    check_number("here", 1.0, 1.0, 0.0)
    for wrong in (float("nan"), 1.0001):
        with pytest.raises(AssertionError, match=rf"here: expected 1\.0, got {wrong}"):
            check_number("here", wrong, 1.0, 1e-6)


def test_a_family_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match=r"`families` must be some of qwen2, .*; got \('qwen99',\)"):
        conformance(Fsdp2Engine, families=["qwen99"])


def test_features_and_ranks_decide_what_is_skipped():
    class Single(Fsdp2Engine):
        @classmethod
        def capabilities(cls):
            return replace(super().capabilities(), max_ranks=1)

    runner = Runner(Options(engine=Single, families=("qwen2",)))
    from offbeat_engine.testing.suite import cases

    reasons = {
        case.name: reason_to_skip(case, Single.capabilities(), runner.options)
        for case in cases(runner.options)
    }
    assert reasons["training_qwen2_two_ranks"] == "fsdp2 runs on at most 1 rank(s), the case takes 2"
    assert reasons["training_qwen2_frozen"] is None  # one rank will do
    runner.close()
