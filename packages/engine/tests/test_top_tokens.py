"""Log-probabilities of other tokens than those of the batch: beside a plain log-softmax, with their gradient, however it is cut."""

import pytest
import torch

from offbeat_engine import (
    BatchError,
    Feature,
    Fsdp2Config,
    LossOutput,
    ModelConfig,
    OptimizerConfig,
    StepContext,
    World,
    engine_class,
)
from offbeat_engine.testing import make_tiny_model, random_batch
from offbeat_engine.testing.ranks import RankPool
from offbeat_engine.toolkit.step import logprobs
from offbeat_engine.toolkit.step.logprobs import chosen_logprobs, top_tokens


def made(bias, dtype=torch.float64):
    torch.manual_seed(0)
    head = torch.nn.Linear(5, 11, bias=bias, dtype=torch.float32)
    hidden_MH = torch.randn(7, 5).requires_grad_()
    return hidden_MH, head, torch.randint(11, (7, 3)), 0.5 + torch.rand(7)


@pytest.mark.parametrize("chunk", [11, 1 << 20])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("warm", [False, True])
def test_chosen_tokens_have_the_values_and_gradients_of_a_log_softmax(chunk, bias, warm, monkeypatch):
    monkeypatch.setitem(logprobs._CHUNK_ELEMENTS, "cpu", chunk)
    hidden_MH, head, ids_MK, temperature_M = made(bias)
    ids_MK[:, 2] = ids_MK[:, 1]  # one token twice
    temperature_M = temperature_M if warm else None
    weight_MK = torch.randn(7, 3)
    found, leaves = [], [hidden_MH, *head.parameters()]
    for plain in (True, False):
        if plain:
            logits = head(hidden_MH) if temperature_M is None else head(hidden_MH) / temperature_M[:, None]
            values_MK = logits.log_softmax(-1).gather(1, ids_MK)
        else:
            values_MK = chosen_logprobs(hidden_MH, head, ids_MK, temperature_M)
        found.append([values_MK, *torch.autograd.grad((values_MK * weight_MK).sum(), leaves)])
    for wanted, got in zip(*found, strict=True):
        assert torch.allclose(wanted, got, atol=1e-5)


@pytest.mark.parametrize("chunk", [11, 1 << 20])
def test_the_likeliest_tokens_are_named_in_order_and_at_most_all(chunk, monkeypatch):
    monkeypatch.setitem(logprobs._CHUNK_ELEMENTS, "cpu", chunk)
    hidden_MH, head, _, temperature_M = made(bias=True)
    wanted_MV = (head(hidden_MH) / temperature_M[:, None]).log_softmax(-1)
    for top_k, num in ((4, 4), (99, 11)):
        values_MK, ids_MK = top_tokens(hidden_MH, head, top_k, temperature_M)
        wanted_MK, wanted_ids_MK = wanted_MV.topk(num)
        assert torch.allclose(values_MK, wanted_MK, atol=1e-6)
        assert torch.equal(ids_MK, wanted_ids_MK)
        assert not values_MK.requires_grad
    assert torch.allclose(values_MK.exp().sum(1), torch.ones(7))


def engine_of(path, world=None, **settings):
    told = Fsdp2Config(model=ModelConfig(path=path), optimizer=OptimizerConfig(lr=1e-2), **settings)
    engine = engine_class("fsdp2")(told, World() if world is None else world)
    engine.init_model()
    return engine


def named(engine, batch, top_k):
    with engine.eval_mode():
        return engine.forward_backward_step(batch, StepContext(top_k=top_k), forward_only=True)[0]


def weighted(predictions, batch, scale):
    value = (predictions["top_logprobs"] * torch.arange(1.0, 4.0)).sum() / scale.num_tokens
    return LossOutput(loss=value)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def stepped(world, path, settings):
    """Return what the loss and the gradient norm of two steps are, and whether names were those of the token's distribution."""
    engine, whole = engine_of(path, world, **settings), random_batch(6, seed=1)
    share = engine.shard_data(whole)
    answers = named(engine, share, 3)
    share["top_ids"] = answers["top_ids"]
    again = named(engine, share, 0)["top_logprobs"]
    assert torch.allclose(again, answers["top_logprobs"], atol=1e-5)
    assert not answers["top_logprobs"][~share["loss_mask"]].any()
    engine.set_loss_fn(weighted)
    said = []
    for _ in range(2):
        with engine.train_mode():
            loss = engine.forward_backward_step(share, StepContext())[1]
            said += [loss, engine.optimizer_step()]
            engine.optimizer_zero_grad()
    engine.close()
    return said


WAYS = [{"micro_batch_tokens": 1}, {"packing": False, "micro_batch_tokens": 30}, {"attention": "varlen"}]


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_answers_alike_however_a_batch_is_cut(tiny, way):
    assert stepped(World(), tiny, way) == pytest.approx(stepped(World(), tiny, {}), rel=2e-4)


@pytest.mark.spawns
def test_two_ranks_come_to_what_one_does(tiny):
    pool = RankPool(2, 600.0)
    try:
        for said in pool.run(stepped, tiny, {}):
            assert said == pytest.approx(stepped(World(), tiny, {}), rel=2e-4)
    finally:
        pool.stop()


def test_top_tokens_are_those_of_the_models_own_logits(tiny):
    engine, batch = engine_of(tiny), random_batch(4, seed=2)
    answers = named(engine, batch, 5)
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    for b, t in batch["loss_mask"].nonzero().tolist():
        with torch.no_grad():
            logits_V = plain(batch["input_ids"][b : b + 1, :t]).logits[0, -1]
        wanted_V = (logits_V / batch["temperature"][b]).log_softmax(-1)
        assert torch.allclose(answers["top_logprobs"][b, t], wanted_V.topk(5).values, atol=1e-4)


def test_an_engine_without_the_feature_refuses_both():
    from offbeat_engine.batch import check_top_tokens

    batch = random_batch(2)
    assert check_top_tokens(batch, 0, names=False) is None
    with pytest.raises(BatchError, match="declares `top_tokens`"):
        check_top_tokens(batch, 4, names=False)
    batch["top_ids"] = torch.zeros(*batch["input_ids"].shape, 3, dtype=torch.int64)
    with pytest.raises(BatchError, match="declares `top_tokens`"):
        check_top_tokens(batch, 0, names=False)
    assert Feature.TOP_TOKENS in engine_class("fsdp2").capabilities().features
