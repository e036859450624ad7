"""Which tensors are where, and when the host waits for the device: seen without one, on tensors that have no values."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from offbeat_engine import Fsdp2Config, LossOutput, ModelConfig, SftLoss, StepContext, StepError, World
from offbeat_engine.fsdp2 import Fsdp2Engine
from offbeat_engine.testing import FakeCuda, pretend_on_cuda
from offbeat_engine.testing.compare import ValueLoss, WeightedLoss
from offbeat_engine.testing.models import scored_batch


@pytest.fixture
def engine(tiny):
    """Two or three micro-batches of its batches; no device yet."""
    made = Fsdp2Engine(Fsdp2Config(model=ModelConfig(path=tiny), micro_batch_tokens=40), World())
    made.init_model()
    return made


def pair(predictions, batch, ctx):
    """Mix predictions and batch, as a hook would; they must be on one device."""
    return predictions.update(
        {"mine": predictions["logprobs"] * batch["advantages"], "long": batch["lengths"]}
    )


def seen_by(devices):
    def look(batch, ctx):
        devices.add(batch["input_ids"].device.type)
        return batch

    return look


def test_a_device_mix_up_raises_and_values_are_none():
    with FakeCuda() as cuda:
        there, here = torch.arange(4).to("cuda", non_blocking=True), torch.arange(4)
        assert isinstance(there, FakeTensor)
        with pytest.raises(RuntimeError, match=r"FakeTensor Device|same device|two different devices"):
            there + here
        assert (here + here).tolist() == [0, 2, 4, 6]
        assert cuda.waits == []
        assert there.tolist() == [0, 0, 0, 0]
        assert len(cuda.waits) == 4
        cuda.waits.clear()
        assert (here.to("cuda") + there).device.type == "cuda"
        assert cuda.waits == ["elsewhere"]  # for the copy
    assert not isinstance(torch.arange(4) + 1, FakeTensor)


@pytest.mark.parametrize("forward_only", [True, False])
def test_predictions_come_back_on_the_device_of_the_batch(engine, forward_only):
    asked = set()
    engine.set_loss_fn(WeightedLoss())
    with FakeCuda():
        pretend_on_cuda(engine)
        with engine.eval_mode() if forward_only else engine.train_mode():
            predictions, *_ = engine.forward_backward_step(
                scored_batch(0),
                StepContext(),
                forward_only,
                preprocess_fn=seen_by(asked),
                postprocess_fn=pair,
            )
    assert asked == {"cpu"}
    assert {value.device.type for value in predictions.values()} == {"cpu"}
    assert set(predictions.keys()) == {"logprobs", "entropy", "mine", "long"}


@pytest.mark.parametrize("loss_fn", [SftLoss(), WeightedLoss()])
def test_the_host_waits_for_the_device_only_when_all_passes_are_under_way(engine, loss_fn):
    engine.set_loss_fn(loss_fn)
    with FakeCuda() as cuda:
        pretend_on_cuda(engine)
        with engine.train_mode():
            cuda.waits.clear()
            _, _, ctx = engine.forward_backward_step(scored_batch(0), predict=False)
        num_passes = ctx.stats.num_micro_batches
        assert num_passes > 1
        assert cuda.waits[:num_passes] == ["backward"] * num_passes
        assert set(cuda.waits[num_passes:]) == {"offbeat_engine.toolkit.step.totals:read"}


def impatient(predictions, batch, scale):
    output = SftLoss()(predictions, batch, scale)
    return LossOutput(loss=output.loss, sums={"nll": torch.tensor(float(output.loss.detach()))})


def test_a_loss_that_waits_is_seen(engine):
    engine.set_loss_fn(impatient)
    with FakeCuda() as cuda:
        pretend_on_cuda(engine)
        with engine.train_mode():
            cuda.waits.clear()
            engine.forward_backward_step(scored_batch(0), predict=False)
        assert cuda.waits[0] != "backward"


def misplaced(predictions, batch, scale):
    return LossOutput(loss=(predictions["logprobs"] * torch.ones(batch["input_ids"].shape)).sum())


def test_a_loss_on_the_wrong_device_is_named(engine):
    engine.set_loss_fn(misplaced)
    with FakeCuda():
        pretend_on_cuda(engine)
        with engine.train_mode(), pytest.raises(StepError, match=r"FakeTensor Device|devices"):
            engine.forward_backward_step(scored_batch(0))


def test_values_too(tmp_path):
    from offbeat_engine.testing import make_tiny_model

    path = make_tiny_model(tmp_path / "tiny", head="value")
    made = Fsdp2Engine(
        Fsdp2Config(model=ModelConfig(path=path, head="value"), micro_batch_tokens=40), World()
    )
    made.init_model()
    made.set_loss_fn(ValueLoss())
    with FakeCuda():
        pretend_on_cuda(made)
        with made.train_mode():
            predictions, _, _ = made.forward_backward_step(scored_batch(0))
    assert predictions["values"].device.type == "cpu"
