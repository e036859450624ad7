"""The value head against transformers' own token classifier: values, gradients, training, folders, checkpoints."""

import warnings
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from offbeat_engine import ConfigError, Fsdp2Config, LossOutput, ModelConfig, OptimizerConfig, World
from offbeat_engine.fsdp2 import Fsdp2Engine
from offbeat_engine.testing import make_tiny_model, random_batch, relative_error

FAMILIES = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {},
    "gemma": {},
    "mixtral": {"num_local_experts": 4},
}
BATCHES = [random_batch(9, seed=seed) for seed in range(3)]
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-4, max_grad_norm=0.5)


class ValueLoss:
    """Mean squared distance of each value from a target that differs by token."""

    def __call__(self, predictions, batch, scale):
        error = (predictions["values"] - batch["input_ids"] / 32.0) * batch["loss_mask"]
        return LossOutput(loss=error.square().sum() / scale.num_tokens)


def make_engine(path, world=None, **changes):
    config = Fsdp2Config(
        model=ModelConfig(path=path, head="value"),
        optimizer=OPTIMIZER,
        micro_batch_tokens=60,
    )
    engine = Fsdp2Engine(replace(config, **changes), World() if world is None else world)
    engine.init_model()
    engine.set_loss_fn(ValueLoss())
    return engine


def weights_of(engine):
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


def steps(engine, batches):
    trace = []
    with engine.train_mode():
        for batch in batches:
            engine.optimizer_zero_grad()
            predictions, loss, _ = engine.forward_backward_step(engine.shard_data(batch))
            values = engine.unshard_data(predictions)["values"]
            gradients = {name: tensor.clone() for name, tensor in engine.named_gradients()}
            engine.optimizer_step()
            trace.append((loss, values, gradients))
    return trace


def train(world, path, changes):
    engine = make_engine(path, world, **changes)
    return steps(engine, BATCHES), weights_of(engine)


@pytest.fixture(scope="module", params=FAMILIES)
def valued(request, tmp_path_factory):
    """A folder that holds a value head with weights of its own."""
    folder = tmp_path_factory.mktemp("valued")
    base = make_tiny_model(folder / "base", family=request.param, **FAMILIES[request.param])
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForTokenClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
        torch.nn.init.normal_(model.score.weight)
        torch.nn.init.normal_(model.score.bias)
    model.save_pretrained(folder / "model")
    return str(folder / "model"), plain(folder / "model", folder)


def plain(path, folder):
    """Train transformers' own model; return losses, values, and by their files' names gradients and weights."""
    model = AutoModelForTokenClassification.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=0)
    trace = []
    for batch in BATCHES:
        optimizer.zero_grad()
        rows = []
        for ids, length in zip(batch["input_ids"], batch["lengths"].tolist(), strict=True):
            row = model(input_ids=ids[None, :length]).logits[0, :-1, 0]
            rows.append(torch.nn.functional.pad(row, (1, len(ids) - length)))
        values = torch.stack(rows) * batch["loss_mask"]
        targets = batch["input_ids"] / 32.0 * batch["loss_mask"]
        loss = (values - targets).square().sum() / batch["loss_mask"].sum()
        loss.backward()
        gradients = as_written(model, [param.grad for param in model.parameters()], folder / "gradients")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        trace.append((float(loss.detach()), values.detach(), gradients))
    return trace, as_written(model, list(model.parameters()), folder / "weights")


def as_written(model, tensors, folder):
    """Return what `save_pretrained` makes of `tensors` in the parameters' place."""
    kept = [param.data for param in model.parameters()]
    for param, tensor in zip(model.parameters(), tensors, strict=True):
        param.data = tensor.detach().clone()
    model.save_pretrained(folder)
    for param, tensor in zip(model.parameters(), kept, strict=True):
        param.data = tensor
    return load_file(folder / "model.safetensors")


def check(got, expected):
    for (loss, values, gradients), (plain_loss, plain_values, plain_gradients) in zip(
        got[0], expected[0], strict=True
    ):
        assert loss == pytest.approx(plain_loss, rel=2e-6)
        assert_close(values, plain_values, rtol=0, atol=1e-5)
        assert gradients.keys() == plain_gradients.keys()
        assert max(relative_error(gradients[n], plain_gradients[n]) for n in gradients) <= 1e-4
    assert {"score.weight", "score.bias"} < got[1].keys() == expected[1].keys()
    assert max(relative_error(got[1][name], expected[1][name]) for name in got[1]) <= 1e-5


@pytest.mark.parametrize("changes", [{}, {"packing": False}], ids=["packed", "padded"])
def test_one_rank_trains_as_transformers_token_classifier(valued, changes):
    check(train(World(), valued[0], changes), valued[1])


def test_two_ranks_train_as_transformers_token_classifier(valued, two_ranks):
    check(two_ranks.run(train, valued[0], {})[0], valued[1])


def save(world, path, root):
    engine = make_engine(path, world)
    steps(engine, BATCHES[:2])
    engine.save_checkpoint(root, global_step=2)
    engine.export_huggingface(root + "/exported")
    before = weights_of(engine)
    return before, steps(engine, BATCHES[2:])[0][0], weights_of(engine)


def load(world, path, root):
    engine = make_engine(path, world, model=ModelConfig(path=path, head="value", random_init=True, seed=5))
    assert engine.load_checkpoint(root) == 2
    return steps(engine, BATCHES[2:])[0][0], weights_of(engine)


def test_head_and_all_come_back_from_a_checkpoint_and_from_an_exported_folder(tiny, tmp_path, two_ranks):
    before, loss, after = two_ranks.run(save, tiny, str(tmp_path))[0]
    again, same = two_ranks.run(load, tiny, str(tmp_path))[0]
    assert loss == again
    assert all(torch.equal(after[name], same[name]) for name in after)
    exported = weights_of(make_engine(str(tmp_path / "exported")))
    assert all(torch.equal(before[name], exported[name]) for name in before)
    assert load_file(tmp_path / "exported" / "model.safetensors").keys() == before.keys()


def test_a_new_head_is_drawn_from_the_seed_and_temperature_is_nothing_to_it(tiny):
    def first(seed):
        return weights_of(make_engine(tiny, model=ModelConfig(path=tiny, head="value", seed=seed)))

    assert torch.equal(first(1)["score.weight"], first(1)["score.weight"])
    assert not torch.equal(first(1)["score.weight"], first(2)["score.weight"])
    hot = BATCHES[0].clone()
    hot["temperature"] = hot["temperature"] * 3
    engine = make_engine(tiny)
    with engine.eval_mode():
        values = [
            engine.forward_backward_step(batch, forward_only=True)[0]["values"] for batch in (BATCHES[0], hot)
        ]
    assert torch.equal(*values)


def test_a_reward_models_head_without_a_bias_is_taken(tiny, tmp_path):
    reward = AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1, dtype=torch.float32)
    reward.save_pretrained(tmp_path)
    weights = weights_of(make_engine(str(tmp_path)))
    assert torch.equal(weights["score.weight"], reward.score.weight)
    assert not bool(weights["score.bias"].any())


def test_folders_that_hold_another_head_or_not_all_weights_are_refused(tiny, tmp_path):
    labels = AutoModelForTokenClassification.from_pretrained(tiny, num_labels=3, dtype=torch.float32)
    labels.save_pretrained(tmp_path / "labels")
    with pytest.raises(ConfigError, match="no model for a value head"):
        make_engine(str(tmp_path / "labels"))
    untied = make_tiny_model(tmp_path / "untied", tie_word_embeddings=False)
    file = tmp_path / "untied" / "model.safetensors"
    weights = load_file(file)
    del weights["lm_head.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack 1 of the model's weights, such as `lm_head\.weight`"):
        make_engine(untied, model=ModelConfig(path=untied))
    assert "score.weight" in weights_of(make_engine(untied))
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack 1 of the model's weights, such as `model\.norm\.weight`"):
        make_engine(untied)


def without_a_warning(world, path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return steps(make_engine(path, world), BATCHES[:1])[0][0]


def test_a_sharded_value_head_answers_with_a_tensor_of_its_own(tmp_path, two_ranks):
    """Of a view FSDP2 warns: an operation on it in place would lose the gradients."""
    path = make_tiny_model(tmp_path, family="llama", head="value")
    first, second = two_ranks.run(without_a_warning, path)
    assert first == second > 0
