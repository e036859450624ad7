"""DCP's metadata is a pickle: whatever it asks for but plain data classes is refused before it is called."""

import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from offbeat_engine import CheckpointError
from offbeat_engine.toolkit.dcp_reader import METADATA, CheckedReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def folder(tmp_path):
    state = {
        "float": torch.arange(6.0).view(2, 3),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "bytes": torch.arange(4, dtype=torch.uint8),
        "number": torch.tensor(3, dtype=torch.int64),
    }
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "ck"), no_dist=True)
    return tmp_path / "ck"


def rewrite(folder, change):
    metadata = pickle.loads((folder / METADATA).read_bytes())
    changed = change(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata if changed is None else changed))


class Runs:
    """Calls `function` with `args` when it is unpickled."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def test_what_dcp_wrote_reads_as_dcp_reads_it(folder):
    ours, theirs = CheckedReader(folder, None), FileSystemReader(folder)
    assert ours.read_metadata().state_dict_metadata == theirs.read_metadata().state_dict_metadata
    assert ours.read_metadata().storage_data == theirs.read_metadata().storage_data
    assert ours.file_names() == {"__0_0.distcp"}
    state = {"float": torch.zeros(2, 3), "number": torch.tensor(0)}
    dcp.load(state, storage_reader=CheckedReader(folder, ["__0_0.distcp", METADATA]), no_dist=True)
    assert torch.equal(state["float"], torch.arange(6.0).view(2, 3))
    assert int(state["number"]) == 3


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("function", [os.mkdir, eval, getattr, torch.load, __import__, pickle.loads])
def test_code_in_the_metadata_does_not_run(folder, tmp_path, function, protocol):
    hostile = pickle.dumps(Runs(function, str(tmp_path / "made")), protocol=protocol)
    (folder / METADATA).write_bytes(hostile)
    with pytest.raises(CheckpointError, match=r"asks for `.*`, which has no place there.*do not load it"):
        CheckedReader(folder, None).read_metadata()
    assert not (tmp_path / "made").exists()


def test_a_way_around_by_the_allowed_classes_is_closed(folder, tmp_path):
    """Attributes of what is allowed are not: protocol 4 lets a name have dots."""
    hostile = b"\x80\x04\x8c\x07pathlib\x8c\x10PosixPath.unlink\x93."
    (folder / METADATA).write_bytes(hostile)
    with pytest.raises(CheckpointError, match=r"asks for `pathlib.PosixPath.unlink`"):
        CheckedReader(folder, None).read_metadata()
    for name in ("load", "float32.__class__", "serialization", "hub"):
        raw = name.encode()
        (folder / METADATA).write_bytes(b"\x80\x04\x8c\x05torch\x8c" + bytes([len(raw)]) + raw + b"\x93.")
        with pytest.raises(CheckpointError, match=rf"asks for `torch\.{name}`"):
            CheckedReader(folder, None).read_metadata()


def test_bytes_are_refused_since_dcp_would_unpickle_them(folder):
    def change(metadata):
        metadata.state_dict_metadata["float"] = BytesStorageMetadata()

    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=r"BytesStorageMetadata`, which has no place there"):
        CheckedReader(folder, None).read_metadata()


@pytest.mark.parametrize("name", ["../other/__0_0.distcp", "/etc/passwd", "__9_0.distcp"])
def test_tensors_lie_in_files_of_the_checkpoint(folder, name):
    def change(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = name

    rewrite(folder, change)
    with pytest.raises(CheckpointError, match="which it does not list"):
        CheckedReader(folder, ["__0_0.distcp", METADATA]).read_metadata()


@pytest.mark.parametrize("content", [b"", b"no pickle", b"\x80\x04N.", b"\x80\x04]\x94."])
def test_rubbish_is_no_traceback(folder, content):
    (folder / METADATA).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata (cannot be read|should hold DCP's metadata)"):
        CheckedReader(folder, None).read_metadata()


def test_other_transformations_than_none_are_refused(folder):
    def change(metadata):
        next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]

    rewrite(folder, change)
    with pytest.raises(CheckpointError, match="was transformed, which this engine never does"):
        CheckedReader(folder, None).read_metadata()
