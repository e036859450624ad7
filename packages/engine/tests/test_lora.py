"""Adapters against peft's own model: training, merged and separate weights, exports, checkpoints."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from offbeat_engine import (
    CheckpointError,
    ConfigError,
    Dtype,
    Fsdp2Config,
    LoraConfig,
    LoraExport,
    LossOutput,
    ModelConfig,
    OptimizerConfig,
    SftLoss,
    WeightKind,
    World,
)
from offbeat_engine.batch import LossScale
from offbeat_engine.fsdp2 import Fsdp2Engine
from offbeat_engine.fsdp2.weights import lora
from offbeat_engine.testing import make_tiny_model, random_batch, relative_error
from offbeat_engine.testing.reference import reference_logprobs

peft = pytest.importorskip("peft")

BATCHES = [random_batch(9, seed=seed) for seed in range(3)]
LORA = LoraConfig(rank=3, alpha=12.0)
ALONE = replace(LORA, export=LoraExport.ADAPTER)
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-4, max_grad_norm=0.0)


def make_engine(path, world=None, model=None, **changes):
    config = Fsdp2Config(
        model=model or ModelConfig(path=path),
        optimizer=OPTIMIZER,
        micro_batch_tokens=60,
        **{"lora": LORA, **changes},
    )
    engine = Fsdp2Engine(config, World() if world is None else world)
    engine.init_model()
    engine.set_loss_fn(SftLoss())
    return engine


def weights_of(engine):
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


def steps(engine, batches):
    losses = []
    with engine.train_mode():
        for batch in batches:
            engine.optimizer_zero_grad()
            losses.append(engine.forward_backward_step(engine.shard_data(batch))[1])
            gradients = {name: tensor.clone() for name, tensor in engine.named_gradients()}
            engine.optimizer_step()
    return losses, gradients


def train(world, path, changes):
    """Return the weights before, losses, last gradients, and weights after training on `BATCHES`."""
    engine = make_engine(path, world, **changes)
    before = weights_of(engine)
    losses, gradients = steps(engine, BATCHES)
    return before, losses, gradients, weights_of(engine)


def plain(path, adapter):
    """Train peft's own model from `adapter` with `torch.optim.AdamW`; return losses, gradients, adapter, merged."""
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    names = {name.rpartition(".")[2] for name, m in base.model.named_modules() if type(m) is torch.nn.Linear}
    config = peft.LoraConfig(r=3, lora_alpha=12, target_modules=sorted(names), task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    peft.set_peft_model_state_dict(model, adapter)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0)
    losses = []
    for batch in BATCHES:
        optimizer.zero_grad()
        scale = LossScale(num_tokens=int(batch["loss_mask"].sum()), num_sequences=9)
        loss = SftLoss()(reference_logprobs(model, batch), batch, scale).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    gradients = {
        name.replace(".default.", "."): param.grad
        for name, param in model.named_parameters()
        if param.requires_grad
    }
    after = {name: tensor.clone() for name, tensor in peft.get_peft_model_state_dict(model).items()}
    merged = model.merge_and_unload().state_dict()
    return (
        losses,
        gradients,
        after,
        {name: tensor for name, tensor in merged.items() if "lm_head" not in name},
    )


@pytest.fixture(scope="module")
def run(tiny):
    """One rank's own run, adapter exported alone, and peft's."""
    mine = train(World(), tiny, {"lora": ALONE})
    return mine, plain(tiny, mine[0])


def worst(got, expected):
    assert got.keys() == expected.keys()
    return max(relative_error(got[name], expected[name]) for name in expected)


def check(got, expected):
    losses, gradients, after, _ = expected
    assert got[1] == pytest.approx(losses, rel=1e-6)
    assert got[1][2] < got[1][0]
    assert worst(got[2], gradients) <= 1e-4
    assert worst(got[3], after) <= 1e-4


def test_one_rank_is_peft(run):
    check(*run)


@pytest.mark.parametrize("changes", [{}, {"packing": False}, {"activation_checkpointing": True}], ids=str)
def test_two_ranks_are_peft(tiny, run, two_ranks, changes):
    first, second = two_ranks.run(train, tiny, {"lora": ALONE, **changes})
    check(first, run[1])
    assert all(torch.equal(first[3][name], second[3][name]) for name in first[3])


def test_merged_weights_are_those_peft_merges(tiny, run, two_ranks):
    before, _, gradients, merged = train(World(), tiny, {})
    source = load_file(f"{tiny}/model.safetensors")
    assert worst(before, source) == 0.0  # B starts at zero
    assert worst(merged, run[1][3]) <= 1e-6
    assert gradients.keys() == run[0][2].keys()
    assert worst(two_ranks.run(train, tiny, {})[0][3], run[1][3]) <= 1e-6


def test_the_manifest_says_which_of_the_two_it_is(tiny):
    merged, alone = make_engine(tiny), make_engine(tiny, lora=ALONE)
    for engine, kind in ((merged, WeightKind.FULL), (alone, WeightKind.ADAPTER)):
        specs = engine.weight_manifest()
        assert {spec.kind for spec in specs} == {kind}
        assert [(s.name, s.shape, s.dtype) for s in specs] == [
            (name, tuple(tensor.shape), tensor.dtype) for name, tensor in engine.named_weights()
        ]


def bf16(world, path):
    engine = make_engine(path, world, dtype=Dtype.BFLOAT16, lora=ALONE)
    adapter = weights_of(engine)
    losses, _ = steps(engine, BATCHES)
    kinds = {param.requires_grad: set() for param in engine._state.scorer.parameters()}
    for param in engine._state.scorer.parameters():
        kinds[param.requires_grad].add(param.dtype)
    return losses, {tensor.dtype for tensor in adapter.values()}, kinds


def test_in_bf16_the_frozen_base_is_bf16_and_adapters_step_in_float32(tiny, run, two_ranks):
    losses, exported, kinds = two_ranks.run(bf16, tiny)[0]
    assert losses == pytest.approx(run[1][0], rel=0.03)
    assert exported == {torch.bfloat16}
    assert kinds == {True: {torch.float32}, False: {torch.bfloat16}}


def export(world, path, out, settings):
    engine = make_engine(path, world, lora=settings)
    steps(engine, BATCHES[:1])
    engine.export_huggingface(out)
    return weights_of(engine)


def logits(model):
    with torch.no_grad():
        return model.eval()(BATCHES[0]["input_ids"]).logits


def test_an_exported_adapter_is_one_that_peft_loads(tiny, tmp_path, two_ranks):
    weights, _ = two_ranks.run(export, tiny, str(tmp_path / "adapter"), ALONE)
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert worst(written, weights) == 0.0
    base = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    model.save_pretrained(tmp_path / "again")
    assert worst(load_file(tmp_path / "again" / "adapter_model.safetensors"), written) == 0.0
    two_ranks.run(export, tiny, str(tmp_path / "merged"), LORA)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert_close(logits(model), logits(merged), rtol=0, atol=1e-4)
    plain_base = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    assert float((logits(merged) - logits(plain_base)).abs().max()) > 1e-2


def save(world, path, root):
    engine = make_engine(path, world, lora=ALONE)
    steps(engine, BATCHES[:2])
    engine.save_checkpoint(root, global_step=2)
    return steps(engine, BATCHES[2:]), weights_of(engine)


def load(world, path, root):
    engine = make_engine(path, world, lora=ALONE)
    assert engine.load_checkpoint(root) == 2
    return steps(engine, BATCHES[2:]), weights_of(engine)


def test_a_checkpoint_holds_the_adapter_alone_and_resumes_on_any_ranks(tiny, tmp_path, two_ranks):
    (losses, _), weights = two_ranks.run(save, tiny, str(tmp_path))[0]
    (again, _), same = two_ranks.run(load, tiny, str(tmp_path))[0]
    assert losses == again
    assert worst(same, weights) == 0.0
    (alone, _), close = load(World(), tiny, str(tmp_path))
    assert alone == pytest.approx(losses, rel=1e-6)
    assert worst(close, weights) <= 1e-5
    held = json.loads((tmp_path / "step_2" / "index.json").read_text())["tensors"]
    assert all(".lora_" in name for name in held if not name.startswith("random/"))
    assert {name.split("/")[0] for name in held} == {"weight", "exp_avg", "exp_avg_sq", "random"}


@pytest.fixture(scope="module")
def saved_adapter(tiny, tmp_path_factory):
    root = str(tmp_path_factory.mktemp("adapter"))
    save(World(), tiny, root)
    return root


def test_a_checkpoint_of_another_base_is_refused(tiny, tmp_path):
    save(World(), tiny, str(tmp_path / "saved"))
    other = make_tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(CheckpointError, match=r"another base: `model\.\S*` has other values"):
        make_engine(other, lora=ALONE).load_checkpoint(str(tmp_path / "saved"))
    with pytest.raises(CheckpointError, match="frozen in only one"):
        make_engine(tiny, lora=LoraConfig()).load_checkpoint(str(tmp_path / "saved"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (replace(ALONE, alpha=6.0), "`lora.alpha` 12, and this engine has 6;"),
        (replace(ALONE, rank=6, alpha=12.0), "`lora.rank` 3, and this engine has 6;"),
        (
            replace(ALONE, targets=("q_proj", "v_proj")),
            r"`lora.targets` \['down_proj', .*'v_proj'\], and this engine has \['q_proj', 'v_proj'\];",
        ),
    ],
    ids=["alpha", "rank", "targets"],
)
def test_a_checkpoint_of_other_adapters_is_refused_with_both_values(tiny, saved_adapter, settings, words):
    engine = make_engine(tiny, lora=settings)
    before = weights_of(engine)
    with pytest.raises(CheckpointError, match=words):
        engine.load_checkpoint(saved_adapter)
    assert worst(weights_of(engine), before) == 0.0


def test_adapters_are_the_same_however_targets_and_dropout_are_said(tiny, saved_adapter):
    every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert make_engine(tiny, lora=replace(ALONE, targets=every)).load_checkpoint(saved_adapter) == 2
    assert make_engine(tiny, lora=replace(ALONE, dropout=0.1, export=LORA.export)).load_checkpoint(
        saved_adapter
    )


def test_fingerprints_tell_a_changed_value_and_swapped_rows():
    tensor = torch.randn(5, 3)
    changed = tensor.clone()
    changed[2, 1] = torch.nextafter(changed[2, 1], torch.tensor(9.0))
    assert len({lora.fingerprint(x) for x in (tensor, changed, tensor.flip(0))}) == 3
    assert lora.fingerprint(tensor) == lora.fingerprint(tensor.T.contiguous().T)


class ValueLoss:
    """Squared distance of each value from one."""

    def __call__(self, predictions, batch, scale):
        error = (predictions["values"] - 1.0) * batch["loss_mask"]
        return LossOutput(loss=error.square().sum() / scale.num_tokens)


def train_value(world, path, out):
    engine = make_engine(path, world, model=ModelConfig(path=path, head="value"), lora=ALONE)
    engine.set_loss_fn(ValueLoss())
    losses, _ = steps(engine, BATCHES * 2)
    engine.export_huggingface(out)
    with engine.eval_mode():
        values, _ = engine.forward_backward_step(engine.shard_data(BATCHES[0]), forward_only=True)
    return losses, weights_of(engine), engine.unshard_data(values)["values"]


def test_a_value_head_is_trained_beside_the_adapters(tiny, tmp_path, two_ranks):
    losses, weights, values = two_ranks.run(train_value, tiny, str(tmp_path))[0]
    assert losses[-1] < 0.5 * losses[0]
    assert {"base_model.model.score.weight", "base_model.model.score.bias"} < weights.keys()
    base = AutoModelForTokenClassification.from_pretrained(tiny, num_labels=1, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    length = int(BATCHES[0]["lengths"][0])
    with torch.no_grad():
        expected = model(input_ids=BATCHES[0]["input_ids"][:1, :length]).logits[0, :-1, 0]
    mask = BATCHES[0]["loss_mask"][0, 1:length]
    assert_close(values[0, 1:length][mask], expected[mask], rtol=0, atol=1e-5)


def test_targets_are_endings_of_module_names(tiny, tmp_path):
    engine = make_engine(tiny, lora=replace(ALONE, targets=("q_proj", "1.mlp.down_proj")))
    adapted = {spec.name.split(".lora_")[0] for spec in engine.weight_manifest()}
    root = "base_model.model.model.layers"
    assert adapted == {f"{root}.0.self_attn.q_proj", f"{root}.1.self_attn.q_proj", f"{root}.1.mlp.down_proj"}
    engine.export_huggingface(str(tmp_path / "out"))
    assert len(json.loads((tmp_path / "out" / "adapter_config.json").read_text())["target_modules"]) == 3


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q_porj",), "did you mean q_proj"),
        (("lm_head",), "takes no adapter"),
        (("embed_tokens",), "is no linear layer"),
        (("self_attn",), "is no linear layer"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(tiny, targets, message):
    with pytest.raises(ConfigError, match=message):
        make_engine(tiny, lora=replace(LORA, targets=targets))


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"lora": LoraConfig(rank=-1)}, "lora.rank"),
        ({"lora": replace(LORA, dropout=1.0)}, "lora.dropout"),
        ({"lora": replace(LORA, alpha=0.0)}, "lora.alpha"),
        ({"lora": LORA, "freeze": ("*embed*",)}, "freeze"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(changes, setting):
    config = Fsdp2Config(model=ModelConfig(path="nowhere"), **changes)
    assert [refusal.setting for refusal in Fsdp2Engine.check(config, 1)] == [setting]
