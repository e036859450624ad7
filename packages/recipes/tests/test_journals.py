"""A run's journal is found again."""

from contextlib import closing

import pytest

from offbeat_recipes.planning.replay import existing_journal, open_journal
from offbeat_trainer.errors import ResumeError
from offbeat_trainer.loops.events import Issued

EVENT = Issued(index=0, uid="a", version=1)


def test_a_run_goes_on_with_the_journal_it_began(tmp_path):
    assert existing_journal(tmp_path) is None
    for told in ((EVENT,), (EVENT, EVENT)):
        with closing(open_journal(tmp_path)) as journal:
            journal.write(EVENT)
            assert tuple(journal.events()) == told


@pytest.mark.parametrize("opened", [open_journal, existing_journal])
def test_segments_of_an_earlier_version_are_refused(tmp_path, opened):
    (tmp_path / "checkpoints" / "journal").mkdir(parents=True)
    with pytest.raises(ResumeError, match="finish the run with the version that began it"):
        opened(tmp_path)
