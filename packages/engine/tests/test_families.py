"""Each family of models through the engine: log-probs, gradients, and weights under their checkpoint's names."""

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from offbeat_engine import ConfigError, Dtype, Fsdp2Config, ModelConfig, SftLoss, World, train_batch
from offbeat_engine.batch import LossScale
from offbeat_engine.fsdp2 import Fsdp2Engine
from offbeat_engine.fsdp2.weights.export import converts
from offbeat_engine.testing import make_tiny_model, random_batch, reference_logprobs, relative_error
from offbeat_engine.testing.reference import load_reference

MOE = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
FAMILIES = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma3_text": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    "mistral": {"sliding_window": 7, "tie_word_embeddings": False},
    "mixtral": {"tie_word_embeddings": False, **MOE["mixtral"]},
    "qwen3_moe": {"tie_word_embeddings": True, **MOE["qwen3_moe"]},
}
BATCH = random_batch(12, max_tokens=30, seed=3)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("families") / request.param
    return make_tiny_model(path, family=request.param, **FAMILIES[request.param])


def make_engine(path, world=None, **changes):
    settings = {"micro_batch_tokens": 100, **changes}
    engine = Fsdp2Engine(Fsdp2Config(model=ModelConfig(path=path), **settings), world or World())
    engine.init_model()
    engine.set_loss_fn(SftLoss())
    return engine


def engine_side(world, path, changes):
    """Return log-probs and entropy in batch order, loss, and every gradient by name."""
    engine = make_engine(path, world, **changes)
    with engine.train_mode():
        share = engine.shard_data(BATCH)
        predictions, loss, _ = engine.forward_backward_step(share)
        gradients = {name: tensor.clone() for name, tensor in engine.named_gradients()}
    return dict(engine.unshard_data(predictions).items()), loss, gradients


def plain_side(path, folder):
    """Return the same from transformers' own model and `save_pretrained`, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    predictions = reference_logprobs(model, BATCH)
    scale = LossScale(num_tokens=int(BATCH["loss_mask"].sum()), num_sequences=12)
    loss = SftLoss()(predictions, BATCH, scale).loss
    loss.backward()
    for param in model.parameters():
        param.data = param.grad
    model.save_pretrained(folder)
    return predictions.detach(), float(loss.detach()), load_file(folder / "model.safetensors")


def check(path, folder, got):
    expected, loss, gradients = plain_side(path, folder)
    assert float(expected["logprobs"].min()) < -3.0
    for name in ("logprobs", "entropy"):
        assert_close(got[0][name], expected[name], rtol=0, atol=1e-5)
    assert got[1] == pytest.approx(loss, rel=1e-6)
    assert got[2].keys() == gradients.keys()
    assert max(relative_error(got[2][name], gradients[name]) for name in gradients) <= 1e-4


@pytest.mark.parametrize("changes", [{}, {"packing": False}], ids=["packed", "padded"])
def test_one_rank_is_the_plain_model(family, tmp_path, changes):
    check(family, tmp_path, engine_side(World(), family, changes))


def test_two_ranks_are_the_plain_model(family, tmp_path, two_ranks):
    check(family, tmp_path, two_ranks.run(engine_side, family, {})[0])


def export(world, path, out, dtype):
    engine = make_engine(path, world, dtype=dtype)
    engine.export_huggingface(out)
    specs = [(spec.name, spec.shape, spec.dtype) for spec in engine.weight_manifest()]
    weights = {name: tensor.clone() for name, tensor in engine.named_weights()}
    assert specs == [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()]
    return weights


@pytest.mark.parametrize("dtype", Dtype)
def test_exported_weights_load_bit_for_bit_under_the_names_of_named_weights(
    family, tmp_path, two_ranks, dtype
):
    weights = two_ranks.run(export, family, str(tmp_path / "out"), dtype)[0]
    written = load_file(tmp_path / "out" / "model.safetensors")
    source = load_file(f"{family}/model.safetensors")
    assert written.keys() == weights.keys() == source.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, source[name].to(getattr(torch, dtype)))
        assert torch.equal(tensor, written[name])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    first = AutoModelForCausalLM.from_pretrained(family, dtype=loaded.dtype)
    assert loaded.dtype is getattr(torch, dtype)
    for name, tensor in first.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_experts_leave_one_by_one(tmp_path):
    path = make_tiny_model(tmp_path, family="mixtral", **MOE["mixtral"])
    names = [spec.name for spec in make_engine(path).weight_manifest()]
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in names
    assert not any(name.endswith("gate_up_proj") for name in names)


def test_a_random_mixture_has_the_names_of_one_that_was_loaded(tmp_path):
    path = make_tiny_model(tmp_path, family="qwen3_moe", **MOE["qwen3_moe"])
    fresh = Fsdp2Engine(Fsdp2Config(model=ModelConfig(path=path, random_init=True)), World())
    fresh.init_model()
    assert fresh.weight_manifest() == make_engine(path).weight_manifest()


def test_a_family_that_joins_weights_as_it_saves_is_refused(tmp_path, monkeypatch):
    """A conversion that splits one file weight over two held ones, as it would stand in transformers' mapping."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import Chunk, WeightConverter

    def joined(hf, add_legacy=True):
        return [
            WeightConverter(
                source_patterns="mlp.gate_up_proj.weight",
                target_patterns=["mlp.gate_proj.weight", "mlp.up_proj.weight"],
                operations=[Chunk(dim=0)],
            )
        ]

    path = make_tiny_model(tmp_path)
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", joined)
    assert converts(None)
    config = Fsdp2Config(model=ModelConfig(path=path, random_init=True))
    with pytest.raises(ConfigError, match="joins several weights into one"):
        Fsdp2Engine(config, World()).init_model()


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mamba", {"state_size": 8, "initializer_range": 0.02}),
        (
            "minimax",
            {**MOE["mixtral"], "layer_types": ["linear_attention", "full_attention"], "block_size": 8},
        ),
    ],
)
def test_a_family_that_mixes_precisions_is_refused_in_bfloat16_with_what_helps(tmp_path, family, settings):
    path = make_tiny_model(tmp_path, family=family, **settings)
    padded = {"packing": False, "attention": "eager"}
    with pytest.raises(ConfigError, match=r"multiplies it by bfloat16 weights: set `dtype: float32`"):
        make_engine(path, dtype=Dtype.BFLOAT16, **padded)
    make_engine(path, **padded).close()


@pytest.mark.parametrize(
    ("name", "settings", "packing"),
    [("qwen2_moe", {**MOE["qwen3_moe"], "use_sliding_window": True}, False), ("mistral", {}, True)],
)
def test_a_window_longer_than_the_probe_is_kept(name, settings, packing, tmp_path):
    path = make_tiny_model(tmp_path, family=name, sliding_window=250, **settings)
    ids = torch.randint(3, 64, (1, 600), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(600)[None] > 0
    batch = train_batch(input_ids=ids, lengths=torch.tensor([600]), loss_mask=mask)
    engine = make_engine(path, packing=packing)
    with engine.eval_mode():
        predictions, _ = engine.forward_backward_step(batch, forward_only=True)
    expected = reference_logprobs(load_reference(path), batch)["logprobs"].detach()
    assert_close(predictions["logprobs"], expected, rtol=0, atol=1e-5)
