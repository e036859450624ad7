"""A call's micro-batches where only the last of the ranks that share a batch has outputs, as with pipelines."""

import pytest
import torch

from offbeat_engine import SftLoss, StepContext, StepError
from offbeat_engine.testing import random_batch
from offbeat_engine.toolkit.collectives import compute_device
from offbeat_engine.toolkit.step.micro_batches import MicroBatches, StepRequest

PLAN = [[2, 0], [1]]


def added(predictions, batch, ctx):
    """Give every token a key of the hook's own."""
    predictions["twice"] = 2 * predictions["logprobs"].detach()
    return predictions


def failing(predictions, batch, scale):
    raise ArithmeticError("this loss fails")


def one_call(world, loss_fn):
    """Run a call in which rank 1 has no outputs: it has no predictions, and calls neither `loss` nor `take`."""
    leads = world.rank == 0
    batch, ctx = random_batch(3), StepContext()
    run = MicroBatches(
        StepRequest(
            world=world, device=compute_device(world), names=("logprobs", "entropy"), data_rank=0, data_size=1,
            leads=leads, loss_fn=loss_fn, postprocess_fn=added,
        ),
        batch,
        ctx,
        lambda _: PLAN,
    )  # fmt: skip
    assert run.num_micro == len(PLAN)
    grads = []
    for number in range(run.num_micro):
        rows = run.rows(number)
        if leads:
            logprobs = (-0.01 * rows["input_ids"]).requires_grad_()
            loss = run.loss(
                number, {"logprobs": logprobs, "entropy": torch.ones_like(logprobs.detach())}, logprobs
            )
            loss.backward()
            grads.append(logprobs.grad)
        if run.failed():
            break
    answers = run.finish({"own": 1.0 + world.rank})
    return dict(answers.items()), ctx.stats, grads


def test_statistics_come_to_all_and_predictions_stay_where_they_are(two_ranks):
    (mine, stats, grads), (others, told, none) = two_ranks.run(one_call, SftLoss())
    batch = random_batch(3)
    mask, expected = batch["loss_mask"], -0.01 * batch["input_ids"]
    assert mine.keys() == {"logprobs", "entropy", "twice"}
    assert others == {}  # it keeps nothing of its sequences, and says so by having no keys
    assert torch.equal(mine["logprobs"][mask], expected[mask])
    assert torch.equal(mine["twice"][mask], 2 * expected[mask])
    assert stats == told
    assert stats.loss == pytest.approx(float(-expected[mask].mean()))
    assert (stats.num_tokens, stats.num_micro_batches) == (int(batch["lengths"].sum()), 2)
    assert stats.engine == {"own": 1.0}  # a group of ranks counts once
    assert none == []
    for rows, grad in zip(PLAN, grads, strict=True):
        width = grad.shape[1]
        assert torch.allclose(grad, -mask[rows, :width].float() / mask.sum())


def refused(world):
    with pytest.raises(StepError, match="rank 0: ArithmeticError: this loss fails") as caught:
        one_call(world, failing)
    return str(caught.value)


def test_what_its_loss_raises_is_raised_on_the_rank_without_one(two_ranks):
    left, right = two_ranks.run(refused)
    assert left == right
