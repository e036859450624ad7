"""What a checkpoint may hold: random states of other machines, other formats, damage, and what hostile hands put there."""

import json
import os
import pickle

import pytest
import torch

from offbeat_engine import CheckpointError, ConfigError, ModelConfig, SftLoss, World
from offbeat_engine.fsdp2 import Fsdp2Config, Fsdp2Engine
from offbeat_engine.testing import random_batch
from offbeat_engine.toolkit.state import checkpoint_folders, training_state
from offbeat_engine.toolkit.state.checkpoint_folders import META, entry_of, whole_steps
from offbeat_engine.toolkit.state.slices import SliceReader, write_slices
from offbeat_engine.toolkit.state.training_state import INDEX, Loaded


def make_engine(path, world=None):
    world = World() if world is None else world
    engine = Fsdp2Engine(Fsdp2Config(model=ModelConfig(path=path)), world)
    engine.init_model()
    engine.set_loss_fn(SftLoss())
    with engine.train_mode():
        engine.forward_backward_step(engine.shard_data(random_batch(4)))
        engine.optimizer_step()
    return engine


CUDA_BYTES = 16  # of CUDA's generator


def with_cuda(world):
    """What a machine with a GPU writes: the states' names and sizes are all there is to it."""
    return {
        f"random/cpu.rank_{world.rank}": torch.get_rng_state(),
        f"random/cuda.rank_{world.rank}": torch.arange(CUDA_BYTES, dtype=torch.uint8),
    }


@pytest.mark.parametrize("taken", [with_cuda, training_state.taken])
def test_random_states_of_other_machines_load(tiny, tmp_path, monkeypatch, taken):
    engine = make_engine(tiny)
    monkeypatch.setattr(training_state, "taken", taken)
    engine.save_checkpoint(str(tmp_path), global_step=1)
    monkeypatch.undo()
    drawn = torch.rand(3)
    assert make_engine(tiny).load_checkpoint(str(tmp_path)) == 1
    assert torch.equal(drawn, torch.rand(3))


@pytest.mark.parametrize("available", [True, False])
def test_where_cuda_is_or_was_not_the_rest_is_loaded(tmp_path, monkeypatch, available):
    monkeypatch.setattr(training_state, "taken", with_cuda)
    index, _ = write_slices(tmp_path, 0, training_state.pieces(World()))
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    without = {name: described for name, described in index.items() if "cuda" not in name}
    wanted = {"random/cpu.rank_0", *({"random/cuda.rank_0"} if available else ())}
    for held, num_ranks, expected in (
        (index, 1, wanted),
        (without, 1, {"random/cpu.rank_0"}),
        (index, 2, set()),  # states of other ranks mean nothing here
    ):
        loaded = Loaded(reader=SliceReader(tmp_path, held), steps={}, meta={"num_ranks": num_ranks})
        read = training_state.read(World(), loaded)
        assert read.keys() == expected
        assert all(torch.equal(tensor, with_cuda(World())[name]) for name, tensor in read.items())
    training_state.restore(World(), {"random/cpu.rank_0": torch.get_rng_state()})


@pytest.mark.gpu(1)
def test_cudas_state_comes_back():
    state = training_state.taken(World(device="cuda"))
    drawn = torch.rand(3, device="cuda")
    training_state.restore(World(device="cuda"), state)
    assert torch.equal(drawn, torch.rand(3, device="cuda"))


def test_what_was_just_written_is_never_pruned(tiny, tmp_path):
    engine, remote = make_engine(tiny), f"file://{tmp_path}/remote"
    here = str(tmp_path / "here")
    for keep in (0, -1):
        with pytest.raises(ConfigError, match=f"`max_ckpt_to_keep` must be at least 1, got {keep}"):
            engine.save_checkpoint(here, remote, global_step=5, max_ckpt_to_keep=keep)
    assert whole_steps(here) == []
    engine.save_checkpoint(here, remote, global_step=100)
    engine.save_checkpoint(here, remote, global_step=10, max_ckpt_to_keep=1)
    assert whole_steps(here) == checkpoint_folders.remote_steps(remote) == [10]


@pytest.mark.parametrize("damage", ["", "[]", '{"order": null}'])
def test_a_damaged_one_keeps_no_other_from_being_written_and_goes_first(tiny, tmp_path, damage):
    engine, local, remote = make_engine(tiny), tmp_path / "here", tmp_path / "there"
    for step in (1, 2):
        engine.save_checkpoint(str(local), f"file://{remote}", global_step=step)
    (local / "step_2" / META).write_text(damage)
    (remote / "step_2" / checkpoint_folders.MARKER).write_text(damage)
    engine.save_checkpoint(str(local), f"file://{remote}", global_step=3, max_ckpt_to_keep=2)
    assert whole_steps(local) == whole_steps(remote) == [1, 3]


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def put(folder, name, data):
    """Replace a file, and what the checkpoint says of it: hands that can write the one can write the other."""
    (folder / name).write_bytes(data)
    said = json.loads((folder / META).read_text())
    said["files"][name] = entry_of(folder / name)
    (folder / META).write_text(json.dumps(said))


@pytest.mark.parametrize("name", [INDEX, "rank_0_0.safetensors"])
def test_a_hostile_checkpoint_runs_nothing_even_with_matching_digests(tiny, tmp_path, name):
    engine, remote, made = make_engine(tiny), f"file://{tmp_path}/remote", tmp_path / "made"
    engine.save_checkpoint(str(tmp_path / "here"), global_step=1)
    folder = tmp_path / "here" / "step_1"
    put(folder, name, pickle.dumps(Runs(made)))
    checkpoint_folders.upload(folder, remote)
    for local in ("here", "back"):
        with pytest.raises(CheckpointError, match=rf"{name} (cannot be read|is cut off or damaged)"):
            engine.load_checkpoint(str(tmp_path / local), remote)
    assert not made.exists()


@pytest.mark.parametrize("file", ["../other/rank_0_0.safetensors", "/etc/passwd", "rank_9_0.safetensors"])
def test_tensors_lie_in_files_of_the_checkpoint(tiny, tmp_path, file):
    engine = make_engine(tiny)
    engine.save_checkpoint(str(tmp_path), global_step=1)
    text = (tmp_path / "step_1" / INDEX).read_text()
    put(tmp_path / "step_1", INDEX, text.replace("rank_0_0.safetensors", file).encode())
    with pytest.raises(CheckpointError, match=r"keeps `.*` in '.*', which it does not list"):
        engine.load_checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["rank_0_0.safetensors", "rank_1_0.safetensors", INDEX])
def test_damage_is_found_before_anything_is_read(tiny, tmp_path, two_ranks, name):
    two_ranks.run(save, tiny, str(tmp_path))
    path = tmp_path / "step_1" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    for weights, said in two_ranks.run(load_damaged, tiny, str(tmp_path)):
        assert weights
        assert f"step_1/{name} has the right size, but other bytes than were written" in said


def save(world, path, root):
    make_engine(path, world).save_checkpoint(root, global_step=1)


def load_damaged(world, path, root):
    engine = make_engine(path, world)
    before = {name: tensor.clone() for name, tensor in engine.named_weights()}
    with pytest.raises(CheckpointError) as damaged:
        engine.load_checkpoint(root)
    return all(torch.equal(before[name], tensor) for name, tensor in engine.named_weights()), str(
        damaged.value
    )


def test_a_missing_file_and_an_unheard_format_are_named(tiny, tmp_path):
    engine = make_engine(tiny)
    engine.save_checkpoint(str(tmp_path), global_step=1)
    os.rename(tmp_path / "step_1" / INDEX, tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"index.json should have \d+ bytes, but there is no such file"):
        engine.load_checkpoint(str(tmp_path))
    for format_number in (2, 99):
        said = json.loads((tmp_path / "step_1" / META).read_text()) | {"format": format_number}
        (tmp_path / "step_1" / META).write_text(json.dumps(said))
        with pytest.raises(
            CheckpointError, match=f"has format {format_number}, this version reads 3; load it with"
        ):
            engine.load_checkpoint(str(tmp_path))
