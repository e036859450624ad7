"""The gate's rules against brute force."""

import random
from collections import Counter
from dataclasses import dataclass
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from offbeat_trainer.data.types import version_of
from offbeat_trainer.loops.buffer import StalenessGate


@dataclass(frozen=True)
class Job:
    name: int
    last_step: int


def fits(jobs, step, per_step):
    """Whether one can train all `jobs` from `step` on, `per_step` a step, each by its last step."""
    ordered = sorted(jobs, key=lambda job: job.last_step)
    return all(step + place // per_step <= job.last_step for place, job in enumerate(ordered))


@given(m=st.integers(0, 5), step=st.integers(0, 20), age=st.integers(0, 5))
def test_a_token_may_be_trained_until_it_is_max_staleness_old(m, step, age):
    gate = StalenessGate(max_staleness=m, groups_per_step=1, num_steps=100)
    version = version_of(step) - age
    assert (step <= gate.last_step(version)) == (age <= m)


@given(
    m=st.integers(0, 4), n=st.integers(1, 4), step=st.integers(0, 3), lag=st.integers(0, 4),
    ages=st.lists(st.integers(0, 6), max_size=12),
)  # fmt: skip
def test_one_more_group_is_let_in_exactly_while_all_fit(m, n, step, lag, ages):
    """With everything outstanding at least as urgent as the newcomer, `room` is what brute force says."""
    gate = StalenessGate(max_staleness=m, groups_per_step=n, num_steps=100)
    served = max(1, version_of(step) - min(lag, m))
    newest = gate.last_step(served)
    jobs = [Job(i, max(step, newest - age)) for i, age in enumerate(ages)]
    if not fits(jobs, step, n):
        return
    room = gate.room(step, served, len(jobs))
    fitting = 0
    while fits([*jobs, *(Job(-i, newest) for i in range(fitting + 1))], step, n):
        fitting += 1
    assert room == fitting


@given(n=st.integers(1, 3), lasts=st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=8))
def test_a_step_is_ready_exactly_when_some_choice_leaves_the_rest_in_time(n, lasts):
    gate = StalenessGate(max_staleness=4, groups_per_step=n, num_steps=100)
    jobs = [Job(i, last) for i, (last, _) in enumerate(lasts)]
    if not fits(jobs, 0, n):
        return
    finished = [job for job, (_, done) in zip(jobs, lasts, strict=True) if done]
    outstanding = Counter(job.last_step for job in jobs)
    good = [
        set(some)
        for some in combinations(finished, n)
        if fits([job for job in jobs if job not in some], 1, n)
    ]
    ready = gate.ready(0, outstanding, Counter(job.last_step for job in finished))
    assert ready == bool(good)
    if ready:
        chosen = gate.choose(0, finished, outstanding)
        assert set(chosen) in good
        names = [sorted(job.name for job in some) for some in good]
        assert sorted(job.name for job in chosen) == min(names), "the first of those that may be chosen"


def test_generation_ends_with_the_run():
    gate = StalenessGate(max_staleness=4, groups_per_step=2, num_steps=3)
    assert gate.room(0, 1, 0) == 6
    assert gate.room(2, 3, 2) == 0


def choose_slowly(gate, step, finished, outstanding):
    """What `choose` says, with the whole of what is owed counted anew after each group."""
    owed, chosen = gate.due(step, outstanding), []
    for one in finished:
        slots = gate.groups_per_step - len(chosen)
        if slots == 0:
            break
        if not any(must >= slots for by, must in owed.items() if by < one.last_step):
            chosen.append(one)
            owed = {by: must - (one.last_step <= by) for by, must in owed.items()}
    return chosen


def test_choose_is_what_counting_anew_gives():
    dice = random.Random(5)
    compared = passed_over = 0
    while compared < 2000:
        size, staleness = dice.randint(1, 5), dice.randint(0, 5)
        gate = StalenessGate(max_staleness=staleness, groups_per_step=size, num_steps=100)
        begun = [
            Job(name, dice.randint(0, staleness))
            for name in range(dice.randint(size, size * (staleness + 1)))
        ]
        outstanding = Counter(one.last_step for one in begun)
        finished = [one for one in begun if dice.random() < 0.8]
        dice.shuffle(finished)
        if any(must > size for must in gate.due(0, outstanding).values()):
            continue  # more is owed than a step takes: the gate lets no run get there
        if not gate.ready(0, outstanding, Counter(one.last_step for one in finished)):
            continue
        chosen = gate.choose(0, iter(finished), outstanding)
        assert chosen == choose_slowly(gate, 0, finished, outstanding)
        compared += 1
        passed_over += chosen != finished[:size]
    assert passed_over > 200


@given(n=st.integers(1, 2000), percent=st.integers(0, 200))
def test_over_sampling_begins_the_share_that_it_says_rounded_up(n, percent):
    gate = StalenessGate(max_staleness=0, groups_per_step=n, num_steps=1, over_sampling=percent / 100)
    assert gate.width == n + -(-n * percent // 100)
