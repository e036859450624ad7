"""What goes wrong on one rank, in a loss, a hook or its answer, is raised on all of them; the next step knows nothing of it."""

import shutil
from dataclasses import dataclass, replace

import pytest
import torch
from torch.testing import assert_close

from offbeat_engine import (
    BatchError,
    ConfigError,
    Fsdp2Config,
    LoraConfig,
    ModelConfig,
    SftLoss,
    StateError,
    StepContext,
    StepError,
    World,
)
from offbeat_engine.fsdp2 import Fsdp2Engine, checks
from offbeat_engine.fsdp2.model import building as model
from offbeat_engine.testing import RankPool, random_batch

pytestmark = pytest.mark.spawns


@dataclass(frozen=True)
class FailingLoss:
    """As `SftLoss` until its micro-batch number `at` on rank `rank`; there it raises, in its own backward if `late`."""

    rank: int
    at: int
    late: bool = False

    def __call__(self, predictions, batch, scale):
        _CALLS.append(1)
        output = SftLoss()(predictions, batch, scale)
        if _WORLD[0].rank != self.rank or len(_CALLS) <= self.at:
            return output
        if self.late:
            return replace(output, loss=_Raises.apply(output.loss))
        raise KeyError("advantages")


_CALLS = []
_WORLD = [World()]


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("no slope here")


def engine_of(world, path, loss_fn, **changes):
    _WORLD[0] = world
    _CALLS.clear()
    engine = Fsdp2Engine(Fsdp2Config(model=ModelConfig(path=path), micro_batch_tokens=40, **changes), world)
    engine.init_model()
    engine.set_loss_fn(loss_fn)
    return engine


def gradients(engine, batch):
    with engine.train_mode():
        engine.optimizer_zero_grad()
        _, loss, _ = engine.forward_backward_step(engine.shard_data(batch))
        return loss, {name: grad.clone() for name, grad in engine.named_gradients()}


def failing(world, path, loss_fn, layered, changes):
    """Fail in the middle of a step, then take a good one; and the good one on a new engine."""
    changes = {"reshard": "always", **changes} if layered else changes
    engine = engine_of(world, path, loss_fn, **changes)
    with engine.train_mode(), pytest.raises(StepError) as caught:
        engine.forward_backward_step(engine.shard_data(random_batch(8, seed=1)))
    cause = type(caught.value.__cause__).__name__
    engine.set_loss_fn(SftLoss())
    after = gradients(engine, random_batch(8, seed=2))
    fresh = gradients(engine_of(world, path, SftLoss(), **changes), random_batch(8, seed=2))
    return str(caught.value), cause, len(_CALLS), after, fresh


@pytest.mark.parametrize("layered", [False, True])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_loss_that_raises_on_one_rank_is_raised_on_all(tiny, two_ranks, rank, at, layered):
    answers = two_ranks.run(failing, tiny, FailingLoss(rank=rank, at=at), layered, {})
    for here, (message, cause, _, after, fresh) in enumerate(answers):
        assert message == f"rank {rank}: KeyError: 'advantages' (all ranks agree)"
        assert cause == ("KeyError" if here == rank else "NoneType")
        assert after[0] == fresh[0]
        for name, grad in after[1].items():
            assert torch.equal(grad, fresh[1][name]), name


@pytest.mark.parametrize("changes", [{"sequence_parallel_size": 2}, {"activation_offload": True}])
def test_and_however_the_ranks_share_their_work(tiny, two_ranks, changes):
    for message, _, _, after, fresh in two_ranks.run(
        failing, tiny, FailingLoss(rank=1, at=1), False, changes
    ):
        assert message == "rank 1: KeyError: 'advantages' (all ranks agree)"
        assert_close(after[1], fresh[1], rtol=0, atol=0)


def test_what_a_loss_raises_in_its_own_backward_pass_too(tiny, two_ranks):
    for message, _, _, after, fresh in two_ranks.run(
        failing, tiny, FailingLoss(rank=0, at=1, late=True), False, {}
    ):
        assert "rank 0: ArithmeticError: no slope here" in message
        assert_close(after[1], fresh[1], rtol=0, atol=0)


def test_no_rank_goes_on_after_the_micro_batch_that_failed(tiny, two_ranks):
    answers = two_ranks.run(calls_until_failure, tiny)
    assert answers == [1, 1], "both ranks have several micro-batches"


def calls_until_failure(world, path):
    engine = engine_of(world, path, FailingLoss(rank=0, at=0))
    with engine.train_mode(), pytest.raises(StepError):
        engine.forward_backward_step(engine.shard_data(random_batch(8)))
    return len(_CALLS)


def raise_in_hook(batch, ctx):
    if _WORLD[0].rank:
        raise RuntimeError("a hook is unwell")
    return batch


def narrow(batch, ctx):
    return batch.clone().update({"lengths": batch["lengths"].float()}) if _WORLD[0].rank else batch


def drop_rows(batch, ctx):
    return batch[:0] if _WORLD[0].rank else batch


def answer_nothing(predictions, batch, ctx):
    return None if _WORLD[0].rank else predictions


def answer_shapeless(predictions, batch, ctx):
    shapeless = torch.zeros(len(batch["lengths"]), 3 if _WORLD[0].rank else batch["input_ids"].shape[1])
    return predictions.update({"mine": shapeless})


HOOKS = [
    ("preprocess_fn", raise_in_hook, StepError, "rank 1: RuntimeError: a hook is unwell"),
    ("preprocess_fn", narrow, BatchError, r"rank 1: `lengths` must be \["),
    ("preprocess_fn", drop_rows, BatchError, "rank 1: `preprocess_fn` must return the rows and tokens"),
    (
        "postprocess_fn",
        answer_nothing,
        BatchError,
        "rank 1: `postprocess_fn` must return predictions .* got NoneType",
    ),
    ("postprocess_fn", answer_shapeless, BatchError, r"rank 1: `postprocess_fn`: `mine` must be \["),
]


def hooked(world, path, where, hook, kind, message):
    engine = engine_of(world, path, SftLoss())
    for forward_only in (True, False):
        mode = engine.eval_mode() if forward_only else engine.train_mode()
        share = engine.shard_data(random_batch(8))
        with mode, pytest.raises(kind, match=message):
            engine.forward_backward_step(share, forward_only=forward_only, **{where: hook})
    return True


@pytest.mark.parametrize(("where", "hook", "kind", "message"), HOOKS)
def test_a_hook_that_fails_on_one_rank_is_raised_on_all(tiny, two_ranks, where, hook, kind, message):
    assert two_ranks.run(hooked, tiny, where, hook, kind, message) == [True, True]


def test_one_rank_alone_says_so_too(tiny):
    engine = engine_of(World(), tiny, FailingLoss(rank=0, at=0))
    with engine.train_mode(), pytest.raises(StepError, match="KeyError: 'advantages'") as caught:
        engine.forward_backward_step(random_batch(4), StepContext())
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_loss_that_returns_a_bare_tensor_is_told_what_to_return(tiny):
    engine = engine_of(World(), tiny, lambda predictions, batch, scale: predictions["logprobs"].sum())
    with (
        engine.train_mode(),
        pytest.raises(StepError, match="returns `LossOutput` with a scalar `loss`, got tensor"),
    ):
        engine.forward_backward_step(random_batch(4))


def said_of_tokens(world, path):
    batch = random_batch(4, seed=3 + world.rank)
    if world.rank == 1:
        batch["input_ids"][2, 1] = 64
    engine = engine_of(world, path, SftLoss())
    with engine.train_mode(), pytest.raises(BatchError) as caught:
        engine.forward_backward_step(batch)
    return str(caught.value)


def test_a_token_that_the_model_has_not_is_refused_on_all_ranks(tiny, two_ranks):
    left, right = two_ranks.run(said_of_tokens, tiny)
    assert left == right
    assert "rank 1: `input_ids` hold 1 tokens that the model has not, such as 64: it has 0..63" in left


def refused(world, paths, changes):
    """Return what `init_model` raises on this rank, which reads a folder of its own."""
    config = Fsdp2Config(model=ModelConfig(path=paths[world.rank]), **changes)
    with pytest.raises(ConfigError) as caught:
        Fsdp2Engine(config, world).init_model()
    return str(caught.value)


def lacks_peft(world, path):
    if world.rank:
        checks.has_peft = lambda: False
    return refused(world, [path, path], {"lora": LoraConfig(rank=2)})


def fails_to_build(world, path):
    if world.rank:

        def build_scorer(config):
            raise MemoryError("this rank has none left")

        model.build_scorer = build_scorer
    with pytest.raises((ConfigError, MemoryError)) as caught:
        Fsdp2Engine(Fsdp2Config(model=ModelConfig(path=path)), world).init_model()
    return str(caught.value)


def test_what_one_rank_lacks_is_raised_by_all(tiny, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny, damaged)
    (damaged / "config.json").write_text("{")
    with RankPool(2, timeout_s=60.0) as ranks:
        left, right = ranks.run(refused, [tiny, str(damaged)], {})
        assert left == right
        assert "rank 1: model.path: no model" in left
        left, right = ranks.run(lacks_peft, tiny)
        assert left == right
        assert "rank 1: lora.rank: adapters need the peft package" in left
    with RankPool(2, timeout_s=60.0) as ranks:
        left, right = ranks.run(fails_to_build, tiny)
        assert "another rank could not build the model: rank 1: MemoryError" in left
        assert right == "this rank has none left"


def fail_in_the_second_micro_batch(engine, monkeypatch):
    layer, calls = engine._state.scorer.hf.model.layers[1].mlp, []
    forward = layer.forward

    def run_out(states):
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory in the second micro-batch")
        return forward(states)

    monkeypatch.setattr(layer, "forward", run_out)
    with pytest.raises(torch.OutOfMemoryError):
        engine.forward_backward_step(random_batch(8, seed=1))


def test_gradients_of_a_model_that_fails_are_dropped(tiny, monkeypatch):
    engine = engine_of(World(), tiny, SftLoss())
    expected = gradients(engine_of(World(), tiny, SftLoss()), random_batch(8, seed=2))
    with engine.train_mode():
        fail_in_the_second_micro_batch(engine, monkeypatch)
        with pytest.raises(StateError, match="without a gradient"):
            engine.optimizer_step()
        _, loss, _ = engine.forward_backward_step(random_batch(8, seed=2))
        got = {name: grad.clone() for name, grad in engine.named_gradients()}
    assert loss == expected[0]
    assert_close(got, expected[1], rtol=0, atol=0)


def test_a_sharded_model_that_failed_is_not_trained_on(tiny, monkeypatch):
    engine = engine_of(World(), tiny, SftLoss(), dtype="bfloat16")
    with engine.train_mode():
        fail_in_the_second_micro_batch(engine, monkeypatch)
        with pytest.raises(
            StateError, match=r"failed in an earlier training call \(OutOfMemoryError: no memory"
        ):
            engine.forward_backward_step(random_batch(8, seed=2))
