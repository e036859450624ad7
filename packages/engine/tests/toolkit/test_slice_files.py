"""Pieces written by one layout of ranks and read by another."""

from pathlib import Path

import pytest
import torch

from offbeat_engine import CheckpointError
from offbeat_engine.batch import WeightShard
from offbeat_engine.toolkit.state import slices
from offbeat_engine.toolkit.state.checkpoint_folders import entries_of
from offbeat_engine.toolkit.state.slices import Region, SliceReader, merge, said_of, write_slices

WHOLE = torch.arange(60.0).view(6, 10)


def piece(name, whole, region):
    tensor = whole[region.within(Region.whole(tuple(whole.shape)))]
    return WeightShard(name=name, shape=tuple(whole.shape), offsets=region.offsets, tensor=tensor)


def grid(shape, rows, columns):
    """Return the regions of a tensor cut into `rows` times `columns` parts as equal as can be."""
    cut = [torch.arange(size).chunk(parts) for size, parts in zip(shape, (rows, columns), strict=True)]
    return [Region((int(r[0]), int(c[0])), (len(r), len(c))) for r in cut[0] for c in cut[1]]


def write(folder, *of_ranks):
    parts = [said_of(write_slices(folder, rank, pieces)[0]) for rank, pieces in enumerate(of_ranks)]
    return merge(parts, str(folder))


@pytest.mark.parametrize("max_bytes", [1, 100, slices.MAX_FILE_BYTES])
@pytest.mark.parametrize(
    ("written", "read"), [((2, 1), (1, 1)), ((1, 3), (4, 1)), ((2, 2), (3, 2)), ((1, 1), (2, 5))]
)
def test_any_layout_reads_any_other(tmp_path, monkeypatch, written, read, max_bytes):
    monkeypatch.setattr(slices, "MAX_FILE_BYTES", max_bytes)
    monkeypatch.setattr(slices, "_MAX_MAPPED_BYTES", max_bytes)  # files are closed and opened again
    tensors = {"float": WHOLE, "half": WHOLE.bfloat16(), "bytes": WHOLE.byte()}
    of_ranks = [
        [piece(name, whole, region) for name, whole in tensors.items()]
        for region in grid(WHOLE.shape, *written)
    ]
    scalar = WeightShard(name="scalar", shape=(), offsets=(), tensor=torch.tensor(3.5))
    none = WeightShard(name="none", shape=(0, 4), offsets=(0, 0), tensor=torch.empty(0, 4))
    index = write(tmp_path, [*of_ranks[0], scalar, none], *of_ranks[1:])
    reader = SliceReader(tmp_path, index)
    for name, whole in tensors.items():
        for region in grid(WHOLE.shape, *read):
            expected = whole[region.within(Region.whole(tuple(whole.shape)))]
            got = reader.read(name, region)
            assert got.dtype == whole.dtype
            assert torch.equal(got, expected)
    assert float(reader.read("scalar")) == 3.5
    assert reader.read("none").shape == (0, 4)
    reader.close()


def bytes_read():
    """How many bytes this process has read from files so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.partition(":")[2]) for line in lines if line.startswith("rchar"))


def test_digests_are_of_what_was_in_memory_and_no_tensor_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(slices, "MAX_FILE_BYTES", 6 << 20)
    wholes = {
        "float": torch.rand(1 << 20),
        "half": torch.rand(3, 1 << 19).bfloat16(),
        "bytes": torch.arange(7).byte(),
    }
    wholes |= {"scalar": torch.tensor(2.5), "turned": torch.rand(64, 32).T, "none": torch.empty(0, 4)}
    pieces = [piece(name, whole, Region.whole(tuple(whole.shape))) for name, whole in wholes.items()]
    write_slices(tmp_path, 1, pieces)  # what is imported in the first call is read, too
    before = bytes_read()
    _, entries = write_slices(tmp_path, 0, pieces)
    assert bytes_read() - before < 1 << 20
    assert sorted(entries) == ["rank_0_0.safetensors", "rank_0_1.safetensors"]
    assert entries == entries_of(tmp_path, entries)


def test_only_the_files_of_a_region_are_opened(tmp_path):
    index = write(tmp_path, *([piece("x", WHOLE, region)] for region in grid(WHOLE.shape, 3, 1)))
    (tmp_path / "rank_2_0.safetensors").unlink()
    reader = SliceReader(tmp_path, index)
    assert torch.equal(reader.read("x", Region((1, 0), (3, 10))), WHOLE[1:4])
    with pytest.raises(
        CheckpointError, match=r"rank_2_0.safetensors is cut off or damaged.*restore it from a copy"
    ):
        reader.read("x")


def test_a_torn_file_and_one_that_is_another_are_refused(tmp_path):
    index = write(tmp_path, [piece("x", WHOLE, Region.whole((6, 10)))])
    path = tmp_path / "rank_0_0.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="is cut off or damaged, or not what the index says"):
        SliceReader(tmp_path, index).read("x")
    for other, match in (
        (WeightShard(name="y", shape=(2,), offsets=(0,), tensor=torch.ones(2)), "not what the index says"),
        (
            piece("x", WHOLE.bfloat16(), Region.whole((6, 10))),
            r"holds `x` as torch.bfloat16 \[6, 10\], and the index",
        ),
        (
            piece("x", WHOLE[:5], Region.whole((5, 10))),
            r"holds `x` as torch.float32 \[5, 10\], and the index says",
        ),
    ):
        write_slices(tmp_path, 0, [other])
        with pytest.raises(CheckpointError, match=match):
            SliceReader(tmp_path, index).read("x")


def test_a_region_that_the_index_lacks_is_not_left_as_it_was(tmp_path):
    index, _ = write_slices(tmp_path, 0, [piece("x", WHOLE, Region((0, 0), (2, 10)))])
    with pytest.raises(CheckpointError, match="holds 20 of the 40 values that are needed of `x`"):
        SliceReader(tmp_path, index).read("x", Region((0, 0), (4, 10)))
