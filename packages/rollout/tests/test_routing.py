from __future__ import annotations

import pickle
import random
from collections import Counter

import pytest

from offbeat_rollout import GenerateRequest, SamplingParams
from offbeat_rollout.toolkit.routing import Router, cost_tokens


def request(index, prompt=(1, 2, 3), max_tokens=32, session=None):
    return GenerateRequest(
        request_id=str(index),
        prompt_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens),
        session=session,
    )


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 7])
def test_a_batch_is_balanced_within_the_slack_and_one_request(num_replicas):
    rng = random.Random(num_replicas)
    names = [f"r{i}" for i in range(num_replicas)]
    for trial in range(30):
        router = Router(names, slack=0.05)
        batch = [
            request(i, tuple(rng.randrange(100) for _ in range(rng.randrange(1, 60))), rng.randrange(1, 200))
            for i in range(rng.randrange(1, 300))
        ]
        shares = router.route(batch, names)
        assert sorted(index for share in shares.values() for index in share) == list(range(len(batch)))
        mean = sum(map(cost_tokens, batch)) / num_replicas
        spread = max(router.loads.values()) - min(router.loads.values())
        assert spread <= 0.05 * mean + max(map(cost_tokens, batch)), f"trial {trial}"


def test_ten_thousand_single_requests_fall_evenly_and_not_always_on_the_first():
    """Arrivals and departures at random: at every moment the loads are close, and ties do not favour anyone."""
    rng = random.Random(0)
    names = [f"r{i}" for i in range(4)]
    router = Router(names)
    running, count = [], Counter()
    for i in range(10_000):
        one = request(i, (i,), rng.randrange(1, 100))
        [(name, _)] = router.route([one], names).items()
        count[name] += 1
        running.append((name, one))
        while len(running) > rng.randrange(60):
            router.release(*running.pop(rng.randrange(len(running))))
    assert max(count.values()) - min(count.values()) < 300
    # An idle pool is all ties: each replica must get its turn.
    for name, left in running:
        router.release(name, left)
    idle = Counter()
    for i in range(400):
        [(name, _)] = router.route([request(i, (i, i))], names).items()
        idle[name] += 1
        router.release(name, request(i, (i, i)))
    assert set(idle.values()) == {100}


def test_samples_of_a_prompt_stay_together():
    names = ["a", "b"]
    batch = [request(i, (i // 8,)) for i in range(256)]
    shares = Router(names).route(batch, names)
    homes = {name: {batch[index].prompt_ids for index in share} for name, share in shares.items()}
    assert len(homes["a"] & homes["b"]) <= 2
    assert abs(len(shares["a"]) - len(shares["b"])) <= 8


def test_a_prompt_comes_back_to_its_replica_until_that_is_unfair():
    names = ["a", "b"]
    router = Router(names, slack=0.5)
    [(home, _)] = router.route([request(0, (7,), 10)], names).items()
    router.release(home, request(0, (7,), 10))
    other = "b" if home == "a" else "a"
    assert list(router.route([request(1, (8,), 10)], names)) == [other], "a new prompt takes the next turn"
    assert list(router.route([request(2, (7,), 10)], names)) == [home]
    assert list(router.route([request(3, (7,), 1000)], [other])) == [other], "only allowed replicas count"
    assert list(router.route([request(4, (7,), 10)], names)) == [home], "its new home is too far ahead"


def test_one_prompt_alone_is_still_split():
    names = ["a", "b"]
    shares = Router(names).route([request(i) for i in range(100)], names)
    assert {len(share) for share in shares.values()} <= set(range(45, 56))


@pytest.mark.parametrize("others", [0, 40])
def test_the_turns_of_a_session_stay_on_one_replica_while_its_prompt_grows(others):
    rng = random.Random(0)
    names = [f"r{i}" for i in range(4)]
    router = Router(names)
    homes = {session: set() for session in range(21)}
    running = []
    for turn in range(1, 6):
        while running:
            router.release(*running.pop())
        for i in range(others):  # others come and go: the least loaded is another one each time
            other = request(f"o{turn}/{i}", (turn, i), rng.randrange(1, 100))
            [(name, _)] = router.route([other], [rng.choice(names)]).items()
            running.append((name, other))
        for session, seen in homes.items():
            prompt = tuple(range(session, session + 1000 * turn))
            asked = request(f"{session}/{turn}", prompt, session=f"s{session}")
            [(name, _)] = router.route([asked], names).items()
            seen.add(name)
            router.release(name, asked)
    assert all(len(seen) == 1 for seen in homes.values())
    if not others:
        assert {name for seen in homes.values() for name in seen} == set(names), "new sessions go anywhere"


def test_a_session_leaves_a_replica_that_is_far_ahead():
    names = ["a", "b"]
    router = Router(names)
    [(home, _)] = router.route([request(0, (1,) * 50, session="s")], names).items()
    (other,) = {*names} - {home}
    router.route([request(1, (2,), 1000)], [home])
    assert list(router.route([request(2, (1,) * 100, session="s")], names)) == [other]


def test_what_is_remembered_of_a_prompt_does_not_grow_with_it():
    router = Router(["a", "b"])
    for i in range(10):
        router.route([request(i, (i,) * 100_000)], ["a", "b"])
    kept = pickle.dumps(router)
    assert len(kept) < 2000, "ten prompts of 100,000 tokens each"


def test_replicas_come_and_go():
    router = Router()
    router.add("a")
    router.route([request(i) for i in range(10)], ["a"])
    router.add("b")
    assert list(router.route([request("n", (9,))], ["a", "b"])) == ["b"], "the newcomer has nothing to do"
    router.drop("a")
    assert set(router.loads) == {"b"}
    assert list(router.route([request("m")], ["a", "b"])) == ["b"]
    router.add("b")
    assert router.loads == {"b": 0}, "a new life has nothing to do"
