"""Which journal a run folder gets, and that it is found again."""

import os
from contextlib import closing
from pathlib import Path

import pytest

from offbeat_recipes.plan import journals
from offbeat_recipes.plan.journals import existing_journal, open_journal, shared_file_system
from offbeat_trainer.stream.journal.events import Issued
from offbeat_trainer.stream.journal.segments import SegmentJournal
from offbeat_trainer.stream.journal.sqlite import SqliteJournal

EVENT = Issued(index=0, uid="a", version=1)
MOUNTS = """\
overlay / overlay rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sda1 /home/me/scratch ext4 rw 0 0
bucket /data/my\\040models fuse.s3fs rw 0 0
none /over ext4 rw 0 0
cluster /over lustre rw 0 0
cluster /data/back\\134slash beegfs rw 0 0
cluster /data/no\u00a0break ceph rw 0 0
cluster /data/old\udcfc glusterfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/runs/demo", None),
        ("/home/me/runs", "nfs4"),
        ("/home/me/scratch/runs", None),
        ("/data/my models/run", "fuse.s3fs"),
        ("/over/run", "lustre"),
        ("/data/back\\slash/run", "beegfs"),
        ("/data/no\u00a0break/run", "ceph"),
        ("/data/old\udcfc/run", "glusterfs"),  # a name that is no UTF-8
    ],
)
def test_the_file_system_of_a_folder_that_need_not_exist(tmp_path, path, kind):
    (tmp_path / "mounts").write_bytes(os.fsencode(MOUNTS))
    assert shared_file_system(Path(path), tmp_path / "mounts") == kind


def test_this_machine_says_what_it_has_mounted(tmp_path):
    assert shared_file_system(tmp_path, tmp_path / "no such file") is None
    shared_file_system(tmp_path)  # every line of the real table can be read


@pytest.mark.parametrize(("shared", "kind"), [(None, SqliteJournal), ("nfs4", SegmentJournal)])
def test_a_run_goes_on_with_the_journal_it_began(tmp_path, monkeypatch, shared, kind):
    assert existing_journal(tmp_path) is None
    monkeypatch.setattr(journals, "shared_file_system", lambda path: shared)
    with closing(open_journal(tmp_path)) as journal:
        assert isinstance(journal, kind)
        journal.write(EVENT)
    monkeypatch.setattr(
        journals, "shared_file_system", lambda path: None if shared else "nfs4"
    )  # it was moved
    with closing(open_journal(tmp_path)) as journal:
        assert isinstance(journal, kind)
        assert tuple(journal.events()) == (EVENT,)
