"""Checkpoints of several hosts: folders that are not shared, a rank 0 that works long alone, saves in the background."""

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from offbeat_engine import CheckpointError, Dtype, ModelConfig, SftLoss, World
from offbeat_engine.fsdp2 import Fsdp2Config, Fsdp2Engine
from offbeat_engine.testing import RankPool, RanksError, random_batch
from offbeat_engine.testing.reference import load_reference
from offbeat_engine.toolkit.state import checkpoint_folders, saves, training_state
from offbeat_engine.toolkit.state.checkpoint_folders import whole_steps

WAIT_S = 600.0


def make_engine(path, world):
    engine = Fsdp2Engine(Fsdp2Config(model=ModelConfig(path=path)), world)
    engine.init_model()
    engine.set_loss_fn(SftLoss())
    return engine


def step(engine, seed=0):
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_step(engine.shard_data(random_batch(4, seed=seed)))
        engine.optimizer_step()


def weights_of(engine):
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def wait_for(path):
    """Block this thread until the test has made `path`."""
    deadline = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def on_disks_of_their_own(world, path, root):
    """Each rank has a folder that the others do not see; only the export needs none on the others."""
    saves.VISIBLE_WITHIN_S = 0.5
    engine = make_engine(path, world)
    mine = f"{root}/host{world.rank}"
    os.makedirs(f"{mine}/ck", exist_ok=True)
    said = []
    for block in (True, False):
        with pytest.raises(CheckpointError) as refused:
            engine.save_checkpoint(f"{mine}/ck", f"file://{root}/remote", global_step=1, block=block).wait()
        said.append(str(refused.value))
    engine.export_huggingface(f"{mine}/export")
    engine.close()
    return said, weights_of_one(world, path)


def weights_of_one(world, path):
    return None if world.rank else dict(load_reference(path).named_parameters())


def test_folders_that_are_not_shared_are_refused_before_a_checkpoint_counts(tiny, tmp_path, two_ranks):
    answers = two_ranks.run(on_disks_of_their_own, tiny, str(tmp_path))
    for said, _ in answers:
        for text in said:
            assert "`local_path` must be a folder that all ranks share" in text
            assert "what rank 1 wrote there: rank_1_0.safetensors (" in text
    for rank in range(2):
        assert whole_steps(tmp_path / f"host{rank}" / "ck") == []
    assert not (tmp_path / "remote").exists()
    exported = dict(load_reference(str(tmp_path / "host0" / "export")).named_parameters())
    assert same(exported, answers[0][1])
    assert not (tmp_path / "host1" / "export").exists()


def sees_late(world, path, root):
    """Rank 1's file is on disk, but the file system shows it to rank 0 a little later."""
    engine, asked = make_engine(path, world), []
    real = saves._size

    def late(path):
        asked.append(path.name)
        return (
            None
            if asked.count("rank_1_0.safetensors") in (1, 2) and path.name == "rank_1_0.safetensors"
            else real(path)
        )

    saves._size = late
    try:
        engine.save_checkpoint(root, global_step=1)
    finally:
        saves._size = real
    return whole_steps(root), asked.count("rank_1_0.safetensors")


def test_a_file_system_may_show_files_of_other_hosts_late(tiny, tmp_path, two_ranks):
    saved = two_ranks.run(sees_late, tiny, str(tmp_path))
    assert saved == [([1], 3), ([1], 0)]


def waits_no_longer_than(seconds, *groups):
    """Whoever meets another in these groups from now on has so long."""
    for group in groups:
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


SHORT_S = 1.0


class Slow:
    """Calls what it stands for on rank 0 after longer than any rank waits for another in the training."""

    def __init__(self, act):
        self.act = act
        self.num_calls = 0

    def __call__(self, *args):
        self.num_calls += 1
        time.sleep(3 * SHORT_S)
        return self.act(*args)


def with_slow_copies(world, path, root):
    """Save and load while the training's groups have a deadline that any copy outlasts; a save meets in none of them."""
    engine = make_engine(path, world)
    of_training = (dist.group.WORLD, world.control_group())
    slow = checkpoint_folders.upload, checkpoint_folders.download = (
        Slow(checkpoint_folders.upload),
        Slow(checkpoint_folders.download),
    )
    step(engine)
    expected = weights_of(engine)
    waits_no_longer_than(SHORT_S, *of_training)
    engine.save_checkpoint(f"{root}/here", f"file://{root}/remote", global_step=1)
    waits_no_longer_than(WAIT_S, *of_training)
    step(engine, seed=1)
    engine._saves.finish_last()  # where ranks of the training do meet
    waits_no_longer_than(SHORT_S, *of_training)
    found = engine.load_checkpoint(f"{root}/back", f"file://{root}/remote")
    waits_no_longer_than(WAIT_S, *of_training)
    return found, same(expected, weights_of(engine)), [each.num_calls for each in slow]


def test_copies_that_take_long_outlive_no_deadline(tiny, tmp_path):
    with RankPool(2, WAIT_S) as ranks:
        answers = ranks.run(with_slow_copies, tiny, str(tmp_path))
    assert answers == [(1, True, [1, 1]), (1, True, [0, 0])]


def in_the_background(world, path, root):
    """Train on while rank 0 copies; then find the weights of the moment of saving."""
    engine, upload, gate = make_engine(path, world), checkpoint_folders.upload, Path(root) / "open"

    def held_up(folder, remote):
        wait_for(gate)
        upload(folder, remote)

    checkpoint_folders.upload = held_up
    step(engine)
    expected = weights_of(engine)
    handle = engine.save_checkpoint(f"{root}/ck", f"file://{root}/remote", global_step=1, block=False)
    step(engine, seed=1)
    assert not same(expected, weights_of(engine))
    assert not handle.done
    with pytest.raises(CheckpointError, match=r"was not whole and copied after 0.1 s; it goes on"):
        handle.wait(0.1)
    gate.touch()
    handle.wait()
    assert handle.done
    steps = checkpoint_folders.remote_steps(f"file://{root}/remote")
    engine.save_checkpoint(f"{root}/ck", global_step=2, block=False)
    found = engine.load_checkpoint(f"{root}/ck", global_step=1)  # waits for the save of step 2
    whole = whole_steps(f"{root}/ck")
    engine.close()
    checkpoint_folders.upload = upload
    return steps, found, whole, same(expected, weights_of_engine(world, path, root))


def weights_of_engine(world, path, root):
    engine = make_engine(path, world)
    assert engine.load_checkpoint(f"{root}/ck", global_step=1) == 1
    return weights_of(engine)


def test_a_save_in_the_background_is_of_its_moment(tiny, tmp_path, two_ranks):
    assert two_ranks.run(in_the_background, tiny, str(tmp_path)) == [([1], 1, [1, 2], True)] * 2


def from_a_device(world, path, root, dtype):
    """Save in the background, step on at once, and find the weights of the moment; in bfloat16 they are DTensors."""

    def make():
        config = Fsdp2Config(model=ModelConfig(path=path), device=world.device, dtype=dtype)
        engine = Fsdp2Engine(config, world)
        engine.init_model()
        engine.set_loss_fn(SftLoss())
        return engine

    engine, other = make(), make()
    step(engine)
    expected = weights_of(engine)
    handle = engine.save_checkpoint(root, global_step=1, block=False)
    step(engine, seed=1)
    handle.wait()
    assert other.load_checkpoint(root) == 1
    return same(expected, weights_of(engine)), same(expected, weights_of(other))


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))])
def test_a_save_in_the_background_is_a_copy_on_every_device(tiny, tmp_path, device, dtype):
    with RankPool(1, WAIT_S, device) as ranks:
        assert ranks.run(from_a_device, tiny, str(tmp_path), dtype) == [(False, True)]


def test_two_saves_never_overlap(tiny, tmp_path, monkeypatch):
    engine, running, most = make_engine(tiny, World()), [], []
    finish = saves.checkpoint_folders.finish_folder

    def counted(final):
        running.append(final)
        most.append(len(running))
        time.sleep(0.05)
        finish(final)
        running.pop()

    monkeypatch.setattr(saves.checkpoint_folders, "finish_folder", counted)
    handles = [engine.save_checkpoint(str(tmp_path), global_step=number, block=False) for number in range(3)]
    assert [handle.done for handle in handles[:2]] == [True, True]
    engine.close()
    assert handles[2].done
    assert most == [1, 1, 1]
    assert whole_steps(tmp_path) == [0, 1, 2]


def dies_while_it_saves(world, path, root):
    """Rank 1 dies with its tensors on disk; rank 0 hears of it from its handle, long before the deadline."""
    engine = make_engine(path, world)
    engine.save_checkpoint(root, global_step=1)
    if world.rank:
        training_state.said_of = lambda *_: os._exit(7)
    handle = engine.save_checkpoint(root, global_step=2, block=False)
    with pytest.raises(CheckpointError, match="rank 0 of 2 waited for a message of the others"):
        handle.wait()


def test_a_rank_that_dies_while_it_saves_leaves_the_checkpoint_before(tiny, tmp_path):
    with RankPool(2, WAIT_S) as ranks:
        with pytest.raises(RanksError) as died:
            ranks.run(dies_while_it_saves, tiny, str(tmp_path))
        assert str(died.value) == "rank 1: died with exit code 7"
    assert whole_steps(tmp_path) == [1]
    assert make_engine(tiny, World()).load_checkpoint(str(tmp_path)) == 1


def fails_on_rank_zero(world, path, root, ending):
    """The copy fails in the background; `ending` says where that is heard of."""
    engine = make_engine(path, world)
    (Path(root) / "file").write_text("where a folder should be")
    remote = f"file://{root}/file/remote"
    handle = engine.save_checkpoint(f"{root}/ck", remote, global_step=1, block=False)
    match = r"step_1 is whole, but could not be copied or pruned: rank 0: NotADirectoryError"
    if ending == "wait":
        for _ in range(2):
            with pytest.raises(CheckpointError, match=match):
                handle.wait()
        engine.save_checkpoint(f"{root}/ck", global_step=2)  # all were told
    elif ending == "wait on one":
        if world.rank == 0:
            with pytest.raises(CheckpointError, match=match):
                handle.wait()
        with pytest.raises(CheckpointError, match=match):
            engine.save_checkpoint(f"{root}/ck", global_step=2)
        engine.save_checkpoint(f"{root}/ck", global_step=2)
    elif ending == "close":
        with pytest.raises(CheckpointError, match=match):
            engine.close()
        return whole_steps(f"{root}/ck")
    engine.close()
    return whole_steps(f"{root}/ck")


@pytest.mark.parametrize(("ending", "whole"), [("wait", [1, 2]), ("wait on one", [1, 2]), ("close", [1])])
def test_what_fails_in_the_background_is_raised_once_on_all_ranks(tiny, tmp_path, two_ranks, ending, whole):
    assert two_ranks.run(fails_on_rank_zero, tiny, str(tmp_path), ending) == [whole, whole]


def export_to_a_full_disk(world, path, root):
    engine = make_engine(path, world)
    if world.rank == 0:
        import safetensors.torch

        real = safetensors.torch.save_file

        def full(tensors, name, metadata):
            raise OSError("no space left")

        safetensors.torch.save_file = full
    try:
        with pytest.raises(CheckpointError, match=r"could not write .*: rank 0: OSError: no space left"):
            engine.export_huggingface(f"{root}/out")
    finally:
        if world.rank == 0:
            safetensors.torch.save_file = real
    return Path(f"{root}/out").exists()


def test_an_export_that_fails_is_raised_on_all_ranks_and_leaves_nothing(tiny, tmp_path, two_ranks):
    assert two_ranks.run(export_to_a_full_disk, tiny, str(tmp_path)) == [False, False]
