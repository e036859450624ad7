"""Parameters that a family computes with in float32 under every dtype: routers, whose rounding chooses other experts."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from offbeat_engine import ConfigError, Dtype, Fsdp2Config, LoraConfig, ModelConfig, SftLoss, World
from offbeat_engine.fsdp2 import Fsdp2Engine, families
from offbeat_engine.fsdp2.memory import sharding
from offbeat_engine.testing import make_tiny_model, random_batch, reference_logprobs
from offbeat_engine.testing.reference import load_reference

pytestmark = pytest.mark.spawns
# As ERNIE 4.5: the router is a float32 parameter, and so is the bias that chooses experts.
SHAPE = {
    "moe_num_experts": 32,
    "moe_k": 4,
    "moe_intermediate_size": 16,
    "moe_num_shared_experts": 1,
    "moe_layer_start_index": 0,
    "head_dim": 8,
}
BIAS = "moe_statics.e_score_correction_bias"
ROUTER = "mlp.gate.weight"


@pytest.fixture(scope="module")
def ernie(tmp_path_factory):
    """A mixture whose bias decides between experts by less than bfloat16 can tell."""
    path = Path(make_tiny_model(tmp_path_factory.mktemp("models"), family="ernie4_5_moe", **SHAPE))
    weights = load_file(path / "model.safetensors")
    draw = torch.Generator().manual_seed(3)
    for name in weights:
        if name.endswith(BIAS):  # all of them are 1 in bfloat16
            weights[name] = 1 + 0.002 * torch.rand(weights[name].shape, generator=draw)
        elif name.endswith(ROUTER):
            weights[name] *= 0.01
        elif "experts" in name:
            weights[name] *= 3
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


def built(world, path, **settings):
    settings = {"dtype": Dtype.BFLOAT16, **settings}
    engine = Fsdp2Engine(Fsdp2Config(model=ModelConfig(path=path), micro_batch_tokens=64, **settings), world)
    engine.init_model()
    return engine


def layered(world, path, function, *settings):
    """Call `function` on an engine whose layers are FSDP groups of their own."""
    before, sharding.SMALL_MODEL_BYTES = sharding.SMALL_MODEL_BYTES, 0
    try:
        return function(world, path, *settings)
    finally:
        sharding.SMALL_MODEL_BYTES = before


def logprobs(world, path, settings):
    engine = built(world, path, **settings)
    batch = random_batch(12, seed=4)
    with engine.eval_mode():
        predictions, _ = engine.forward_backward_step(engine.shard_data(batch), forward_only=True)
    return engine.unshard_data(predictions)["logprobs"]


def mean_gap(found, exact, batch):
    mask = batch["loss_mask"]
    return float((found - exact)[mask].abs().mean())


@pytest.mark.parametrize("settings", [{}, {"inference_only": True}, {"lora": LoraConfig(rank=2)}], ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_log_probabilities_are_as_near_as_those_of_hugging_face(ernie, two_ranks, num_ranks, settings):
    batch = random_batch(12, seed=4)
    exact = reference_logprobs(load_reference(ernie), batch)["logprobs"].detach()
    low = AutoModelForCausalLM.from_pretrained(ernie, dtype=torch.bfloat16, attn_implementation="eager")
    plain = reference_logprobs(low, batch)["logprobs"].detach()
    if num_ranks == 1:
        found = logprobs(World(), ernie, settings)
    else:
        found = two_ranks.run(layered, ernie, logprobs, settings)[0]
    assert mean_gap(found, exact, batch) < 1.5 * mean_gap(plain, exact, batch)


def trained(world, path, settings, folder):
    """Take a step, save, and return gradient norm, gradients, weights and the dtypes of the manifest."""
    engine = built(world, path, **settings)
    engine.set_loss_fn(SftLoss())
    with engine.train_mode():
        engine.optimizer_zero_grad()
        for seed in (1, 2):  # gradients of two calls add up
            engine.forward_backward_step(engine.shard_data(random_batch(12, seed=seed)))
        grads = {name: grad.clone() for name, grad in engine.named_gradients()}
        norm = engine.optimizer_step()
    engine.save_checkpoint(folder)
    weights = {name: weight.clone() for name, weight in engine.named_weights()}
    return norm, grads, weights, {spec.name: spec.dtype for spec in engine.weight_manifest()}


def loaded(world, path, settings, folder):
    engine = built(world, path, **settings)
    engine.load_checkpoint(folder)
    return {name: weight.clone() for name, weight in engine.named_weights()}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.deep),
        {"shard_size": 2},
        pytest.param({"sequence_parallel_size": 2}, marks=pytest.mark.deep),
    ],
    ids=str,
)
def test_gradients_norm_and_step_are_those_of_one_rank(ernie, four_ranks, tmp_path, settings):
    norm, grads, weights, dtypes = trained(World(), ernie, {}, str(tmp_path / "one"))
    found = four_ranks.run(layered, ernie, trained, settings, str(tmp_path / "four"))
    assert found[0][0] == pytest.approx(norm, rel=2e-2)
    routers = [name for name in weights if name.endswith(ROUTER)]
    assert len(routers) == 2
    for name in routers:
        error = (found[0][1][name] - grads[name]).norm() / grads[name].norm()
        assert error < 3e-2, name
    for _, _, others, their_dtypes in found:
        assert their_dtypes == dtypes
        for name, weight in weights.items():
            assert weight.dtype == dtypes[name]
            assert torch.equal(others[name], found[0][2][name]), name
    float32 = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert float32 == {name for name in dtypes if name.endswith((ROUTER, BIAS))}
    for num_ranks, folder in ((1, "four"), (4, "one")):
        back = (
            loaded(World(), ernie, {}, str(tmp_path / folder))
            if num_ranks == 1
            else four_ranks.run(layered, ernie, loaded, settings, str(tmp_path / folder))[1]
        )
        written = weights if folder == "one" else found[0][2]
        for name, weight in written.items():
            assert torch.equal(back[name], weight), name


def norms(world, path, dtype, batch):
    engine = built(
        world, path, dtype=dtype, freeze=("*layers.0*", "*layers.1.self_attn*", "*norm*", "*embed*")
    )
    engine.set_loss_fn(SftLoss())
    with engine.train_mode():
        engine.forward_backward_step(engine.shard_data(batch))
        by_hand = {name: float(grad.norm()) for name, grad in engine.named_gradients()}
        return engine.optimizer_step(), sum(norm**2 for norm in by_hand.values()) ** 0.5


def test_the_norm_counts_what_lies_on_every_rank_once(ernie, four_ranks):
    for norm, by_hand in four_ranks.run(norms, ernie, Dtype.BFLOAT16, random_batch(12, seed=1)):
        assert norm == pytest.approx(by_hand, rel=1e-5)


def test_exports_and_merges_keep_their_bits(ernie, two_ranks, tmp_path):
    original = load_file(Path(ernie) / "model.safetensors")
    for number, settings in enumerate([{}, {"lora": LoraConfig(rank=2)}, {"inference_only": True}]):
        folder = str(tmp_path / f"{number}")
        two_ranks.run(layered, ernie, exported, settings, folder)
        written = load_file(Path(folder) / "model.safetensors")
        for name, weight in original.items():
            if name.endswith((ROUTER, BIAS)):
                assert torch.equal(written[name], weight), name
            else:
                assert written[name].dtype == torch.bfloat16


def exported(world, path, settings, folder):
    built(world, path, **settings).export_huggingface(folder)


def bases(world, path):
    return built(world, path, lora=LoraConfig(rank=2))._target().base


def test_the_base_of_adapters_has_the_fingerprint_of_one_rank(ernie, two_ranks):
    assert two_ranks.run(layered, ernie, bases)[0] == bases(World(), ernie)


def test_the_self_check_sees_that_one_is_rounded(ernie, monkeypatch):
    monkeypatch.setattr(families, "stays_float32", lambda hf, name: False)
    with pytest.raises(ConfigError, match=r"`model.layers.0.mlp.gate.weight` is in bfloat16 .* float32"):
        built(World(), ernie)
