"""Collections while a stream is open."""

import gc

from offbeat_trainer.garbage import RARER, rare_full_collections


def test_full_collections_are_rarer_in_the_block_and_as_before_after_it():
    before = gc.get_threshold()
    with rare_full_collections():
        assert gc.get_threshold() == (*before[:2], before[2] * RARER)
    assert gc.get_threshold() == before


def test_an_error_in_the_block_changes_nothing_about_that():
    before = gc.get_threshold()
    opened = rare_full_collections()
    opened.__enter__()
    assert not opened.__exit__(KeyError, KeyError(), None)
    assert gc.get_threshold() == before
