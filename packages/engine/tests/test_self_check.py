"""What `init_model` finds out about a model before anything is trained with it."""

import json
import logging

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close
from transformers.models.qwen2 import modeling_qwen2 as qwen2

from offbeat_engine import (
    BatchError,
    ConfigError,
    Dtype,
    ModelConfig,
    RankLostError,
    SftLoss,
    World,
    train_batch,
)
from offbeat_engine.fsdp2 import Fsdp2Config, Fsdp2Engine
from offbeat_engine.fsdp2.model import trainable
from offbeat_engine.testing import make_tiny_model, random_batch, reference_logprobs
from offbeat_engine.testing.reference import load_reference

LFM2 = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False}
LONGROPE = {
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 24,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "factor": 4.0,
        "original_max_position_embeddings": 24,
    },
}


def make(path, world=None, *, model=None, **settings):
    settings = {"collective_timeout_s": 300.0, **settings}
    engine = Fsdp2Engine(
        Fsdp2Config(model=ModelConfig(path=path, **(model or {})), **settings), world or World()
    )
    engine.init_model()
    engine.set_loss_fn(SftLoss())
    return engine


@pytest.fixture(scope="module")
def square(tmp_path_factory):
    """A model whose vocabulary is as large as its hidden states are wide."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "square", vocab_size=32, hidden=32)


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """A model whose config turns dropout on."""
    path = tmp_path_factory.mktemp("models") / "noisy"
    return make_tiny_model(path, family="seed_oss", residual_dropout=0.1, attention_dropout=0.1)


@pytest.fixture(scope="module")
def longrope(tmp_path_factory):
    """A model that changes its frequencies beyond 24 tokens."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "longrope", family="phi3", **LONGROPE)


def scaled_logits(monkeypatch):
    plain = qwen2.Qwen2ForCausalLM.forward

    def forward(self, *args, **kwargs):
        output = plain(self, *args, **kwargs)
        output.logits = output.logits * 0.8
        return output

    monkeypatch.setattr(qwen2.Qwen2ForCausalLM, "forward", forward)


def leaking_layer(monkeypatch):
    plain = qwen2.Qwen2MLP.forward
    # As a convolution over two tokens would: each sees the one before it in the row, whosever that is.
    monkeypatch.setattr(
        qwen2.Qwen2MLP, "forward", lambda self, x: plain(self, x) + functional.pad(x, (0, 0, 1, 0))[:, :-1]
    )


def leaking_far(monkeypatch):
    plain = qwen2.Qwen2MLP.forward

    def forward(self, x):
        # As a state that is added again 128 tokens later, whosever those are.
        return plain(self, x) + functional.pad(x, (0, 0, 128, 0))[:, : x.shape[1]]

    monkeypatch.setattr(qwen2.Qwen2MLP, "forward", forward)


def transposed_head(monkeypatch):
    plain = trainable.token_logprobs

    def turned(hidden, head, *rest):
        other = torch.nn.Linear(*head.weight.shape, bias=False)
        other.weight = torch.nn.Parameter(head.weight.T.contiguous())
        return plain(hidden, other, *rest)

    monkeypatch.setattr(trainable, "token_logprobs", turned)


def growing_frequencies(monkeypatch):
    plain = qwen2.Qwen2RotaryEmbedding.forward

    def forward(self, x, position_ids):
        # Positions run slower as soon as any in the row is far.
        far = int(position_ids.max()) > 1000
        cos, sin = plain(self, x, position_ids)
        return (cos.roll(1, -1), sin) if far else (cos, sin)

    monkeypatch.setattr(qwen2.Qwen2RotaryEmbedding, "forward", forward)


def noise(monkeypatch, part):
    plain = qwen2.Qwen2MLP.forward
    monkeypatch.setattr(
        qwen2.Qwen2MLP, "forward", lambda self, x: functional.dropout(plain(self, x), part, self.training)
    )


def noise_in_training(monkeypatch):
    noise(monkeypatch, 0.1)


def little_noise_in_training(monkeypatch):
    noise(monkeypatch, 0.02)


def hardly_any_noise_in_training(monkeypatch):
    noise(monkeypatch, 0.005)


PLANTED = {
    scaled_logits: "no setting of this engine makes them agree",
    leaking_layer: "set `packing: false`",
    leaking_far: "set `packing: false`",
    transposed_head: "no setting of this engine makes them agree",
    growing_frequencies: "change with the positions of another",
    noise_in_training: "set `model.dropout: true`",
    little_noise_in_training: "set `model.dropout: true`",
    hardly_any_noise_in_training: "set `model.dropout: true`",
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_difference_is_refused_with_what_helps(square, monkeypatch, plant, dtype):
    plant(monkeypatch)
    with pytest.raises(ConfigError, match=PLANTED[plant]):
        make(square, dtype=dtype)


def test_a_dtype_given_by_its_name_is_computed_in(square):
    batch, answers = random_batch(3, vocab_size=32), {}
    for dtype in ("bfloat16", Dtype.BFLOAT16, Dtype.FLOAT32):
        engine = make(square, dtype=dtype)
        with engine.eval_mode():
            predictions, _ = engine.forward_backward_step(batch, forward_only=True)
        answers[type(dtype), str(dtype)] = predictions["logprobs"]
    named, half, full = answers.values()
    assert torch.equal(named, half)
    assert not torch.equal(named, full)


def test_the_refusal_has_both_figures(square, monkeypatch):
    scaled_logits(monkeypatch)
    with pytest.raises(
        ConfigError, match=r"has -[\d.]+ by Hugging Face's forward and -[\d.]+ by this engine"
    ):
        make(square)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "memory ran out"),
        (MemoryError(), "memory ran out"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "memory ran out"),
        (torch.distributed.DistBackendError("NCCL error"), "another rank died"),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer"), "another rank died"),
        (IndexError("index out of range"), "use another model"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
def test_what_is_no_fault_of_the_model_is_not_said_to_be(square, monkeypatch, error, says):
    def fail(self, x):
        raise error

    monkeypatch.setattr(qwen2.Qwen2MLP, "forward", fail)
    with pytest.raises(ConfigError, match=says) as caught:
        make(square)
    assert ("use another model" in str(caught.value)) == (says == "use another model")


def test_a_lost_rank_is_told_as_one(square, monkeypatch):
    def lost(self, x):
        raise RankLostError("rank 0 of 2 waited")

    monkeypatch.setattr(qwen2.Qwen2MLP, "forward", lost)
    with pytest.raises(RankLostError, match="rank 0 of 2 waited"):
        make(square)


def test_what_leaks_is_exact_without_packing(square, monkeypatch):
    leaking_layer(monkeypatch)
    batch = random_batch(9, vocab_size=32)
    engine = make(square, packing=False)
    with engine.eval_mode():
        predictions, _ = engine.forward_backward_step(batch, forward_only=True)
    expected = reference_logprobs(load_reference(square), batch)["logprobs"].detach()
    assert_close(predictions["logprobs"], expected, rtol=0, atol=1e-5)


def refused(world, path):
    """Return what a rank is told of a model whose MLPs leak, and that the ranks are still in step after it."""
    with pytest.MonkeyPatch.context() as patch:
        leaking_layer(patch)
        with pytest.raises(ConfigError) as caught:
            make(path, world)
    make(path, world)
    return str(caught.value)


def test_ranks_are_refused_alike_and_stay_in_step(square, two_ranks):
    left, right = two_ranks.run(refused, square)
    assert left == right
    assert "packing: false" in left


REMOTE = """
from transformers import Qwen2Config, Qwen2ForCausalLM


class ScaledForCausalLM(Qwen2ForCausalLM):
    config_class = Qwen2Config

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits / 2
        return output
"""


def test_code_that_comes_with_a_model_is_checked_as_well(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    path = tmp_path / "model"
    make_tiny_model(path)
    (path / "modeling_scaled.py").write_text(REMOTE)
    config = json.loads((path / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_scaled.ScaledForCausalLM"}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="ScaledForCausalLM: a probe token has"):
        make(str(path), model={"trust_remote_code": True})


def test_layers_that_mix_tokens_are_refused_by_name_before_anything_is_built(tmp_path):
    path = make_tiny_model(tmp_path, family="lfm2", **LFM2)
    [refusal] = Fsdp2Engine.check(Fsdp2Config(model=ModelConfig(path=path)), 1)
    assert refusal.setting == "packing"
    assert "layers of type conv" in refusal.reason
    make(path, packing=False)


@pytest.mark.parametrize(
    ("family", "settings", "says"),
    [
        ("granite", {"logits_scaling": 8.0}, "`logits_scaling`: 8.0"),
        (
            "gpt_oss",
            {"num_local_experts": 2, "num_experts_per_tok": 1},
            "set `attention: eager` and `packing: false`",
        ),
        (
            "qwen2_moe",
            {"num_experts": 2, "num_experts_per_tok": 1, "use_sliding_window": True, "sliding_window": 250},
            "a window of 250 tokens in its masks alone",
        ),
    ],
)
def test_the_check_refuses_from_the_config_alone(tmp_path, family, settings, says):
    path = make_tiny_model(tmp_path, family=family, **settings)
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    found = Fsdp2Engine.check(Fsdp2Config(model=ModelConfig(path=path)), 1)
    assert says in "; ".join(map(str, found))


def test_a_router_that_chooses_other_experts_by_rounding_is_no_difference(tmp_path):
    """Of this model one token in bfloat16 is a nat apart, the mean 0.007."""
    sizes = {
        "n_heads": 4,
        "tie_word_embeddings": False,
        "d_model": 32,
        "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 64},
    }
    make(make_tiny_model(tmp_path, family="dbrx", **sizes), dtype=Dtype.BFLOAT16)


class TestDropout:
    def test_is_off_and_said(self, noisy, caplog):
        with caplog.at_level(logging.WARNING, "offbeat_engine"):
            engine = make(noisy)
        assert "attention_dropout=0.1, residual_dropout=0.1" in caplog.text
        batch = random_batch(4)
        with engine.eval_mode():
            calm, _ = engine.forward_backward_step(batch, forward_only=True)
        with engine.train_mode():
            trained, _, _ = engine.forward_backward_step(batch)
        assert torch.equal(calm["logprobs"], trained["logprobs"])

    def test_is_on_where_it_is_asked_for(self, noisy):
        engine = make(noisy, model={"dropout": True})
        batch = random_batch(4)
        with engine.eval_mode():
            calm, _ = engine.forward_backward_step(batch, forward_only=True)
        with engine.train_mode():
            trained, _, _ = engine.forward_backward_step(batch)
        assert not torch.allclose(calm["logprobs"], trained["logprobs"], atol=1e-2)

    def test_leaves_with_the_weights(self, noisy, tmp_path):
        make(noisy).export_huggingface(str(tmp_path / "out"))
        written = json.loads((tmp_path / "out" / "config.json").read_text())
        assert (written["attention_dropout"], written["residual_dropout"]) == (0.1, 0.1)


class TestFrequenciesThatFollowTheLongestSequence:
    @pytest.mark.parametrize("packing", [True, False])
    def test_are_exact_up_to_the_limit(self, longrope, packing):
        batch = random_batch(9, max_tokens=24)
        engine = make(longrope, packing=packing)
        with engine.eval_mode():
            predictions, _ = engine.forward_backward_step(batch, forward_only=True)
        expected = reference_logprobs(load_reference(longrope), batch)["logprobs"].detach()
        assert_close(predictions["logprobs"], expected, rtol=0, atol=1e-5)

    def test_longer_sequences_are_refused_when_they_come(self, longrope):
        engine = make(longrope)
        ids = torch.arange(25)[None] + 3
        mask = torch.ones(1, 25, dtype=torch.bool)
        mask[:, 0] = False
        batch = train_batch(input_ids=ids, lengths=torch.tensor([25]), loss_mask=mask)
        with engine.eval_mode(), pytest.raises(BatchError, match="25 tokens, and beyond 24"):
            engine.forward_backward_step(batch, forward_only=True)

    def test_and_before_anything_starts_where_the_longest_is_known(self, longrope):
        config = Fsdp2Config(model=ModelConfig(path=longrope), max_sequence_tokens=64)
        [refusal] = Fsdp2Engine.check(config, 1)
        assert (refusal.setting, "beyond 24 tokens" in refusal.reason) == ("max_sequence_tokens", True)


def test_a_value_head_goes_by_any_name(tmp_path):
    path = make_tiny_model(tmp_path, family="gpt_neox", head="value")
    make(path, model={"head": "value"})


def test_a_decoder_that_is_not_the_base_model_is_found(tmp_path):
    path = make_tiny_model(tmp_path, family="llama4_text", num_local_experts=2, num_experts_per_tok=1)
    make(path, packing=False)
