"""Checkpoints: resuming is as if nothing happened, on as many ranks or on others."""

from dataclasses import replace

import pytest
import torch

from offbeat_engine import (
    CheckpointError,
    Fsdp2Config,
    ModelConfig,
    OptimizerConfig,
    Schedule,
    SftLoss,
    World,
)
from offbeat_engine.fsdp2 import Fsdp2Engine
from offbeat_engine.testing import make_tiny_model, random_batch, relative_error
from offbeat_engine.testing.reference import load_reference
from offbeat_engine.toolkit.state import checkpoint_folders

OPTIMIZER = OptimizerConfig(lr=1e-3, schedule=Schedule.LINEAR, total_steps=6, warmup_steps=1, eps=1e-4)
BATCHES = [random_batch(8, seed=seed) for seed in range(4)]


def make_engine(path, world, **changes):
    config = Fsdp2Config(model=ModelConfig(path=path), optimizer=OPTIMIZER)
    engine = Fsdp2Engine(replace(config, **changes), world)
    engine.init_model()
    engine.set_loss_fn(SftLoss())
    return engine


def steps(engine, batches):
    """Train; return (loss, norm, learning rate of the next step) of each."""
    trace = []
    with engine.train_mode():
        for batch in batches:
            engine.optimizer_zero_grad()
            _, loss, _ = engine.forward_backward_step(engine.shard_data(batch))
            trace.append((loss, engine.optimizer_step(), engine.lr_scheduler_step()))
    return trace


def weights_of(engine):
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


def save_then_go_on(world, path, root):
    """Two steps, a checkpoint, two more; return random numbers, trace and weights after the checkpoint."""
    torch.manual_seed(5 + world.rank)
    engine = make_engine(path, world)
    steps(engine, BATCHES[:2])
    engine.save_checkpoint(root, global_step=2)
    drawn = torch.rand(3)
    return drawn, steps(engine, BATCHES[2:]), weights_of(engine)


def load_then_go_on(world, path, root):
    engine = make_engine(path, world, model=ModelConfig(path=path, random_init=True, seed=99))
    torch.manual_seed(1234)
    assert engine.load_checkpoint(root) == 2
    drawn = torch.rand(3)
    return drawn, steps(engine, BATCHES[2:]), weights_of(engine)


def same_bits(left, right):
    return (
        torch.equal(left[0], right[0])
        and left[1] == right[1]
        and all(torch.equal(left[2][name], right[2][name]) for name in left[2])
    )


def close(left, right):
    traces = zip(left[1], right[1], strict=True)
    return (
        all(a == pytest.approx(b, rel=1e-5) for a, b in traces)
        and max(relative_error(left[2][name], right[2][name]) for name in left[2]) <= 1e-5
    )


def test_one_rank_resumes_bit_for_bit(tiny, tmp_path):
    saved = save_then_go_on(World(), tiny, str(tmp_path))
    assert same_bits(saved, load_then_go_on(World(), tiny, str(tmp_path)))


def test_two_ranks_resume_bit_for_bit_and_their_checkpoint_fits_one(tiny, tmp_path, two_ranks):
    saved = two_ranks.run(save_then_go_on, tiny, str(tmp_path))
    assert not torch.equal(saved[0][0], saved[1][0])
    loaded = two_ranks.run(load_then_go_on, tiny, str(tmp_path))
    assert same_bits(saved[0], loaded[0])
    assert same_bits(saved[1], loaded[1])
    assert close(saved[0], load_then_go_on(World(), tiny, str(tmp_path)))


def test_a_checkpoint_of_one_rank_fits_two(tiny, tmp_path, two_ranks):
    saved = save_then_go_on(World(), tiny, str(tmp_path))
    for loaded in two_ranks.run(load_then_go_on, tiny, str(tmp_path)):
        assert close(saved, loaded)


def fail_on_one_rank(world, path, root):
    """Rank 1 cannot read what it should load."""
    engine = make_engine(path, world)
    if world.rank == 1:
        engine._state.updater.params["unheard.weight"] = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(
        CheckpointError, match=r"rank 1: .*`weight/unheard.weight` should be \[3\], got nothing"
    ):
        engine.load_checkpoint(root)
    return True


def test_a_rank_that_fails_to_load_fails_all(tiny, tmp_path, two_ranks):
    make_engine(tiny, World()).save_checkpoint(str(tmp_path), global_step=1)
    assert two_ranks.run(fail_on_one_rank, tiny, str(tmp_path)) == [True, True]


def test_a_fresh_engine_saves_and_forgets_moments(tiny, tmp_path):
    fresh = make_engine(tiny, World())
    fresh.save_checkpoint(str(tmp_path), global_step=0)
    trained = make_engine(tiny, World())
    steps(trained, BATCHES[:2])
    assert trained.load_checkpoint(str(tmp_path)) == 0
    assert steps(trained, BATCHES[:2]) == steps(fresh, BATCHES[:2])


def test_none_is_found_where_none_is_and_a_wanted_one_must_exist(tiny, tmp_path):
    engine = make_engine(tiny, World())
    assert engine.load_checkpoint(str(tmp_path / "nowhere")) is None
    engine.save_checkpoint(str(tmp_path), global_step=3)
    with pytest.raises(CheckpointError, match=r"no whole checkpoint of step 7; found \[3\]"):
        engine.load_checkpoint(str(tmp_path), global_step=7)


def test_a_killed_save_leaves_the_last_whole_one(tiny, tmp_path, monkeypatch):
    engine = make_engine(tiny, World())
    engine.save_checkpoint(str(tmp_path), global_step=1)

    def die(final):
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint_folders, "finish_folder", die)
    with pytest.raises(CheckpointError, match="no space left"):
        engine.save_checkpoint(str(tmp_path), global_step=2)
    monkeypatch.undo()
    assert (tmp_path / ".step_2.partial" / checkpoint_folders.META).is_file()
    assert checkpoint_folders.whole_steps(tmp_path) == [1]
    assert engine.load_checkpoint(str(tmp_path)) == 1
    engine.save_checkpoint(str(tmp_path), global_step=2, max_ckpt_to_keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2"]


def test_what_a_save_that_failed_has_written_goes_with_the_next_of_any_step(tiny, tmp_path, monkeypatch):
    engine = make_engine(tiny, World())

    def die(final):
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint_folders, "finish_folder", die)
    with pytest.raises(CheckpointError, match="no space left"):
        engine.save_checkpoint(str(tmp_path), global_step=1)
    monkeypatch.undo()
    (tmp_path / ".step_0.removed").mkdir()  # as a crash in the middle of pruning leaves it
    (tmp_path / ".notes").write_text("kept")
    engine.save_checkpoint(str(tmp_path), global_step=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".notes", "step_2"]


def test_another_shape_is_refused_before_anything_changes(tiny, tmp_path):
    wide = make_tiny_model(tmp_path / "wide", hidden=64)
    make_engine(wide, World()).save_checkpoint(str(tmp_path / "saved"), global_step=1)
    engine = make_engine(tiny, World())
    before = weights_of(engine)
    with pytest.raises(CheckpointError, match=r"`weight/.*` should be \[.*32.*\], got \[.*64.*\]"):
        engine.load_checkpoint(str(tmp_path / "saved"))
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.named_weights())


def test_a_checkpoint_comes_back_from_far(tiny, tmp_path):
    remote = f"file://{tmp_path}/remote"
    engine = make_engine(tiny, World())
    steps(engine, BATCHES[:1])
    engine.save_checkpoint(str(tmp_path / "here"), remote, global_step=1)
    other = make_engine(tiny, World())
    assert other.load_checkpoint(str(tmp_path / "there"), remote) == 1
    assert steps(other, BATCHES[1:]) == steps(engine, BATCHES[1:])


def export(world, path, out):
    engine = make_engine(path, world)
    steps(engine, BATCHES[:1])
    engine.export_huggingface(out)
    return weights_of(engine)


@pytest.mark.parametrize("tied", [True, False])
def test_the_exported_folder_loads_as_what_was_trained(tmp_path, two_ranks, tied):
    path = make_tiny_model(tmp_path / "model", tie_word_embeddings=tied)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    weights = two_ranks.run(export, path, str(tmp_path / "out"))[0]
    loaded = dict(load_reference(str(tmp_path / "out")).named_parameters())
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / ".out.partial").exists()


def test_a_large_export_is_cut_into_files_with_an_index(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("offbeat_engine.toolkit.hf.weight_files.plan_files.__defaults__", (20_000,))
    weights = export(World(), tiny, str(tmp_path / "out"))
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    loaded = dict(load_reference(str(tmp_path / "out")).named_parameters())
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
