"""Experts of the batch in place of the choice of transformers' routers, in every way that FSDP2 lays tokens out."""

from dataclasses import replace

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeConfig, OlmoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeConfig, Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeTopKRouter

from offbeat_engine import BatchError, Fsdp2Config, ModelConfig, SftLoss, World, engine_class, train_batch
from offbeat_engine.fsdp2 import Fsdp2Engine
from offbeat_engine.fsdp2.model.replay import ROUTERS, Routers
from offbeat_engine.testing import make_tiny_model
from offbeat_engine.testing.cases_features import check_replay
from offbeat_engine.testing.models import FAMILIES
from offbeat_engine.testing.reference import with_drawn_experts
from offbeat_engine.testing.runner import BATCHES, Options, Runner

NUM_EXPERTS, TOP_K = 6, 2
SHAPE = {"hidden_size": 16, "num_experts_per_tok": TOP_K}
KINDS = [
    (MixtralTopKRouter, MixtralConfig, {"num_local_experts": NUM_EXPERTS}, "of those chosen"),
    (Qwen3MoeTopKRouter, Qwen3MoeConfig, {"num_experts": NUM_EXPERTS, "norm_topk_prob": True}, "of those chosen"),
    (Qwen3MoeTopKRouter, Qwen3MoeConfig, {"num_experts": NUM_EXPERTS, "norm_topk_prob": False}, "of all"),
    (Qwen2MoeTopKRouter, Qwen2MoeConfig, {"num_experts": NUM_EXPERTS, "norm_topk_prob": False}, "of all"),
    (OlmoeTopKRouter, OlmoeConfig, {"num_experts": NUM_EXPERTS, "norm_topk_prob": False}, "of all"),
    (GptOssTopKRouter, GptOssConfig, {"num_local_experts": NUM_EXPERTS}, "of those chosen"),
]  # fmt: skip


@pytest.mark.parametrize(("router", "config", "settings", "share"), KINDS)
def test_experts_count_as_their_router_scores_them(router, config, settings, share):
    model = torch.nn.Sequential(router(config(**SHAPE, **settings)))
    assert type(model[0]).__name__ in ROUTERS
    torch.manual_seed(0)
    for param in model.parameters():
        torch.nn.init.normal_(param)
    hidden = torch.randn(5, 16)
    logits, own_scores, own = model[0](hidden)
    routers = Routers(model, compiled=False)
    given = torch.rand(5, NUM_EXPERTS).argsort(-1)[:, :TOP_K].to(torch.int16)
    given[3] = -1
    routers.take(given)
    again, scores, experts = model[0](hidden)
    assert torch.equal(again, logits)
    wanted = torch.where(given < 0, own, given.long())
    assert torch.equal(experts, wanted)
    chosen = logits.gather(1, wanted)
    expected = chosen.softmax(-1) if share == "of those chosen" else logits.softmax(-1).gather(1, wanted)
    torch.testing.assert_close(scores, expected)
    scores.sum().backward()
    assert all(param.grad is not None for param in model.parameters())
    routers.take(None)
    assert torch.equal(model[0](hidden)[1], own_scores)


@pytest.fixture(scope="module")
def runner():
    made = Runner(Options(engine=Fsdp2Engine, families=("qwen2", "mixtral", "qwen3_moe"), num_ranks=2))
    yield made
    made.close()


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mixtral", {"activation_checkpointing": True}),
        ("qwen3_moe", {"sequence_parallel_size": 2, "activation_checkpointing": True}),
        pytest.param("qwen3_moe", {"packing": False, "micro_batch_tokens": 1}, marks=pytest.mark.deep),
        pytest.param(
            "mixtral",
            {"activation_checkpointing": True, "checkpoint_keeps": "products"},
            marks=pytest.mark.deep,
        ),
        pytest.param("mixtral", {"attention": "varlen", "activation_offload": True}, marks=pytest.mark.deep),
    ],
    ids=str,
)
def test_training_is_that_of_a_plain_model_with_the_same_experts(runner, family, changes):
    check_replay(runner, runner.job(family, **changes), 2)


def engine_on(path, **changes):
    torch.set_num_threads(1)
    made = engine_class("fsdp2")(Fsdp2Config(model=ModelConfig(path=str(path)), **changes), World())
    made.init_model()
    made.set_loss_fn(SftLoss())
    return made


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return make_tiny_model(
        tmp_path_factory.mktemp("models") / "mixture", family="mixtral", **FAMILIES["mixtral"].settings
    )


def logprobs(engine, batch):
    with engine.eval_mode():
        return engine.forward_backward_step(batch, forward_only=True)[0]["logprobs"]


def test_a_prompt_is_shared_by_those_that_went_to_the_same_experts(mixture):
    torch.manual_seed(0)
    prompt, size = torch.randint(1, 60, (12,)), 4
    ids = torch.stack([torch.cat([prompt, torch.randint(1, 60, (3,))]) for _ in range(size)])
    batch = train_batch(
        input_ids=ids,
        lengths=torch.full((size,), 15),
        loss_mask=(torch.arange(15) >= 12).expand(size, 15).clone(),
        group=torch.zeros(size, dtype=torch.int64),
    )
    batch = with_drawn_experts(batch, 2, 4, 2)
    experts = batch["routed_experts"]
    experts[1, :12] = experts[2, :12]  # those two began alike, the others each in a way of its own
    shared, apart = (engine_on(mixture, share_prefixes=share) for share in (True, False))
    torch.testing.assert_close(logprobs(shared, batch), logprobs(apart, batch), atol=1e-5, rtol=0)
    single = [logprobs(apart, batch[row : row + 1]) for row in range(size)]
    torch.testing.assert_close(logprobs(shared, batch), torch.cat(single), atol=1e-5, rtol=0)
    before = logprobs(shared, batch.exclude("routed_experts"))
    assert (before - logprobs(shared, batch)).abs().max() > 1e-2
    torch.testing.assert_close(logprobs(shared, batch.exclude("routed_experts")), before, atol=0, rtol=0)


class OtherRouter(torch.nn.Module):
    """Chooses in a way of its own."""


def test_who_cannot_be_told_refuses_the_batch(mixture):
    batch = with_drawn_experts(BATCHES[0], 2, 4, 2)
    with pytest.raises(BatchError, match="routers of the kind OtherRouter cannot be given experts"):
        Routers(torch.nn.Sequential(OtherRouter()), compiled=False).check(batch)
    engine = engine_on(mixture)
    engine._state = replace(engine._state, routers=Routers(engine._state.scorer.hf, compiled=True))
    with pytest.raises(BatchError, match="compile: false"):
        logprobs(engine, batch)
    assert logprobs(engine, batch.exclude("routed_experts")).abs().sum() > 0
