"""One contract, every journal."""

import shutil
import sqlite3
import threading
import time
from contextlib import closing
from dataclasses import replace

import pytest

from offbeat_rollout import Completion, Finish
from offbeat_trainer.data.types import Score, Trajectory, spans_of
from offbeat_trainer.errors import ResumeError
from offbeat_trainer.loops.events import (
    Dropped,
    Finished,
    Flipped,
    Issued,
    MemoryJournal,
    PartialGroup,
    Restarted,
    Taken,
    recover,
)
from offbeat_trainer.loops.journal import _NOT_OVER, _OF_GROUP, SqliteJournal
from offbeat_trainer.loops.schedule import Schedule


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
    PartialGroup(index=1, trajectories=(completion(2, Finish.ABORT), completion(0, Finish.ABORT))),
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
}
TAKEN = replace(STORY[4], begun=(1,), spans=(STORY[3].spans,))  # as it is once its groups are forgotten


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


def test_forgetting_keeps_the_schedule_of_what_was_trained_and_nothing_else(journal):
    for event in STORY:
        journal.write(event)
    journal.forget(0)
    assert sorted(map(str, journal.events())) == sorted(map(str, STORY))
    schedule = Schedule.of(journal.events())
    for _ in range(2):
        journal.forget(1)
        assert set(map(str, journal.events())) == set(map(str, (STORY[1], STORY[2], TAKEN, *STORY[5:])))
        assert Schedule.of(journal.events()) == schedule
        found, whole = recover(journal.events(1), 1, 1), recover(STORY, 1, 1)
        assert (found.consumed, found.next_index, found.gaps) == (1, 4, whole.gaps)
        assert (found.finished, found.dropped, found.partial_groups) == (
            whole.finished,
            whole.dropped,
            whole.partial_groups,
        )
        assert found.dropped_versions == {2: 2}, "of the steps to come"
    journal.forget(3)
    assert set(map(str, journal.events())) == set(map(str, (STORY[1], STORY[2], TAKEN, STORY[5], *STORY[7:])))
    lost = recover(journal.events(), 0, 1)
    assert (lost.anew, lost.finished, lost.gaps, lost.next_index) == (True, {}, [0, 1, 3], 4)


def test_forgetting_deletes_what_was_dropped(journal):
    partial = PartialGroup(index=1, trajectories=(completion(2, Finish.ABORT),))
    late = (Dropped(index=1, reason="too old"), Dropped(index=3, reason="too old"))
    for event in (partial, finished(3), finished(4), *late):
        journal.write(event)
    journal.forget(0)
    assert tuple(journal.events()) == (finished(4), *late)


@pytest.mark.parametrize("name", JOURNALS)
def test_rows_stay_few_however_long_a_run_is(tmp_path, name):
    """One of each step and of each checkpoint's drops stays; a resumed run makes no object of a consumed group."""
    with closing(JOURNALS[name](tmp_path)) as journal:
        for step in range(60):
            indices = tuple(range(5 * step, 5 * step + 4))
            for index in (*indices, 5 * step + 4):
                journal.write(Issued(index=index, uid=str(index), version=1))
                journal.write(finished(index))
            journal.write(Dropped(index=5 * step + 4, reason="outpaced"))
            journal.write(Taken(step=step, indices=indices))
            if step % 20 == 19:
                journal.forget(step - 1)
        events = list(journal.events(58))
        counts = [sum(isinstance(event, kind) for event in events) for kind in (Issued, Finished, Taken)]
        assert counts == [8, 8, 60]
        if name == "sqlite":
            assert journal._db.execute("SELECT count(*) FROM events").fetchone() == (8 + 8 + 60 + 3,)
            assert not any(event.begun for event in events if isinstance(event, Taken))
        found = recover(events, 58, 4)
        assert (found.next_index, len(found.finished), len(found.dropped)) == (300, 8, 60)
        assert len(Schedule.of(journal.events()).spans) == 240


def test_what_a_lost_life_took_is_not_forgotten_for_it(journal):
    """Its second life has group 1, finished and not yet taken, when it forgets a step that took 1 in the first."""
    for event in (
        STORY[0],
        STORY[1],
        finished(0),
        finished(1),
        Taken(step=0, indices=(0,)),
        Taken(step=1, indices=(1,)),
    ):
        journal.write(event)
    journal.write(Restarted(step=0))
    for event in (STORY[0], STORY[1], finished(0), finished(1), Taken(step=0, indices=(0,))):
        journal.write(event)
    journal.forget(2)
    found = recover(journal.events(), 1, 1)
    assert (found.anew, set(found.finished), found.gaps) == (False, {1}, [])


def test_what_is_void_stays_void(journal):
    """A run whose tokens were forgotten begins again: what its first life took is no script for its third."""
    for event in (*STORY, Restarted(step=0), Issued(index=1, uid="b", version=1), finished(1)):
        journal.write(event)
    found = recover(journal.events(), 0, 1)
    assert (found.script, set(found.finished), found.partial_groups) == ({}, {1}, {})
    assert found.gaps == [0, 3]
    journal.write(Taken(step=0, indices=(1,)))
    again = recover(journal.events(), 1, 1)
    assert (again.consumed, again.gaps, again.finished) == (1, [0, 3], {})
    schedule = Schedule.of(journal.events())
    assert (schedule.taken, schedule.flips) == ({0: (1,)}, {})


def test_what_a_run_goes_on_with():
    found = recover(STORY, 1, 1)
    assert (found.consumed, found.next_index) == (1, 4)
    assert set(found.finished) == {3}
    assert found.gaps == [1]
    assert found.dropped == {2: "failed"}
    assert [one.finish for one in found.partial_groups[1]] == [Finish.ABORT, Finish.ABORT]
    assert found.script == {}
    earlier = recover(STORY, 0, 1)
    assert earlier.script == {0: (0,)}
    assert set(earlier.finished) == {0, 3}
    assert earlier.consumed == 0


def test_without_a_journal_the_data_is_where_sync_training_would_be():
    found = recover((), 5, 4)
    assert (found.consumed, found.next_index, found.gaps) == (20, 20, [])


def test_files_outlive_the_process_that_wrote_them(tmp_path):
    writer = JOURNALS["sqlite"](tmp_path)
    for event in STORY[:6]:
        writer.write(event)
    writer.flush()
    shutil.copytree(tmp_path / "deep", tmp_path / "killed" / "deep")  # the writer never closed it
    with closing(JOURNALS["sqlite"](tmp_path / "killed")) as reader:
        assert tuple(reader.events()) == STORY[:6]
    assert not list(tmp_path.rglob("*-shm")), "hosts that share a file system share no memory"
    writer.close()


def test_a_second_process_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("offbeat_trainer.loops.journal.BUSY_TIMEOUT_S", 0.01)
    with (
        closing(JOURNALS["sqlite"](tmp_path)),
        pytest.raises(ResumeError, match="journal: database is locked; a run is at work in it"),
    ):
        JOURNALS["sqlite"](tmp_path)


def test_one_process_goes_on_where_another_ended(tmp_path):
    told = []
    for number, event in enumerate(STORY):
        with closing(JOURNALS["sqlite"](tmp_path)) as journal:
            assert tuple(journal.events()) == tuple(told)
            journal.write(event)
            told.append(event)
            if number == 6:
                journal.forget(1)
                told = [STORY[1], STORY[2], TAKEN, STORY[5], STORY[6]]
    with closing(JOURNALS["sqlite"](tmp_path)) as journal:
        assert tuple(journal.events()) == tuple(told)


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


def test_files_that_are_no_journals_are_refused(tmp_path):
    (tmp_path / "text").write_text("not a database, and long enough to be looked at" * 100)
    with pytest.raises(ResumeError, match="cannot be used as a journal"):
        SqliteJournal(tmp_path / "text")
    newer = sqlite3.connect(tmp_path / "newer")
    newer.execute("PRAGMA user_version=99")
    newer.close()
    with pytest.raises(ResumeError, match="has format 99, this version reads 3"):
        SqliteJournal(tmp_path / "newer")


def test_a_file_of_the_format_before_is_gone_on_with(tmp_path):
    path = tmp_path / "journal.sqlite"
    SqliteJournal(path).close()
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version=2")
    with closing(SqliteJournal(path)) as journal:
        for event in (STORY[0], replace(finished(0), trajectories=()), STORY[4]):  # what it had forgotten
            journal.write(event)
        assert recover(journal.events(), 0, 1).anew
        journal._db.execute("UPDATE events SET version = 1 WHERE kind = 'taken'")
        journal.forget(1)
        assert tuple(journal.events()) == (TAKEN,)
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (3,)


@pytest.mark.parametrize(
    ("index", "query", "values"),
    [("groups", f"DELETE {_OF_GROUP}", (1,)), ("open", _NOT_OVER, ())],
)
def test_to_forget_a_group_is_no_walk_over_the_whole_run(tmp_path, index, query, values):
    with closing(SqliteJournal(tmp_path / "journal.sqlite")) as journal:
        plan = journal._db.execute(f"EXPLAIN QUERY PLAN {query}", values).fetchall()
    assert [f"INDEX {index}" in step[3] for step in plan] == [True], plan


def test_closing_waits_for_what_another_thread_still_forgets(tmp_path, monkeypatch):
    """A run that ends while it forgets in a thread: SQLite crashes the process where a connection is closed in use."""
    kept = SqliteJournal(tmp_path / "journal.sqlite")
    for index in range(4):
        kept.write(Issued(index=index, uid=str(index), version=1))
    kept.flush()
    under_way, failures = threading.Event(), []
    inner = kept._forget

    def slow(before_step):
        under_way.set()
        time.sleep(0.5)  # the other thread closes meanwhile, where nothing keeps it from that
        inner(before_step)

    def forget():
        try:
            kept.forget(3)
        except sqlite3.Error as error:
            failures.append(error)

    monkeypatch.setattr(kept, "_forget", slow)
    thread = threading.Thread(target=forget)
    thread.start()
    assert under_way.wait(60)
    kept.close()
    thread.join(60)
    assert failures == []
    kept.forget(3)  # one that comes after the end finds nothing to do
