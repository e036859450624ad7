"""What a checkpoint may hold: random states of other machines, older formats, damage, and what hostile hands put there."""

import json
import os
import pickle
from types import SimpleNamespace

import pytest
import torch

from offbeat_engine import CheckpointError, ConfigError, ModelConfig, SftLoss, World
from offbeat_engine.fsdp2 import Fsdp2Config, Fsdp2Engine
from offbeat_engine.testing import random_batch
from offbeat_engine.toolkit import random_state, remote_folders
from offbeat_engine.toolkit.checkpoint_folders import META, whole_steps
from offbeat_engine.toolkit.dcp_reader import METADATA
from offbeat_engine.toolkit.file_entries import entry_of


def make_engine(path, world=None):
    world = World() if world is None else world
    engine = Fsdp2Engine(Fsdp2Config(model=ModelConfig(path=path)), world)
    engine.init_model()
    engine.set_loss_fn(SftLoss())
    with engine.train_mode():
        engine.forward_backward_step(engine.shard_data(random_batch(4)))
        engine.optimizer_step()
    return engine


CPU_BYTES = torch.get_rng_state().numel()
CUDA_BYTES = 16  # of CUDA's generator


def with_cuda(world):
    """What a machine with a GPU writes: the states' names and sizes are all there is to it."""
    return {
        f"random.cpu.rank_{world.rank}": torch.get_rng_state(),
        f"random.cuda.rank_{world.rank}": torch.arange(CUDA_BYTES, dtype=torch.uint8),
    }


def as_format_1(world):
    return {
        f"random.rank_{world.rank}": torch.cat([torch.get_rng_state(), torch.zeros(0, dtype=torch.uint8)])
    }


def as_format_1_with_cuda(world):
    return {
        f"random.rank_{world.rank}": torch.cat(
            [torch.get_rng_state(), torch.arange(CUDA_BYTES, dtype=torch.uint8)]
        )
    }


def make_format_1(folder):
    said = json.loads((folder / META).read_text())
    (folder / META).write_text(
        json.dumps({key: said[key] for key in said.keys() - {"files", "order"}} | {"format": 1})
    )


@pytest.mark.parametrize("taken", [with_cuda, random_state.taken, as_format_1, as_format_1_with_cuda])
def test_random_states_of_other_machines_and_formats_load(tiny, tmp_path, monkeypatch, taken):
    engine = make_engine(tiny)
    monkeypatch.setattr(random_state, "taken", taken)
    engine.save_checkpoint(str(tmp_path), global_step=1)
    monkeypatch.undo()
    if taken in (as_format_1, as_format_1_with_cuda):
        make_format_1(tmp_path / "step_1")
    drawn = torch.rand(3)
    assert make_engine(tiny).load_checkpoint(str(tmp_path)) == 1
    assert torch.equal(drawn, torch.rand(3))


def written(**sizes):
    return {
        f"random.{key.replace('__', '.')}.rank_0": SimpleNamespace(size=(size,))
        for key, size in sizes.items()
    }


@pytest.mark.parametrize("available", [True, False])
def test_where_cuda_is_or_was_not_the_rest_is_loaded(monkeypatch, available):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    both, one = written(cpu=CPU_BYTES, cuda=CUDA_BYTES), written(cpu=CPU_BYTES)
    wanted = {"random.cpu.rank_0", *({"random.cuda.rank_0"} if available else ())}
    assert random_state.empty(World(), both, 1).keys() == wanted
    assert random_state.empty(World(), one, 1).keys() == {"random.cpu.rank_0"}
    assert random_state.empty(World(), both, 2) == {}  # states of other ranks mean nothing here
    random_state.restore(World(), {"random.cpu.rank_0": torch.get_rng_state()})


@pytest.mark.gpu(1)
def test_cudas_state_comes_back():
    state = random_state.taken(World(device="cuda"))
    drawn = torch.rand(3, device="cuda")
    random_state.restore(World(device="cuda"), state)
    assert torch.equal(drawn, torch.rand(3, device="cuda"))
    random_state.restore(World(device="cuda"), {"random.rank_0": torch.cat(list(state.values()))})
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
    assert whole_steps(here) == remote_folders.remote_steps(remote) == [10]


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


def test_a_hostile_checkpoint_runs_nothing_even_with_matching_digests(tiny, tmp_path):
    engine, remote, made = make_engine(tiny), f"file://{tmp_path}/remote", tmp_path / "made"
    engine.save_checkpoint(str(tmp_path / "here"), global_step=1)
    folder = tmp_path / "here" / "step_1"
    put(folder, METADATA, pickle.dumps(Runs(made)))
    remote_folders.upload(folder, remote)
    for local in ("here", "back"):
        with pytest.raises(CheckpointError, match=r"asks for `posix.mkdir`, which has no place there"):
            engine.load_checkpoint(str(tmp_path / local), remote)
    assert not made.exists()


def test_hostile_tensors_run_nothing(tiny, tmp_path):
    """DCP reads them by torch's own restricted unpickler; the digests are made to match."""
    engine, made = make_engine(tiny), tmp_path / "made"
    engine.save_checkpoint(str(tmp_path / "here"), global_step=1)
    folder = tmp_path / "here" / "step_1"
    size = (folder / "__0_0.distcp").stat().st_size
    put(folder, "__0_0.distcp", pickle.dumps(Runs(made)).ljust(size, b"\0"))
    with pytest.raises(CheckpointError, match="could not load"):
        engine.load_checkpoint(str(tmp_path / "here"))
    assert not made.exists()


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", METADATA])
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
    os.rename(tmp_path / "step_1" / METADATA, tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"\.metadata should have \d+ bytes, but there is no such file"):
        engine.load_checkpoint(str(tmp_path))
    said = json.loads((tmp_path / "step_1" / META).read_text()) | {"format": 99}
    (tmp_path / "step_1" / META).write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match="has format 99, this version reads 1 to 2"):
        engine.load_checkpoint(str(tmp_path))
