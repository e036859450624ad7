"""One contract, every journal."""

import errno
import os
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from offbeat_rollout import Completion, Finish
from offbeat_trainer.data.types import Score, Trajectory, spans_of
from offbeat_trainer.errors import ResumeError, TrainerError
from offbeat_trainer.stream.journal.events import (
    Dropped,
    Finished,
    Flipped,
    Half,
    Issued,
    MemoryJournal,
    Restarted,
    Taken,
    recover,
)
from offbeat_trainer.stream.journal.segments import SegmentJournal
from offbeat_trainer.stream.journal.sqlite import _FORGET, _NEWLY_OVER, SqliteJournal
from offbeat_trainer.stream.schedule import Schedule


def completion(num_tokens=3, finish=Finish.STOP, version=1):
    return Trajectory.of(Completion.of(
        request_id="r/1", token_ids=tuple(range(num_tokens)), logprobs=tuple(-0.1 * i for i in range(num_tokens)),
        policy_versions=(version,) * num_tokens, finish=finish,
    ))  # fmt: skip


def finished(index, version=1):
    done = completion()
    scores = (Score(reward=0.1 + 0.2, correct=True),)
    return Finished(
        index=index, version=version, trajectories=(done,), scores=scores, spans=(spans_of(done),)
    )


STORY = (
    Issued(index=0, uid="a", version=1),
    Issued(index=1, uid="b", version=1),
    Half(index=1, trajectories=(completion(2, Finish.ABORT), completion(0, Finish.ABORT))),
    finished(0),
    Taken(step=0, indices=(0,)),
    Flipped(steps=1, version=2),
    Issued(index=2, uid="c", version=2),
    Dropped(index=2, reason="failed"),
    Issued(index=3, uid="d", version=2),
    finished(3, 2),
)


JOURNALS = {
    "memory": lambda folder: MemoryJournal(),
    "sqlite": lambda folder: SqliteJournal(folder / "deep" / "journal.sqlite"),
    "segments": lambda folder: SegmentJournal(folder / "deep" / "journal"),
    "short segments": lambda folder: SegmentJournal(folder / "deep" / "journal", segment_bytes=200),
}
FILES = [name for name in JOURNALS if name != "memory"]


@pytest.fixture(params=JOURNALS)
def journal(request, tmp_path):
    one = JOURNALS[request.param](tmp_path)
    yield one
    one.close()
    one.close()


def test_events_come_back_in_order_and_whole(journal):
    for event in STORY:
        journal.write(event)
    assert tuple(journal.events()) == STORY


def test_forgetting_drops_the_tokens_of_what_was_trained_and_keeps_the_schedule(journal):
    for event in STORY:
        journal.write(event)
    journal.forget(0)
    assert tuple(journal.events()) == STORY, "nothing was trained before step 0"
    for _ in range(2):
        journal.forget(1)
        events = tuple(journal.events())
        assert [type(event) for event in events] == [type(event) for event in STORY]
        assert events[3].trajectories == ()
        assert (events[3].scores, events[3].spans) == (STORY[3].scores, STORY[3].spans)
        assert events[-1] == STORY[-1]


def test_forgetting_drops_the_tokens_of_what_was_dropped(journal):
    half = Half(index=1, trajectories=(completion(2, Finish.ABORT),))
    late = (Dropped(index=1, reason="too old"), Dropped(index=3, reason="outpaced"))
    for event in (half, finished(3), finished(4), *late):
        journal.write(event)
    journal.forget(0)
    tokens = [event.trajectories for event in journal.events() if isinstance(event, (Half, Finished))]
    assert tokens == [(), (), finished(4).trajectories]
    assert tuple(journal.events())[-2:] == late


def test_what_is_void_stays_void(journal):
    """A run whose tokens were forgotten begins again: what its first life took is no script for its third."""
    for event in (*STORY, Restarted(step=0), Issued(index=1, uid="b", version=1), finished(1)):
        journal.write(event)
    found = recover(journal.events(), 0, 1)
    assert (found.script, set(found.finished), found.halves) == ({}, {1}, {})
    assert found.holes == [0, 3]
    journal.write(Taken(step=0, indices=(1,)))
    again = recover(journal.events(), 1, 1)
    assert (again.consumed, again.holes, again.finished) == (1, [0, 3], {})
    schedule = Schedule.of(journal.events())
    assert (schedule.taken, schedule.flips) == ({0: (1,)}, {})


def test_what_a_run_goes_on_with():
    found = recover(STORY, 1, 1)
    assert (found.consumed, found.next_index) == (1, 4)
    assert set(found.finished) == {3}
    assert found.holes == [1]
    assert found.dropped == {2: "failed"}
    assert [one.finish for one in found.halves[1]] == [Finish.ABORT, Finish.ABORT]
    assert found.script == {}
    earlier = recover(STORY, 0, 1)
    assert earlier.script == {0: (0,)}
    assert set(earlier.finished) == {0, 3}
    assert earlier.consumed == 0


def test_without_a_journal_the_data_is_where_sync_training_would_be():
    found = recover((), 5, 4)
    assert (found.consumed, found.next_index, found.holes) == (20, 20, [])


@pytest.mark.parametrize("name", FILES)
def test_files_outlive_the_process_that_wrote_them(tmp_path, name):
    writer = JOURNALS[name](tmp_path)
    for event in STORY[:6]:
        writer.write(event)
    writer.flush()
    reader = JOURNALS[name](tmp_path)  # the writer never closed it
    assert tuple(reader.events()) == STORY[:6]
    reader.close()
    writer.close()


@pytest.mark.parametrize("name", FILES)
def test_one_process_goes_on_where_another_ended(tmp_path, name):
    told = []
    for number, event in enumerate(STORY):
        journal = JOURNALS[name](tmp_path)
        assert tuple(journal.events()) == tuple(told)
        journal.write(event)
        told.append(event)
        if number == 6:
            journal.forget(1)
            told[3] = replace(told[3], trajectories=())
        journal.close()
    assert tuple(JOURNALS[name](tmp_path).events()) == tuple(told)


def test_events_are_written_beside_the_loop_in_order_and_a_full_disk_is_told(tmp_path):
    journal = JOURNALS["sqlite"](tmp_path)
    with journal._lock:  # somebody writes, or forgets
        for number in range(200):
            journal.write(Issued(index=number, uid=str(number), version=1))
    assert [event.index for event in journal.events()] == list(range(200))
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(sqlite3.OperationalError, match="full"):  # noqa: PT012 - by the flush, or the next event
        for number in range(200, 200 + (1 << 14)):
            journal.write(Issued(index=number, uid="x" * 1000, version=1))
        journal.flush()
    journal._db.execute("PRAGMA max_page_count=1000000")
    journal.flush()
    kept = [event.index for event in journal.events()]
    assert kept == list(range(len(kept)))
    assert len(kept) > 200
    journal.close()
    journal.close()


def test_sqlite_writes_ahead(tmp_path):
    journal = JOURNALS["sqlite"](tmp_path)
    assert journal._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    journal.close()


def test_a_segment_may_end_anywhere_and_what_was_whole_is_there(tmp_path):
    journal = SegmentJournal(tmp_path / "whole")
    for event in STORY:
        journal.write(event)
    journal.close()
    (path,) = (tmp_path / "whole").iterdir()
    data = path.read_bytes()
    seen = set()
    (tmp_path / "cut").mkdir()
    for length in range(len(data) + 1):
        (tmp_path / "cut" / "000001.log").write_bytes(data[:length])
        events = tuple(SegmentJournal(tmp_path / "cut").events())
        assert events == STORY[: len(events)]
        seen.add(len(events))
    assert seen == set(range(len(STORY) + 1))
    (tmp_path / "cut" / "000001.log").write_bytes(data + bytes(100))  # what a power cut may leave
    assert tuple(SegmentJournal(tmp_path / "cut").events()) == STORY


def test_a_flipped_byte_in_a_segment_is_not_read_over(tmp_path):
    journal = SegmentJournal(tmp_path)
    for event in STORY:
        journal.write(event)
    journal.close()
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[12] ^= 1
    path.write_bytes(data)
    with pytest.raises(ResumeError, match=r"000001\.log is damaged at byte 0"):
        SegmentJournal(tmp_path)


def test_segments_stay_few_and_lose_their_tokens(tmp_path):
    journal = SegmentJournal(tmp_path, segment_bytes=5000)
    for step in range(100):
        journal.write(Issued(index=step, uid=str(step), version=1))
        journal.write(finished(step))
        journal.write(Taken(step=step, indices=(step,)))
        journal.forget(step)
    events = list(journal.events())
    assert [event.index for event in events if isinstance(event, Finished)] == list(range(100))
    assert [event.index for event in events if isinstance(event, Finished) and event.trajectories] == [99]
    assert 2 < len(list(tmp_path.iterdir())) < 12
    journal.close()


def test_a_disk_that_is_full_leaves_what_was_written(tmp_path, monkeypatch):
    journal = SegmentJournal(tmp_path)
    journal.write(STORY[0])
    write = os.write

    def full(file, data):
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(TrainerError, match="No space left on device"):
            journal.write(STORY[2])
    journal.write(STORY[1])
    assert tuple(journal.events()) == STORY[:2]
    journal.close()


def test_a_second_writer_is_met_at_the_latest_when_it_writes(tmp_path):
    one, other = SegmentJournal(tmp_path), SegmentJournal(tmp_path)
    one.write(STORY[0])
    with pytest.raises(TrainerError, match=r"000001\.log was begun by another process"):
        other.write(STORY[1])
    one.close()


def test_files_that_are_no_journals_are_refused(tmp_path):
    (tmp_path / "text").write_text("not a database, and long enough to be looked at" * 100)
    with pytest.raises(ResumeError, match="cannot be used as a journal"):
        SqliteJournal(tmp_path / "text")
    newer = sqlite3.connect(tmp_path / "newer")
    newer.execute("PRAGMA user_version=99")
    newer.close()
    with pytest.raises(ResumeError, match="has format 99, this version reads 2"):
        SqliteJournal(tmp_path / "newer")


def test_a_file_of_the_format_before_is_gone_on_with(tmp_path):
    path = tmp_path / "journal.sqlite"
    SqliteJournal(path).close()
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version=1")
    with closing(SqliteJournal(path)) as journal:
        journal.write(STORY[0])
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (2,)


@pytest.mark.parametrize(("index", "query"), [("bodies", _FORGET), ("over", _NEWLY_OVER)])
def test_to_forget_a_group_is_no_walk_over_the_whole_run(tmp_path, index, query):
    with closing(SqliteJournal(tmp_path / "journal.sqlite")):
        pass
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as database:
        plan = database.execute(f"EXPLAIN QUERY PLAN {query}", (1,)).fetchall()
    assert [f"INDEX {index}" in step[3] for step in plan] == [True], plan
