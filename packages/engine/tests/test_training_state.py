"""Training state under names that any engine knows: where it lies in a checkpoint, and what moves with it."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from offbeat_engine import (
    CheckpointError,
    Fsdp2Config,
    ModelConfig,
    OptimizerConfig,
    SftLoss,
    World,
)
from offbeat_engine.fsdp2 import Fsdp2Engine
from offbeat_engine.testing import make_tiny_model, random_batch
from offbeat_engine.toolkit.state.checkpoint_folders import META, entry_of
from offbeat_engine.toolkit.state.slices import SliceReader, read_index
from offbeat_engine.toolkit.state.training_state import EXP_AVG, EXP_AVG_SQ, INDEX, WEIGHT

BATCHES = [random_batch(8, seed=seed) for seed in range(4)]
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-4, weight_decay=0.1, warmup_steps=1, total_steps=9)
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES = {"qwen2": {}, "qwen3_moe": EXPERTS}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    """A dense model with tied embeddings; three experts, so that two ranks hold two and one."""
    path = tmp_path_factory.mktemp("models") / request.param
    return make_tiny_model(path, family=request.param, layers=1, **FAMILIES[request.param])


def make_engine(path, world, **changes):
    optimizer = replace(OPTIMIZER, **changes.pop("optimizer", {}))
    engine = Fsdp2Engine(Fsdp2Config(model=ModelConfig(path=path), optimizer=optimizer, **changes), world)
    engine.init_model()
    engine.set_loss_fn(SftLoss())
    return engine


def steps(engine, batches):
    """Train; return losses and weights."""
    losses = []
    with engine.train_mode():
        for batch in batches:
            engine.optimizer_zero_grad()
            losses.append(engine.forward_backward_step(engine.shard_data(batch))[1])
            engine.optimizer_step()
            engine.lr_scheduler_step()
    return losses, {name: tensor.clone() for name, tensor in engine.named_weights()}


def save(world, path, root):
    engine = make_engine(path, world)
    steps(engine, BATCHES[:2])
    engine.save_checkpoint(root, global_step=2)
    return steps(engine, BATCHES[2:])


def pass_on(world, path, root, to):
    """Load with an engine that has gone elsewhere, save what came."""
    engine = make_engine(path, world)
    steps(engine, BATCHES[3:])
    assert engine.load_checkpoint(root) == 2
    engine.save_checkpoint(to, global_step=2)
    return steps(engine, BATCHES[2:])


def tensors_of(root):
    """Return every whole tensor of a checkpoint but for random states, and the steps."""
    said = json.loads((root / "step_2" / INDEX).read_text())
    reader = SliceReader(root / "step_2", read_index(said["tensors"], str(root)))
    held = {name: reader.read(name) for name in reader.index if not name.startswith("random/")}
    return held, said["steps"]


def same(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(right[name], tensor), name


def test_a_run_moves_from_two_ranks_to_one_and_back(model, tmp_path, two_ranks):
    """What is stored is the same to the bit each time; what is trained after it, where the ranks are as many."""
    roots = [tmp_path / name for name in ("two", "one", "again")]
    (losses, weights), _ = two_ranks.run(save, model, str(roots[0]))
    alone, moved = pass_on(World(), model, str(roots[0]), str(roots[1]))
    assert alone == pytest.approx(losses, rel=1e-6)
    for name, tensor in weights.items():
        torch.testing.assert_close(moved[name], tensor, rtol=0, atol=1e-6)
    (again, back), _ = two_ranks.run(pass_on, model, str(roots[1]), str(roots[2]))
    assert again == losses
    same(back, weights)
    first, said = tensors_of(roots[0])
    assert len(list((roots[1] / "step_2").glob("rank_*"))) == 1
    for root in roots[1:]:
        held, steps_said = tensors_of(root)
        same(held, first)
        assert steps_said == said
    assert {*said.values()} == {2.0}


def test_names_and_shapes_are_those_of_the_hugging_face_checkpoint(model, tmp_path, two_ranks):
    two_ranks.run(save, model, str(tmp_path))
    files, (held, said) = load_file(f"{model}/model.safetensors"), tensors_of(tmp_path)
    assert held.keys() == {kind + name for kind in (WEIGHT, EXP_AVG, EXP_AVG_SQ) for name in files}
    assert said.keys() == files.keys()
    for name, tensor in files.items():
        for kind in (WEIGHT, EXP_AVG, EXP_AVG_SQ):
            assert (held[kind + name].shape, held[kind + name].dtype) == (tensor.shape, torch.float32)


def test_moments_are_permuted_as_their_weights_are(tmp_path):
    """Adam's of expert 2's up projection are what its gradient makes of them, element by element."""
    path = make_tiny_model(tmp_path / "model", family="qwen3_moe", layers=1, **EXPERTS)
    engine = make_engine(path, World(), optimizer={"max_grad_norm": 0.0})
    with engine.train_mode():
        engine.forward_backward_step(engine.shard_data(BATCHES[0]))
        gradients = {name: tensor.clone() for name, tensor in engine.named_gradients()}
        engine.optimizer_step()
    engine.save_checkpoint(str(tmp_path), global_step=2)
    held, _ = tensors_of(tmp_path)
    assert sum(".experts." in name for name in gradients) == 9
    for name, gradient in gradients.items():
        torch.testing.assert_close(held[EXP_AVG + name], (1 - OPTIMIZER.beta1) * gradient)
        torch.testing.assert_close(held[EXP_AVG_SQ + name], (1 - OPTIMIZER.beta2) * gradient.square())


def test_each_rank_writes_its_own_rows_and_nobody_the_whole(model, tmp_path, two_ranks):
    two_ranks.run(save, model, str(tmp_path))
    sizes = [(tmp_path / "step_2" / f"rank_{rank}_0.safetensors").stat().st_size for rank in range(2)]
    assert max(sizes) < 0.75 * sum(sizes)
    with safe_open(tmp_path / "step_2" / "rank_1_0.safetensors", "pt") as opened:
        assert any(key.startswith(EXP_AVG) for key in opened.keys())  # noqa: SIM118 no dictionary


def rewrite(folder, change):
    """Change what the index says, and its digest: as one who writes checkpoints and is wrong would."""
    said = json.loads((folder / INDEX).read_text())
    change(said)
    (folder / INDEX).write_text(json.dumps(said))
    put_digest(folder, INDEX)


def put_digest(folder, name):
    meta = json.loads((folder / META).read_text())
    meta["files"][name] = entry_of(folder / name)
    (folder / META).write_text(json.dumps(meta))


NORM = f"{EXP_AVG}model.norm.weight"


def lose_a_region(said):
    said["tensors"][NORM]["pieces"] = []


def say_a_region_twice(said):
    said["tensors"][NORM]["pieces"] *= 2


def lose_a_tensor(said):
    del said["tensors"][NORM]


def forget_the_steps(said):
    del said["steps"]["model.norm.weight"]


def say_another_step(said):
    said["steps"] = {name: 1.0 + number for number, name in enumerate(said["steps"])}


def add_a_weight(said):
    said["tensors"][f"{WEIGHT}unheard.weight"] = said["tensors"][f"{WEIGHT}model.norm.weight"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lose_a_region, rf"`{NORM}` should have 32 numbers \[32\], and only 0 were written"),
        (say_a_region_twice, rf"`{NORM}` has numbers twice: at \[0:32\] in rank_0_0"),
        (lose_a_tensor, rf"does not fit the model: `{NORM}` should be \[32\], got nothing"),
        (
            forget_the_steps,
            r"optimizer state of `model.norm.weight` is incomplete \(update counts of its parts: None\)",
        ),
        (add_a_weight, r"it has `weight/unheard.weight`, which the model has not"),
    ],
)
def test_what_is_not_whole_is_refused_before_anything_changes(tiny, tmp_path, change, match):
    engine = make_engine(tiny, World())
    _, before = steps(engine, BATCHES[:1])
    engine.save_checkpoint(str(tmp_path), global_step=1)
    rewrite(tmp_path / "step_1", change)
    with pytest.raises(CheckpointError, match=match):
        engine.load_checkpoint(str(tmp_path))
    same({name: tensor.clone() for name, tensor in engine.named_weights()}, before)


def test_experts_that_were_not_stepped_together_are_refused(tmp_path):
    path = make_tiny_model(tmp_path / "model", family="qwen3_moe", layers=1, **EXPERTS)
    engine = make_engine(path, World())
    steps(engine, BATCHES[:1])
    engine.save_checkpoint(str(tmp_path), global_step=1)
    rewrite(tmp_path / "step_1", say_another_step)
    with pytest.raises(CheckpointError, match=r"optimizer state of `.*experts.*` is incomplete"):
        engine.load_checkpoint(str(tmp_path))


def test_a_torn_file_is_refused_though_its_digest_is_right(tiny, tmp_path):
    engine = make_engine(tiny, World())
    steps(engine, BATCHES[:1])
    engine.save_checkpoint(str(tmp_path), global_step=1)
    path = tmp_path / "step_1" / "rank_0_0.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    put_digest(tmp_path / "step_1", path.name)
    with pytest.raises(CheckpointError, match="is cut off or damaged, or not what the index says"):
        engine.load_checkpoint(str(tmp_path))


def test_another_dtype_is_refused(tiny, tmp_path):
    engine = make_engine(tiny, World())
    engine.save_checkpoint(str(tmp_path), global_step=1)
    path = tmp_path / "step_1" / "rank_0_0.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)
    put_digest(tmp_path / "step_1", path.name)

    def to_bfloat16(said):
        for tensor in said["tensors"].values():
            tensor["dtype"] = "bfloat16"

    rewrite(tmp_path / "step_1", to_bfloat16)
    with pytest.raises(CheckpointError, match=r"should be torch.float32, got torch.bfloat16"):
        engine.load_checkpoint(str(tmp_path))


def test_another_optimizer_may_begin_where_there_are_no_moments(tiny, tmp_path):
    engine = make_engine(tiny, World())
    engine.save_checkpoint(str(tmp_path), global_step=0)
    steps(engine, BATCHES[:1])
    engine.save_checkpoint(str(tmp_path), global_step=1)
    for step in (0, 1):  # as they were written where there still was one
        path = tmp_path / f"step_{step}" / "engine.json"
        path.write_text(path.read_text().replace('"optimizer": "adamw"', '"optimizer": "adafactor"'))
        assert "adafactor" in path.read_text()
    with pytest.raises(CheckpointError, match="`adafactor` has gathered, and this engine has `adamw`"):
        engine.load_checkpoint(str(tmp_path), global_step=1)
    assert engine.load_checkpoint(str(tmp_path), global_step=0) == 0


def test_a_weight_that_was_frozen_has_no_moments_to_give(tiny, tmp_path):
    engine = make_engine(tiny, World(), freeze=("model.norm.weight",))
    steps(engine, BATCHES[:1])
    engine.save_checkpoint(str(tmp_path), global_step=1)
    with pytest.raises(
        CheckpointError, match=r"`model.norm.weight` is incomplete.*frozen in that run, freeze it here too"
    ):
        make_engine(tiny, World()).load_checkpoint(str(tmp_path))


def test_a_weight_that_never_had_a_gradient_begins_without_moments(tiny, tmp_path):
    engine, other = make_engine(tiny, World()), make_engine(tiny, World())
    with engine.train_mode():
        engine.forward_backward_step(engine.shard_data(BATCHES[0]))
        engine._state.updater.params["model.norm.weight"].grad = None
        engine.optimizer_step()
    engine.save_checkpoint(str(tmp_path), global_step=2)
    held, said = tensors_of(tmp_path)
    assert NORM not in held
    assert said["model.norm.weight"] == 0.0
    assert other.load_checkpoint(str(tmp_path)) == 2
    losses, weights = steps(other, BATCHES[1:])
    again, expected = steps(engine, BATCHES[1:])
    assert losses == again
    same(weights, expected)
