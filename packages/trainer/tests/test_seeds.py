"""Seeds are part of what a run folder means: they must not change between releases, machines or processes."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from offbeat_trainer.rollouts.single import derive_seed, derive_seeds

parts = st.lists(
    st.integers() | st.text(alphabet=st.characters(codec="utf-8", exclude_characters="/")), max_size=5
)


def test_golden_values():
    assert derive_seed(0) == 4761921975702974394
    assert derive_seed(7, "sample", 3) == 1010599690753118703
    assert derive_seed("held out", 12) == 4020226054029489996


def test_every_part_and_their_order_matter():
    seeds = [derive_seed(*some) for some in ((1, 2), (2, 1), (12,), (1, 2, 0), (1, "a"), (1, "b"), ())]
    assert len(set(seeds)) == len(seeds)


@given(parts)
def test_fits_a_signed_64_bit_word_and_follows_the_documented_digest(drawn):
    seed = derive_seed(*drawn)
    digest = hashlib.blake2b("/".join(map(str, drawn)).encode("utf-8", "strict"), digest_size=8).hexdigest()
    assert seed == int(digest, 16) // 2
    assert 0 <= seed < 2**63


@given(parts, st.lists(st.integers(), max_size=5))
def test_seeds_of_many_places_are_those_of_each_place(drawn, places):
    assert derive_seeds(*drawn, places=places) == [derive_seed(*drawn, place) for place in places]
