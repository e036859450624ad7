"""Weights frozen by pattern stay as they are, the others train as if nothing else were there."""

import pytest
import torch

from offbeat_engine import ConfigError, Fsdp2Config, ModelConfig, OptimizerConfig, SftLoss, World
from offbeat_engine.batch import LossScale
from offbeat_engine.fsdp2 import Fsdp2Engine
from offbeat_engine.testing import make_tiny_model, random_batch, relative_error
from offbeat_engine.testing.reference import load_reference, reference_logprobs

BATCHES = [random_batch(8, seed=seed) for seed in range(3)]
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-4, max_grad_norm=0.5)
FREEZE = ("model.embed_tokens.weight", "model.layers.0.*", "*.bias")


def make_engine(path, world=None, freeze=FREEZE):
    config = Fsdp2Config(model=ModelConfig(path=path), optimizer=OPTIMIZER, freeze=freeze)
    engine = Fsdp2Engine(config, World() if world is None else world)
    engine.init_model()
    engine.set_loss_fn(SftLoss())
    return engine


def step(engine, batch):
    with engine.train_mode():
        engine.optimizer_zero_grad()
        _, loss, _ = engine.forward_backward_step(engine.shard_data(batch))
        gradients = {name: tensor.clone() for name, tensor in engine.named_gradients()}
        return loss, engine.optimizer_step(), gradients


def train(world, path, root):
    """Two steps, a checkpoint, one more in an engine that loads it."""
    engine = make_engine(path, world)
    trace = [step(engine, batch) for batch in BATCHES[:2]]
    engine.save_checkpoint(root, global_step=2)
    engine = make_engine(path, world)
    engine.load_checkpoint(root)
    trace.append(step(engine, BATCHES[2]))
    return trace, {name: tensor.clone() for name, tensor in engine.named_weights()}


def plain(path):
    model = load_reference(path)
    trained = {n: p for n, p in model.named_parameters() if not n.endswith(".bias") and "layers.0." not in n}
    del trained["model.embed_tokens.weight"]
    for name, param in model.named_parameters():
        param.requires_grad_(name in trained)
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0)
    losses, norms = [], []
    for batch in BATCHES:
        optimizer.zero_grad()
        scale = LossScale(num_tokens=int(batch["loss_mask"].sum()), num_sequences=8)
        loss = SftLoss()(reference_logprobs(model, batch), batch, scale).loss
        loss.backward()
        gradients = {name: param.grad.clone() for name, param in trained.items()}
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), 0.5)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms, gradients, dict(model.named_parameters())


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_rest_trains_as_the_plain_model_does_also_after_loading(tiny, tmp_path, two_ranks, num_ranks):
    if num_ranks == 1:
        trace, weights = train(World(), tiny, str(tmp_path))
    else:
        trace, weights = two_ranks.run(train, tiny, str(tmp_path))[0]
    losses, norms, gradients, expected = plain(tiny)
    assert [loss for loss, _, _ in trace] == pytest.approx(losses, rel=1e-6)
    assert [norm for _, norm, _ in trace] == pytest.approx(norms, rel=1e-5)
    assert trace[-1][2].keys() == gradients.keys()
    assert max(relative_error(trace[-1][2][name], gradients[name]) for name in gradients) <= 1e-4
    first = dict(load_reference(tiny).named_parameters())
    for name, tensor in weights.items():
        if name in gradients:
            assert relative_error(tensor, expected[name].detach()) <= 1e-5
            assert not torch.equal(tensor, first[name])
        else:
            assert torch.equal(tensor, first[name])


def test_a_mixture_freezes_expert_weights_together(tmp_path):
    path = make_tiny_model(tmp_path, family="mixtral", num_local_experts=2)
    engine = make_engine(path, freeze=("*.experts.*.w[13].weight", "*embed*"))
    with engine.train_mode():
        engine.forward_backward_step(BATCHES[0])
        names = [name for name, _ in engine.named_gradients()]
    assert any(name.endswith("w2.weight") for name in names)
    assert not any(name.endswith(("w1.weight", "w3.weight")) for name in names)
    with pytest.raises(ConfigError, match=r"experts\.0\.w1\.weight` and .* as one weight"):
        make_engine(path, freeze=("*.experts.0.w1.weight",))


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        (("model.embed_token.weight",), r"no weight matches .*; near it are model\.embed_tokens\.weight"),
        (
            ("*norm*", "lm_head.weight"),
            r"no weight matches 'lm_head\.weight' \(tied weights go by one name\)",
        ),
        (("*",), "nothing to train"),
    ],
    ids=str,
)
def test_patterns_that_cannot_be_meant_are_refused(tiny, freeze, message):
    with pytest.raises(ConfigError, match=message):
        make_engine(tiny, freeze=freeze)


def test_an_untied_head_alone_can_be_trained(tmp_path):
    path = make_tiny_model(tmp_path, tie_word_embeddings=False)
    engine = make_engine(path, freeze=("model.*",))
    _, _, gradients = step(engine, BATCHES[0])
    assert list(gradients) == ["lm_head.weight"]
