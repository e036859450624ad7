"""Collections while a stream is open."""

import gc

from offbeat_trainer.loops.online import RARER, rare_full_collections


def test_full_collections_are_rarer_in_the_block_and_as_before_after_it():
    before = gc.get_threshold()
    with rare_full_collections():
        young, middle, full = gc.get_threshold()
        assert young == before[0]
        # A look at the middle generation comes after `middle` + 1 at the young one; either way is begun by 700 objects.
        assert (middle + 2) * full >= before[1] * before[2] * RARER
    assert gc.get_threshold() == before


def test_young_objects_that_stay_are_looked_at_once():
    looked_at: list[int] = []

    def note(phase, info):
        if phase == "start":
            looked_at.append(info["generation"])

    with rare_full_collections():
        gc.collect()
        gc.callbacks.append(note)
        stay = [[number] for number in range(20 * gc.get_threshold()[0])]
        gc.callbacks.remove(note)
    assert len(stay) > len(looked_at) > 10
    assert set(looked_at) == {0}


def test_an_error_in_the_block_changes_nothing_about_that():
    before = gc.get_threshold()
    opened = rare_full_collections()
    opened.__enter__()
    assert not opened.__exit__(KeyError, KeyError(), None)
    assert gc.get_threshold() == before
